"""Drafters beyond a second model."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import toy
from speculative_t5x import decoding
from speculative_t5x.drafters import CopyingDrafter, ModelDrafter, check_drafter
from speculative_t5x.errors import UserError
from speculative_t5x.sampling import SamplingRule

# Each distribution test rejects a correct program with this probability.
ERROR_RATE = 1e-4


def copied(inputs, output, gamma, **settings):
  """What is copied for one row whose output is `output`, and the match's length."""
  inputs = np.asarray([inputs], np.int32).reshape(1, -1)
  sequences = np.zeros((1, len(output) + 6), np.int32)
  sequences[0, 1 : len(output) + 1] = output
  # What lies behind the row's end must not matter.
  sequences[0, len(output) + 1 :] = 7
  tokens, length = CopyingDrafter(**settings).copy(
      jnp.asarray(inputs), jnp.asarray(sequences), jnp.asarray([len(output)]), gamma)
  return tokens[0].tolist(), int(length[0])


def test_the_longest_match_wins_then_the_latest():
  # 5 6 is matched by two tokens in the input, 6 alone in the output.
  assert copied([5, 6, 8, 9], [6, 3, 5, 6], 2) == ([8, 9], 2)
  assert copied([2, 6, 4, 3, 6, 5], [9, 6], 1) == ([5], 1)
  # Of the input and the output the later one.
  assert copied([6, 4], [6, 3, 6], 1) == ([3], 1)


def test_no_match_proposes_padding():
  assert copied([2, 3], [4], 3) == ([0, 0, 0], 0)
  assert copied([], [], 2) == ([0, 0], 0)
  assert copied([2, 6, 4], [6], 2, min_ngram=2) == ([0, 0], 0)


def test_a_match_at_the_end_of_the_row_goes_round():
  assert copied([], [4, 5, 4, 5], 5) == ([4, 5, 4, 5, 4], 2)
  assert copied([], [3, 3], 3) == ([3, 3, 3], 1)


def by_hand(inputs, output, gamma, max_ngram):
  """The same by loops over lists."""
  context = [*inputs, 0, *output]
  end = len(context) - 1
  best, start = 0, None
  for place in range(end):
    length = 0
    while (length < max_ngram and place - length >= 0 and context[place - length]
           and context[place - length] == context[end - length]):
      length += 1
    if length and length >= best:
      best, start = length, place
  if not best:
    return [0] * gamma, 0
  return [context[start + 1 + i % (end - start)] for i in range(gamma)], best


@hypothesis.given(
    st.lists(st.integers(1, 4), max_size=8), st.lists(st.integers(1, 4), max_size=8),
    st.integers(1, 4))
@hypothesis.settings(max_examples=60, deadline=None)
def test_copying_is_what_loops_over_lists_give(inputs, output, max_ngram):
  assert copied(inputs, output, 4, max_ngram=max_ngram) == by_hand(inputs, output, 4, max_ngram)


def decode(target, *, gamma, rule, batch, length, inputs=None, drafter=None, state=None):
  slots = decoding.cache_slots(length, gamma)
  prompts = jnp.zeros((batch, length), jnp.int32) if inputs is None else jnp.asarray(inputs)
  run = functools.partial(
      decoding.speculative_decode, prompts, target.cache(batch, slots), target, toy.EOS,
      gamma=gamma, drafter=drafter, draft_state=state, rule=rule, decode_rng=jax.random.key(1))
  return jax.jit(run)()


@pytest.mark.parametrize('gamma', [1, 3])
@pytest.mark.parametrize('rule', [SamplingRule(1.0), SamplingRule(0.8, topk=3)], ids=str)
def test_copied_samples_follow_the_target(gamma, rule):
  target, batch = toy.Toy(4, 1), 120_000
  # Inputs that differ by row, some without any match.
  context = np.random.default_rng(0).integers(0, 4, (batch, 6)).astype(np.int32)
  result = decode(target, gamma=gamma, rule=rule, batch=batch, length=3,
                  drafter=CopyingDrafter(), state=jnp.asarray(context))
  statistic, freedom = toy.chi_square(
      np.asarray(result.sequences[:, 0]), target.exact(3, rule))
  assert scipy.stats.chi2.sf(statistic, freedom) > ERROR_RATE
  assert np.any(result.statistics.accepted) and np.any(result.statistics.rejected)


@pytest.mark.parametrize('gamma', [1, 4])
def test_copied_greedy_outputs_equal_plain_ones(gamma):
  target = toy.Toy(6, 3, scale=3)
  rng = np.random.default_rng(0)
  inputs = np.zeros((20, 24), np.int32)
  inputs[:, 1:4] = rng.integers(2, 6, (20, 3))
  context = jnp.asarray(rng.integers(0, 6, (20, 5)), jnp.int32)
  run = functools.partial(decode, target, rule=SamplingRule(), batch=20, length=24, inputs=inputs)
  plain = run(gamma=0)
  fast = run(gamma=gamma, drafter=CopyingDrafter(), state=context)
  np.testing.assert_array_equal(plain.sequences, fast.sequences)
  assert np.sum(fast.statistics.accepted) > 0
  # A ragged batch: every row copies as it does alone.
  alone = decode(target, gamma=gamma, rule=SamplingRule(), batch=1, length=24, inputs=inputs[3:4],
                 drafter=CopyingDrafter(), state=context[3:4])
  np.testing.assert_array_equal(
      alone.statistics.accepted_at_position[0], fast.statistics.accepted_at_position[3])


def test_drafters_are_interchangeable_at_the_same_randomness():
  """Which drafter guesses does not change greedy outputs."""
  target, draft = toy.Toy(6, 3, scale=3), toy.Toy(6, 4, scale=3)
  copying = decode(target, gamma=3, rule=SamplingRule(), batch=2, length=12,
                   drafter=CopyingDrafter(), state=jnp.zeros((2, 0), jnp.int32))
  model = decode(target, gamma=3, rule=SamplingRule(), batch=2, length=12,
                 drafter=ModelDrafter(draft, SamplingRule()), state=draft.cache(2, 16))
  np.testing.assert_array_equal(copying.sequences, model.sequences)


def test_unknown_drafters_are_named():
  with pytest.raises(UserError, match='drafter: expected one of model, copying, found guess'):
    check_drafter('guess')
