"""Our network against T5X's own minimal network. Skipped where T5X is not installed."""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trees
from speculative_t5x.network import T5Config, Transformer
from trees import flatten

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


def random_params(theirs):
  """Parameters by T5X's names and shapes, none at its initial value."""
  init = functools.partial(theirs.init, enable_dropout=False)
  shapes = jax.eval_shape(init, jax.random.key(0), *texts(SIZES['vocab_size']))['params']
  return trees.random_params(shapes, SIZES['head_dim'])


def logits_of_both(theirs, ours, params, inputs, shifted, targets):
  apply = functools.partial(theirs.apply, enable_dropout=False)
  variables = {'params': params}
  expected = jax.jit(apply)(variables, inputs, shifted, targets)
  return expected, jax.jit(ours.apply)(variables, inputs, shifted)


@CHOICES
def test_tree_shapes_axes_and_initial_values(activations, tied):
  theirs, ours = both(mlp_activations=activations, logits_via_embedding=tied)
  tokens = np.ones((1, 2), np.int32)
  expected = theirs.init(jax.random.key(0), tokens, tokens, tokens, enable_dropout=False)
  found = ours.init(jax.random.key(0), tokens, tokens)
  assert flatten(found['params_axes']) == flatten(expected['params_axes'])
  assert len(flatten(found['params_axes'])) == len(flatten(found['params']))
  expected, found = flatten(expected['params']), flatten(found['params'])
  assert found.keys() == expected.keys()
  for name, value in found.items():
    assert (value.shape, value.dtype) == (expected[name].shape, expected[name].dtype), name
    # The names seed the values, so equal initialisers give equal values.
    np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=1e-7, err_msg=name)


@CHOICES
def test_logits(activations, tied):
  theirs, ours = both(mlp_activations=activations, logits_via_embedding=tied)
  params = random_params(theirs)
  expected, logits = logits_of_both(theirs, ours, params, *texts(SIZES['vocab_size']))
  assert logits.dtype == expected.dtype == jnp.float32
  assert expected.std() > 0.5
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


def test_encoder_output():
  theirs, ours = both()
  inputs, _, _ = texts(SIZES['vocab_size'])
  params = random_params(theirs)
  expected = theirs.apply({'params': params}, inputs, enable_dropout=False, method=theirs.encode)
  encoded = ours.apply({'params': params}, inputs, method='encode')
  # What stands on padding is never attended to.
  real = inputs > 0
  np.testing.assert_allclose(
      np.asarray(encoded)[real], np.asarray(expected)[real], rtol=0, atol=1e-5
  )


def test_bfloat16_logits_are_as_near_as_bfloat16_is():
  theirs, ours = both(dtype='bfloat16', mlp_activations=('gelu', 'linear'))
  params = random_params(theirs)
  expected, logits = logits_of_both(theirs, ours, params, *texts(SIZES['vocab_size']))
  assert logits.dtype == jnp.float32
  assert jnp.abs(logits - expected).mean() < 0.03 * expected.std()


def test_public_checkpoint(shared_data):
  path = shared_data / 'test_t5_tiny.checkpoint_0'
  params = flax.serialization.msgpack_restore(path.read_bytes())['optimizer']['target']
  theirs, ours = both(
      vocab_size=32128, emb_dim=8, num_heads=4, num_decoder_layers=2, head_dim=3, mlp_dim=16,
      mlp_activations=('gelu', 'linear'),
  )
  expected, logits = logits_of_both(
      theirs, ours, params, *texts(32128, input_length=20, length=9)
  )
  assert np.isfinite(logits).all() and expected.std() > 0
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
