"""The sampling rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative_t5x.errors import UserError
from speculative_t5x.sampling import MIN_TEMPERATURE, SamplingRule

LOGITS = np.random.default_rng(0).normal(size=(3, 2, 11)).astype(np.float32) * 3


def test_plain_is_softmax_at_the_temperature():
  law = SamplingRule(0.7).distribution(jnp.asarray(LOGITS))
  np.testing.assert_allclose(law, jax.nn.softmax(LOGITS / 0.7), atol=1e-6)


@pytest.mark.parametrize('temperature', [0.0, MIN_TEMPERATURE])
@pytest.mark.parametrize('filters', [{}, {'topk': 3}, {'topp': 0.5}])
def test_greedy_is_one_hot_whatever_the_filters(temperature, filters):
  rule = SamplingRule(temperature, **filters)
  assert rule.is_greedy
  law = np.asarray(rule.distribution(jnp.asarray(LOGITS)))
  np.testing.assert_array_equal(law.argmax(-1), LOGITS.argmax(-1))
  np.testing.assert_array_equal(law.sum(-1), 1)
  np.testing.assert_array_equal((law > 0).sum(-1), 1)


@given(st.integers(1, 14), st.floats(0.3, 3.0))
@settings(max_examples=20, deadline=None)
def test_topk_keeps_the_k_largest(topk, temperature):
  law = np.asarray(SamplingRule(temperature, topk=topk).distribution(jnp.asarray(LOGITS)))
  np.testing.assert_array_equal((law > 0).sum(-1), min(topk, 11))
  np.testing.assert_allclose(law.sum(-1), 1, atol=1e-6)


def test_topk_keeps_ties():
  law = SamplingRule(1.0, topk=1).distribution(jnp.asarray([[1.0, 1.0, 0.0]]))
  np.testing.assert_allclose(law, [[0.5, 0.5, 0.0]], atol=1e-6)


@given(st.floats(0.01, 1.0), st.floats(0.3, 3.0))
@settings(max_examples=20, deadline=None)
def test_topp_keeps_the_smallest_set_with_the_mass(topp, temperature):
  full = np.asarray(jax.nn.softmax(LOGITS / np.float32(temperature))).astype(np.float64)
  law = np.asarray(SamplingRule(temperature, topp=topp).distribution(jnp.asarray(LOGITS)))
  kept = np.where(law > 0, full, 0)
  assert (kept.sum(-1) >= topp - 1e-5).all()
  smallest = np.where(law > 0, full, np.inf).min(-1)
  assert (kept.sum(-1) - smallest < topp + 1e-5).all()


def test_temperature_a_row():
  rule = SamplingRule(jnp.asarray([0.0, 0.5, 2.0]))
  law = rule.distribution(jnp.asarray(LOGITS))
  for row, temperature in enumerate([0.0, 0.5, 2.0]):
    np.testing.assert_allclose(
        law[row], SamplingRule(temperature).distribution(jnp.asarray(LOGITS[row])), atol=1e-6)


@pytest.mark.parametrize(
    ('settings_', 'named'),
    [({'temperature': -0.1}, 'temperature'), ({'topk': -1}, 'topk'), ({'topp': 1.5}, 'topp'),
     ({'topk': 2, 'topp': 0.5}, 'topk and topp'), ({'temperature': float('nan')}, 'temperature')],
)
def test_out_of_range_is_refused(settings_, named):
  with pytest.raises(UserError, match=named):
    SamplingRule(**settings_)
