"""The network: against transformers' T5, its decode step against itself, and T5X's tree."""

import dataclasses
import functools
import json
import pathlib
import sys

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trees
from speculative_t5x.network import T5Config, Transformer, transformer
from trees import flatten

GOLDENS = pathlib.Path(__file__).parent / 'goldens' / 'transformers_t5.npz'

T5_1_0 = T5Config(
    vocab_size=29, emb_dim=16, num_heads=3, num_encoder_layers=1, num_decoder_layers=2, head_dim=6,
    mlp_dim=20, mlp_activations=('relu',), logits_via_embedding=True,
)
T5_1_1 = dataclasses.replace(
    T5_1_0, num_encoder_layers=2, num_decoder_layers=1, mlp_activations=('gelu', 'linear'),
    logits_via_embedding=False,
)
CONFIGS = pytest.mark.parametrize('config', [T5_1_0, T5_1_1], ids=['t5_1_0', 't5_1_1'])
BATCHES = pytest.mark.parametrize('batch', [1, 4])

INPUT_LENGTH = 11
LENGTH = 24
# Every chunk length costs a compilation.
CHUNKS = (1, 3, 6)
# Decoding may run past the end of the text by one chunk.
NUM_SLOTS = LENGTH + max(CHUNKS)


@functools.cache
def random_params(config):
  """Parameters for `config`, none at its initial value."""
  tokens = jnp.ones((1, 2), jnp.int32)
  shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens, tokens)['params']
  return trees.random_params(shapes, config.head_dim)


def texts(config, batch, seed=0):
  """Encoder tokens `[batch, INPUT_LENGTH]`, rows padded, and decoder tokens `[batch, LENGTH]`."""
  random = np.random.default_rng(seed)
  inputs = random.integers(1, config.vocab_size, (batch, INPUT_LENGTH))
  inputs[np.arange(INPUT_LENGTH) >= random.integers(3, INPUT_LENGTH, batch)[:, None]] = 0
  tokens = random.integers(1, config.vocab_size, (batch, LENGTH))
  tokens[:, 0] = 0
  return inputs.astype(np.int32), tokens.astype(np.int32)


@functools.cache
def compiled(config, method='__call__'):
  """A compiled method of the network: `(params, *args) -> ...`; the slots of a cache are static."""
  run = lambda params, *args: Transformer(config).apply({'params': params}, *args, method=method)
  return jax.jit(run, static_argnums=2 if method == 'init_cache' else ())


def apply(config, *args, method='__call__', params=None):
  return compiled(config, method)(random_params(config) if params is None else params, *args)


def assert_chunks_match(config, batch, chunks, *, wrong, seed=0):
  """Decodes a text in chunks at every row's own position and compares with teacher forcing.

  Args:
    config: the network.
    batch: rows.
    chunks: lengths, one of which is drawn for each call.
    wrong: whether the tail of a chunk is wrong at random, as drafts are, and whether rows fall
      back at random, even behind where the chunk began. The text goes on by overwriting.
    seed: of everything that is drawn.

  Raises:
    AssertionError: a logit of a right prefix differs by more than 1e-5.
  """
  random = np.random.default_rng(seed)
  inputs, tokens = texts(config, batch, seed)
  expected = np.asarray(apply(config, inputs, tokens))
  cache = apply(config, inputs, NUM_SLOTS, method='init_cache')
  positions = np.zeros(batch, np.int32)
  seen = np.zeros((batch, LENGTH), int)
  padded = np.pad(tokens, ((0, 0), (0, max(CHUNKS))), constant_values=1)
  while not seen.all():
    length = random.choice(chunks)
    index = positions[:, None] + np.arange(length)
    chunk = np.take_along_axis(padded, index, 1)
    num_right = np.minimum(length, LENGTH - positions)
    if wrong:
      num_right = np.minimum(num_right, random.integers(1, length + 1, batch))
      shift = random.integers(1, config.vocab_size, chunk.shape)
      chunk = np.where(
          np.arange(length) < num_right[:, None], chunk, (chunk + shift) % config.vocab_size
      )
    logits, cache = apply(
        config, chunk.astype(np.int32), positions, cache, method='decode_step'
    )
    logits = np.asarray(logits)
    assert logits.dtype == jnp.float32 and logits.shape == (batch, length, config.vocab_size)
    for row, (start, right) in enumerate(zip(positions, num_right, strict=True)):
      found = logits[row, :right]
      np.testing.assert_allclose(
          found, expected[row, start : start + right], rtol=0, atol=1e-5,
          err_msg=f'row {row}, positions {start} to {start + right - 1}',
      )
      seen[row, start : start + right] += 1
    if wrong:
      back = np.where(random.random(batch) < 0.3, random.integers(0, 2 * max(CHUNKS), batch), 0)
      positions = np.maximum(positions + num_right - back, 0)
    else:
      positions = positions + num_right
    # A finished row stays at the last token while the others go on.
    positions = np.minimum(positions, LENGTH - 1).astype(np.int32)


