"""T5X's own decoding as the planner compiles it."""

import dataclasses

import pytest

pytest.importorskip('t5x.decoding', reason='needs T5X, which is not on PyPI')

import jax
import jax.numpy as jnp
import numpy as np

from speculative_t5x.network import T5Config, Transformer
from speculative_t5x.pair import Model, Pair
from speculative_t5x.sampling import SamplingRule
from speculative_t5x.t5x_integration import plan

CONFIG = T5Config(
    vocab_size=24, emb_dim=8, num_heads=2, head_dim=4, num_encoder_layers=2, num_decoder_layers=2,
    mlp_dim=16, mlp_activations=('gelu', 'linear'))
INPUTS = np.array([[5, 9, 13, 1, 0, 0], [7, 3, 1, 0, 0, 0], [2, 2, 8, 4, 6, 1]], np.int32)


@dataclasses.dataclass
class Vocabulary:
  """Its size is all that decoding asks for."""

  size: int = 24
  eos_id: int = 1
  pad_id: int = 0


def test_it_decodes_what_plain_decoding_does():
  """The same parameters, greedily; and another choice of tokens when they are sampled."""
  decode = plan.target_alone(CONFIG, SamplingRule(), 10)
  ones = jnp.ones((1, 1), jnp.int32)
  ours = Transformer(CONFIG)
  params = ours.init(jax.random.key(3), ones, ones)['params']
  key = jax.random.key_data(jax.random.key(0))
  found, scores = jax.jit(decode)(params, INPUTS, key)
  expected = Pair(Model(ours, params), None, Vocabulary(), gamma=0).plain(INPUTS, max_length=10)
  np.testing.assert_array_equal(found, expected.sequences[:, 0])
  assert scores.shape == (3,) and len(np.unique(found)) > 2
  sample = plan.target_alone(CONFIG, SamplingRule(5.0), 10)
  assert np.any(jax.jit(sample)(params, INPUTS, key)[0] != found)
