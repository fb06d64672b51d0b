"""Our network against T5X's own minimal network. Skipped where T5X is not installed."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative_t5x.network import T5Config, Transformer

# A submodule: this folder itself would pass for a package `t5x` without T5X.
t5x_network = pytest.importorskip(
    't5x.examples.t5.network', reason='needs T5X, which is not on PyPI'
)

SIZES = {
    'vocab_size': 50, 'emb_dim': 24, 'num_heads': 3, 'num_encoder_layers': 2,
    'num_decoder_layers': 3, 'head_dim': 7, 'mlp_dim': 40,
}
CHOICES = pytest.mark.parametrize('activations, tied', [
    (('relu',), True), (('relu',), False), (('gelu', 'linear'), True), (('gelu', 'linear'), False),
    (('silu', 'linear'), False),
])


def flatten(tree):
  return flax.traverse_util.flatten_dict(flax.core.unfreeze(tree), sep='/')


def both(**choices):
  """T5X's network and ours, made with the same keyword arguments."""
  choices = {**SIZES, 'dropout_rate': 0.0, **choices}
  return t5x_network.Transformer(t5x_network.T5Config(**choices)), Transformer(T5Config(**choices))


def texts(vocab_size, input_length=140, length=135):
  """Inputs with padding, targets shifted right, and targets; long enough for every bucket."""
  random = np.random.default_rng(0)
  inputs = random.integers(1, vocab_size, (3, input_length))
  inputs[1, input_length // 3 :] = 0
  inputs[2, 1:] = 0
  targets = random.integers(1, vocab_size, (3, length))
  shifted = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
  return inputs.astype(np.int32), shifted.astype(np.int32), targets.astype(np.int32)


def away_from_initial(params):
  """Initial scales are ones and would hide a norm without its scale."""
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  return tree.unflatten([
      leaf + 0.2 * jax.random.normal(key, leaf.shape)
      for leaf, key in zip(leaves, keys, strict=True)
  ])


def initialised(theirs, ours):
  inputs, shifted, targets = texts(SIZES['vocab_size'])
  variables = theirs.init(jax.random.key(0), inputs, shifted, targets, enable_dropout=False)
  return variables, ours.init(jax.random.key(0), inputs, shifted)


@CHOICES
def test_tree_shapes_and_logical_axes(activations, tied):
  expected, found = initialised(*both(mlp_activations=activations, logits_via_embedding=tied))
  describe = lambda tree: {name: (v.shape, v.dtype) for name, v in flatten(tree).items()}
  assert describe(found['params']) == describe(expected['params'])
  assert flatten(found['params_axes']) == flatten(expected['params_axes'])
  assert len(flatten(found['params_axes'])) == len(flatten(found['params']))


@CHOICES
def test_initial_values_have_t5x_sizes(activations, tied):
  expected, found = initialised(*both(mlp_activations=activations, logits_via_embedding=tied))
  expected = flatten(expected['params'])
  for name, value in flatten(found['params']).items():
    # The names seed the values, so equal initialisers give equal values.
    np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=1e-7, err_msg=name)


@CHOICES
def test_logits(activations, tied):
  theirs, ours = both(mlp_activations=activations, logits_via_embedding=tied)
  inputs, shifted, targets = texts(SIZES['vocab_size'])
  params = away_from_initial(initialised(theirs, ours)[0]['params'])
  expected = theirs.apply({'params': params}, inputs, shifted, targets, enable_dropout=False)
  logits = ours.apply({'params': params}, inputs, shifted)
  assert logits.dtype == expected.dtype == jnp.float32
  assert expected.std() > 0.5
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * max(1.0, float(expected.std())))


def test_encoder_output():
  theirs, ours = both()
  inputs, _, _ = texts(SIZES['vocab_size'])
  params = away_from_initial(initialised(theirs, ours)[0]['params'])
  expected = theirs.apply({'params': params}, inputs, enable_dropout=False, method=theirs.encode)
  encoded = ours.apply({'params': params}, inputs, method='encode')
  # What stands on padding is never attended to.
  real = inputs > 0
  np.testing.assert_allclose(
      np.asarray(encoded)[real], np.asarray(expected)[real], rtol=0, atol=1e-5
  )


def test_bfloat16_logits_are_as_near_as_bfloat16_is():
  theirs, ours = both(dtype='bfloat16', mlp_activations=('gelu', 'linear'))
  inputs, shifted, targets = texts(SIZES['vocab_size'])
  params = away_from_initial(initialised(theirs, ours)[0]['params'])
  expected = theirs.apply({'params': params}, inputs, shifted, targets, enable_dropout=False)
  logits = ours.apply({'params': params}, inputs, shifted)
  assert logits.dtype == jnp.float32
  assert jnp.abs(logits - expected).mean() < 0.03 * expected.std()


def test_public_checkpoint(shared_data):
  path = shared_data / 'test_t5_tiny.checkpoint_0'
  params = flax.serialization.msgpack_restore(path.read_bytes())['optimizer']['target']
  theirs, ours = both(
      vocab_size=32128, emb_dim=8, num_heads=4, num_decoder_layers=2, head_dim=3, mlp_dim=16,
      mlp_activations=('gelu', 'linear'),
  )
  inputs, shifted, targets = texts(32128, input_length=20, length=9)
  expected = theirs.apply({'params': params}, inputs, shifted, targets, enable_dropout=False)
  logits = ours.apply({'params': params}, inputs, shifted)
  assert np.isfinite(logits).all() and expected.std() > 0
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