@pytest.mark.parametrize('name', ['t5_1_0', 't5_1_1'])
def test_logits_equal_transformers(name):
  with np.load(GOLDENS) as arrays:
    golden = {
        key.removeprefix(f'{name}/'): value for key, value in arrays.items()
        if key.startswith(f'{name}/')
    }
  config = T5Config(**json.loads(str(golden['config'])))
  params = {
      key.removeprefix('params/'): value for key, value in golden.items()
      if key.startswith('params/')
  }
  inputs, tokens = golden['encoder_input_tokens'], golden['decoder_input_tokens']
  ours = jax.eval_shape(Transformer(config).init, jax.random.key(0), inputs, tokens)['params']
  assert {k: v.shape for k, v in params.items()} == {k: v.shape for k, v in flatten(ours).items()}
  assert (inputs == 0).any() and config.num_encoder_layers != config.num_decoder_layers
  params = flax.traverse_util.unflatten_dict(params, sep='/')
  logits = apply(config, inputs, tokens, params=params)
  assert logits.dtype == jnp.float32
  np.testing.assert_allclose(logits, golden['logits'], rtol=0, atol=1e-4)
  # A network that ignored its parameters' details would not be this far from a constant.
  assert golden['logits'].std() > 0.5


@CONFIGS
@BATCHES
def test_one_token_a_step_equals_teacher_forcing(config, batch):
  assert_chunks_match(config, batch, (1,), wrong=False)


@CONFIGS
@BATCHES
def test_chunks_equal_teacher_forcing(config, batch):
  assert_chunks_match(config, batch, CHUNKS, wrong=False, seed=1)


@CONFIGS
@BATCHES
@pytest.mark.parametrize('seed', [2, 3])
def test_rollback_after_wrong_drafts_equals_teacher_forcing(config, batch, seed):
  assert_chunks_match(config, batch, CHUNKS, wrong=True, seed=seed)


@BATCHES
def test_rollback_test_detects_a_cache_that_adds(monkeypatch, batch):
  overwrite = transformer.write_slots

  def add(cache, new, positions):
    written = overwrite(jnp.zeros_like(cache), new, positions)
    return cache + written

  monkeypatch.setattr(transformer, 'write_slots', add)
  # Programs compiled before or after hold the function that overwrites.
  monkeypatch.setattr(sys.modules[__name__], 'compiled', functools.cache(compiled.__wrapped__))
  # Slots start at zero, so without rollback adding is as good as overwriting.
  assert_chunks_match(T5_1_0, batch, (3,), wrong=False)
  with pytest.raises(AssertionError, match='row'):
    assert_chunks_match(T5_1_0, batch, (3,), wrong=True)


@BATCHES
def test_write_slots_overwrites_each_row_at_its_own_position(batch):
  random = np.random.default_rng(0)
  cache = random.normal(size=(batch, 2, 9, 3)).astype(np.float32)
  new = random.normal(size=(batch, 2, 4, 3)).astype(np.float32)
  positions = random.permutation(6)[:batch].astype(np.int32)
  expected = cache.copy()
  for row, start in enumerate(positions):
    expected[row, :, start : start + 4] = new[row]
  found = transformer.write_slots(jnp.asarray(cache), jnp.asarray(new), jnp.asarray(positions))
  np.testing.assert_array_equal(found, expected)


