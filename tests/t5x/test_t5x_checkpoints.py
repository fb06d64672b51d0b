"""Checkpoints against T5X itself, both ways. Skipped where T5X is not installed."""

import flax
import jax
import jax.numpy as jnp
import pytest

from speculative_t5x import checkpoints as our_checkpoints
from speculative_t5x.network import T5Config, Transformer
from trees import assert_same

# Submodules: this folder itself would pass for a package `t5x` without T5X.
REASON = 'needs T5X, which is not on PyPI'
t5x_checkpoints = pytest.importorskip('t5x.checkpoints', reason=REASON)
adafactor = pytest.importorskip('t5x.adafactor', reason=REASON)
partitioning = pytest.importorskip('t5x.partitioning', reason=REASON)
train_state_lib = pytest.importorskip('t5x.train_state', reason=REASON)

CONFIG = T5Config(
    vocab_size=16, emb_dim=8, num_heads=2, num_encoder_layers=1, num_decoder_layers=2, head_dim=4,
    mlp_dim=12, mlp_activations=('gelu', 'linear'),
)


@pytest.fixture(scope='module')
def variables():
  """Parameters and their axis names, as T5X's models make them."""
  tokens = jnp.ones((1, 3), jnp.int32)
  return flax.core.freeze(Transformer(CONFIG).init(jax.random.key(0), tokens, tokens))


def train_state_of(variables):
  optimizer = adafactor.Adafactor(
      decay_rate=0.8, logical_factor_rules=adafactor.standard_logical_factor_rules()
  )
  return train_state_lib.FlaxOptimTrainState.create(optimizer, variables)


def zeros_like(variables):
  return variables.copy({'params': jax.tree.map(jnp.zeros_like, variables['params'])})


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_t5x_restores_what_we_save(tmp_path, variables, dtype):
  path = tmp_path / 'checkpoint_12'
  our_checkpoints.save_params(path, variables['params'], step=12, dtype=dtype)
  checkpointer = t5x_checkpoints.Checkpointer(
      train_state_lib.InferenceState.create(zeros_like(variables)),
      partitioning.PjitPartitioner(num_partitions=1), str(tmp_path),
  )
  assert checkpointer.latest_step() == 12
  state = checkpointer.restore(path=str(path))
  assert int(state.step) == 12
  assert_same(state.params, variables['params'], jnp.dtype(dtype))


def test_t5x_loads_what_we_save_without_a_model(tmp_path, variables):
  our_checkpoints.save_params(tmp_path / 'checkpoint_3', variables['params'], step=3)
  tree = t5x_checkpoints.load_t5x_checkpoint(str(tmp_path / 'checkpoint_3'))
  assert int(tree['state']['step']) == 3
  assert_same(tree['target'], variables['params'])


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_we_load_what_t5x_saves_natively(tmp_path, variables, dtype):
  checkpointer = t5x_checkpoints.Checkpointer(
      train_state_of(variables), partitioning.PjitPartitioner(num_partitions=1), str(tmp_path),
      save_dtype=jnp.dtype(dtype),
  )
  checkpointer.save(train_state_of(variables))
  found = our_checkpoints.load_params(tmp_path / 'checkpoint_0', like=variables['params'])
  assert_same(found, variables['params'], jnp.dtype(dtype))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_we_load_what_t5x_saves_with_orbax(tmp_path, variables, dtype):
  # T5X's Orbax manager ignores `save_dtype`, so the parameters have the dtype beforehand.
  params = jax.tree.map(lambda leaf: leaf.astype(dtype), variables['params'])
  state = train_state_of(variables.copy({'params': params}))
  manager = t5x_checkpoints.OrbaxCheckpointManagerInterface(
      str(tmp_path), state, partitioning.PjitPartitioner(num_partitions=1), save_dtype=None
  )
  manager.save(state)
  manager.close()
  found = our_checkpoints.load_params(tmp_path / 'checkpoint_0', like=variables['params'])
  assert_same(found, params, jnp.dtype(dtype))
