"""Widened networks compute what the original does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative_t5x.demo import tasks
from speculative_t5x.demo.__main__ import load_demo_pair
from speculative_t5x.errors import UserError
from speculative_t5x.network import T5Config, Transformer
from speculative_t5x.pair import Model
from speculative_t5x.widening import widen

SMALL = T5Config(
    vocab_size=24, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=12, num_encoder_layers=1,
    num_decoder_layers=2, mlp_activations=('gelu', 'linear'), logits_via_embedding=True)
WIDER = {
    'residual stream': {'emb_dim': 20}, 'heads': {'num_heads': 5},
    'width of a head': {'head_dim': 7}, 'feed-forward': {'mlp_dim': 30},
    'encoder layers': {'num_encoder_layers': 3},
    'decoder layers': {'num_decoder_layers': 4}, 'vocabulary': {'vocab_size': 40},
    'untied': {'logits_via_embedding': False},
    'all': {'emb_dim': 20, 'num_heads': 5, 'head_dim': 7, 'mlp_dim': 30, 'num_encoder_layers': 3,
            'num_decoder_layers': 4, 'vocab_size': 40},
    'all and untied': {'emb_dim': 20, 'num_heads': 5, 'head_dim': 7, 'mlp_dim': 30,
                       'num_encoder_layers': 3, 'num_decoder_layers': 4, 'vocab_size': 40,
                       'logits_via_embedding': False},
}


def random_params(config, seed=0):
  """Parameters of which none is 0 or 1, norms and biases included."""
  tokens = jnp.ones((1, 1), jnp.int32)
  params = Transformer(config).init(jax.random.key(seed), tokens, tokens)['params']
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
  return tree.unflatten([
      x + 0.3 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)])


def logits(config, params):
  rng = np.random.default_rng(0)
  inputs, outputs = rng.integers(1, 24, (3, 9)), rng.integers(0, 24, (3, 7))
  inputs[1, 5:] = 0
  return np.asarray(jax.jit(Transformer(config).apply)({'params': params}, inputs, outputs))


@pytest.mark.parametrize('tied', [True, False])
@pytest.mark.parametrize('name', WIDER)
def test_logits_stay_the_same(name, tied):
  config = dataclasses.replace(SMALL, logits_via_embedding=tied)
  wide = dataclasses.replace(config, **WIDER[name])
  params = random_params(config)
  widened = widen(params, config, wide, jax.random.key(7))
  tokens = jnp.ones((1, 1), jnp.int32)
  like = jax.eval_shape(Transformer(wide).init, jax.random.key(0), tokens, tokens)['params']
  assert jax.tree.map(jnp.shape, widened) == jax.tree.map(jnp.shape, like)
  np.testing.assert_allclose(
      logits(wide, widened)[..., :24], logits(config, params), atol=1e-4, rtol=1e-4)


def test_what_is_new_is_random_where_it_may_be():
  """Other keys give other weights; it is not an identity by being all zeros."""
  wide = dataclasses.replace(SMALL, **WIDER['all'])
  one, other = (widen(random_params(SMALL), SMALL, wide, jax.random.key(seed)) for seed in (1, 2))
  differing = jax.tree.map(lambda a, b: float(jnp.mean(a != b)), one, other)
  for module in ('query', 'key', 'value'):
    assert differing['decoder']['layers_0']['self_attention'][module]['kernel'] > 0.4
  assert differing['decoder']['layers_3']['mlp']['wi_0']['kernel'] == 1


def test_a_row_that_is_not_zero_is_noticed():
  wide = dataclasses.replace(SMALL, mlp_dim=30)
  params = random_params(SMALL)
  widened = widen(params, SMALL, wide, jax.random.key(7))
  kernel = widened['decoder']['layers_1']['mlp']['wo']['kernel']
  widened['decoder']['layers_1']['mlp']['wo']['kernel'] = kernel.at[20].set(10.0)
  assert np.abs(logits(wide, widened) - logits(SMALL, params)).max() > 1e-3


def test_the_embedded_pair_says_the_same_in_a_larger_network():
  pair = load_demo_pair()
  config = pair.target.module.config
  wide = dataclasses.replace(
      config, emb_dim=384, num_heads=6, num_decoder_layers=8, logits_via_embedding=False)
  params = widen(pair.target.params, config, wide, jax.random.key(0))
  larger = dataclasses.replace(pair, target=Model(Transformer(wide), params))
  texts = [text for text, _ in tasks.examples(tasks.read_pairs(tasks.HELD_OUT), 'restoration')]
  ids = [[*pair.vocabulary.encode(text), pair.vocabulary.eos_id] for text in texts]
  short = [row for row in ids if len(row) <= 24][:4]
  inputs = np.array([row + [0] * (24 - len(row)) for row in short], np.int32)
  original = pair.predict(inputs, max_length=24, gamma=4)
  found = larger.predict(inputs, max_length=24, gamma=4)
  np.testing.assert_array_equal(original.sequences, found.sequences)
  np.testing.assert_array_equal(original.statistics.accepted, found.statistics.accepted)


@pytest.mark.parametrize('changes, named', [
    ({'emb_dim': 4}, 'emb_dim: expected at least 8, found 4'),
    ({'mlp_activations': ('relu',)}, 'mlp_activations: expected'),
])
def test_sizes_that_cannot_be_reached_are_refused(changes, named):
  with pytest.raises(UserError, match=named):
    widen(random_params(SMALL), SMALL, dataclasses.replace(SMALL, **changes), jax.random.key(0))
  untied = dataclasses.replace(SMALL, logits_via_embedding=False)
  with pytest.raises(UserError, match='logits_via_embedding'):
    widen(random_params(untied), untied, SMALL, jax.random.key(0))