@CONFIGS
@BATCHES
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_stale_slots_have_no_influence(config, batch, dtype):
  config = dataclasses.replace(config, dtype=dtype)
  inputs, tokens = texts(config, batch)
  cache = apply(config, inputs, NUM_SLOTS, method='init_cache')
  step = functools.partial(apply, config, method='decode_step')
  for start in range(0, 18, 6):
    _, cache = step(tokens[:, start : start + 6], np.full(batch, start, np.int32), cache)
  positions = np.random.default_rng(0).integers(1, 14, batch).astype(np.int32)
  stale = (np.arange(NUM_SLOTS) >= positions[:, None])[:, None, :, None]
  cache = jax.tree.map(np.asarray, cache)
  chunk = tokens[:, :6]
  # Keys stop short of what an additive mask of -1e10 hides; values need not.
  fill = lambda arrays, value: tuple(
      np.where(stale, value, array).astype(array.dtype) for array in arrays
  )
  huge = cache.replace(
      self_keys=fill(cache.self_keys, 1e6), self_values=fill(cache.self_values, -1e30)
  )
  zero = cache.replace(
      self_keys=fill(cache.self_keys, 0.0), self_values=fill(cache.self_values, 0.0)
  )
  expected, _ = step(chunk, positions, zero)
  for stale_cache in (cache, huge):
    logits, _ = step(chunk, positions, stale_cache)
    np.testing.assert_array_equal(logits, expected)
  # Slots before the position do count.
  live = cache.replace(self_values=tuple(
      np.where(stale, array, array + 1).astype(array.dtype) for array in cache.self_values
  ))
  logits, _ = step(chunk, positions, live)
  assert np.abs(logits - expected).max(axis=(1, 2)).min() > 1e-2


@CONFIGS
def test_later_tokens_and_padding_have_no_influence(config):
  inputs, tokens = texts(config, 4)
  expected = np.asarray(apply(config, inputs, tokens))
  changed = tokens.copy()
  changed[:, 10:] = (changed[:, 10:] + 1) % config.vocab_size
  logits = np.asarray(apply(config, inputs, changed))
  np.testing.assert_allclose(logits[:, :10], expected[:, :10], rtol=0, atol=1e-6)
  assert np.abs(logits[:, 10:] - expected[:, 10:]).max() > 1e-2
  longer = np.pad(inputs, ((0, 0), (0, 5)))
  np.testing.assert_allclose(apply(config, longer, tokens), expected, rtol=0, atol=1e-5)


@CONFIGS
def test_row_of_a_batch_equals_the_row_alone(config):
  inputs, tokens = texts(config, 4)
  together = apply(config, inputs, tokens)
  for row in range(4):
    alone = apply(config, inputs[row : row + 1], tokens[row : row + 1])
    np.testing.assert_allclose(together[row], alone[0], rtol=0, atol=1e-5)


@CONFIGS
def test_bfloat16_activations_stay_near_float32(config):
  batch = 4
  inputs, tokens = texts(config, batch)
  half = dataclasses.replace(config, dtype='bfloat16')
  params = random_params(config)
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
  expected = apply(config, inputs, tokens)
  logits = apply(half, inputs, tokens, params=params)
  assert logits.dtype == jnp.float32
  assert apply(half, inputs, params=params, method='encode').dtype == jnp.bfloat16
  difference = np.abs(logits - expected)
  # bfloat16 has 8 bits: visible, and small beside the spread of the logits.
  assert 0 < difference.mean() < 0.03 * expected.std()
  assert difference.max() < 0.25 * expected.std()

  cache = apply(half, inputs, NUM_SLOTS, params=params, method='init_cache')
  assert cache.self_keys[0].dtype == cache.cross_values[0].dtype == jnp.bfloat16
  for start in range(0, LENGTH, 6):
    stepped, cache = apply(
        half, tokens[:, start : start + 6], np.full(batch, start, np.int32), cache, params=params,
        method='decode_step',
    )
    assert stepped.dtype == jnp.float32
    assert np.abs(stepped - expected[:, start : start + 6]).max() < 0.25 * expected.std()


def test_bfloat16_parameters_run_and_give_float32_logits():
  config = dataclasses.replace(T5_1_1, dtype='bfloat16')
  inputs, tokens = texts(config, 4)
  params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), random_params(config))
  logits = apply(config, inputs, tokens, params=params)
  expected = apply(T5_1_1, inputs, tokens)
  assert logits.dtype == jnp.float32
  assert np.abs(logits - expected).mean() < 0.03 * expected.std()


def test_cross_attention_is_not_computed_in_a_step():
  """A step multiplies nothing as long as the encoder's input by a kernel."""
  inputs, tokens = texts(T5_1_0, 4)
  cache = apply(T5_1_0, inputs, NUM_SLOTS, method='init_cache')

  def step(params, tokens, positions, cache):
    logits, after = Transformer(T5_1_0).apply(
        {'params': params}, tokens, positions, cache, method='decode_step'
    )
    for name in ('cross_keys', 'cross_values', 'cross_bias'):
      before = jax.tree.leaves(getattr(cache, name))
      assert all(x is y for x, y in zip(before, jax.tree.leaves(getattr(after, name)), strict=True))
    return logits

  jaxpr = jax.make_jaxpr(step)(random_params(T5_1_0), tokens[:, :1], np.zeros(4, np.int32), cache)
  # Query, key, value and output of self-attention, query and output of cross-attention, wi and wo;
  # two products in each of both attentions; the logits.
  dots = str(jaxpr).count(' dot_general[')
  assert dots == T5_1_0.num_decoder_layers * (8 + 4) + 1


def test_dropout_only_where_asked_for():
  config = dataclasses.replace(T5_1_1, dropout_rate=0.5)
  inputs, tokens = texts(config, 4)
  params = random_params(T5_1_1)
  expected = apply(T5_1_1, inputs, tokens)
  np.testing.assert_array_equal(apply(config, inputs, tokens, params=params), expected)
  dropped = jax.jit(lambda params, key: Transformer(config).apply(
      {'params': params}, inputs, tokens, enable_dropout=True, rngs={'dropout': key}
  ))(params, jax.random.key(0))
  assert np.abs(dropped - expected).mean() > 1e-2


def test_public_checkpoint_has_our_tree(shared_data):
  path = shared_data / 'test_t5_tiny.checkpoint_0'
  params = flax.serialization.msgpack_restore(path.read_bytes())['optimizer']['target']
  config = T5Config(
      vocab_size=32128, emb_dim=8, num_heads=4, num_encoder_layers=2, num_decoder_layers=2,
      head_dim=3, mlp_dim=16, mlp_activations=('gelu', 'linear'),
  )
  inputs = np.array([[5, 31999, 7, 1, 0, 0], [100, 3, 2, 9, 8, 1]], np.int32)
  tokens = np.array([[0, 4, 12000], [0, 77, 1]], np.int32)
  ours = jax.eval_shape(Transformer(config).init, jax.random.key(0), inputs, tokens)['params']
  assert {name: (value.shape, value.dtype) for name, value in flatten(params).items()} == {
      name: (value.shape, value.dtype) for name, value in flatten(ours).items()
  }
  logits = apply(config, inputs, tokens, params=params)
  assert logits.shape == (2, 3, 32128) and np.isfinite(logits).all()
  assert logits.std() > 0


@pytest.mark.parametrize('change, message', [
    *(({name: 0}, f'{name}: expected at least 1, found 0') for name in (
        'vocab_size', 'emb_dim', 'num_heads', 'num_decoder_layers', 'head_dim', 'mlp_dim',
    )),
    ({'num_encoder_layers': -1}, 'num_encoder_layers: expected at least 0, found -1'),
    ({'num_heads': -2}, 'num_heads: expected at least 1, found -2'),
    ({'dropout_rate': 1.0}, 'dropout_rate: expected .*, found 1.0'),
    ({'dropout_rate': -0.1}, 'dropout_rate: expected .*, found -0.1'),
    ({'mlp_activations': ()}, 'mlp_activations: expected names among'),
    ({'mlp_activations': ('gelu', 'tanh')}, "mlp_activations: .*found .*'tanh'"),
    ({'mlp_activations': 'relu'}, 'mlp_activations: expected names among'),
    ({'relative_attention_num_buckets': 30}, 'num_buckets: expected a multiple of 4, found 30'),
    ({'relative_attention_num_buckets': 0}, 'num_buckets: expected a multiple of 4, found 0'),
    ({'relative_attention_max_distance': 16}, 'max_distance: expected .* 32 buckets, found 16'),
    ({'layer_norm_epsilon': 0.0}, 'layer_norm_epsilon: expected .*, found 0.0'),
    ({'dtype': 'float16'}, 'dtype: expected float32 or bfloat16, found float16'),
    ({'dtype': 'int32'}, 'dtype: expected float32 or bfloat16, found int32'),
])
def test_config_refuses(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(T5_1_0, **change)


def test_config_takes_what_gin_hands_over():
  config = T5Config(vocab_size=8, mlp_activations=['gelu', 'linear'], dtype=jnp.bfloat16)
  same = T5Config(vocab_size=8, mlp_activations=('gelu', 'linear'), dtype='bfloat16')
  assert config == same and hash(config) == hash(same)
