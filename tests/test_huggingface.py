"""Hugging Face folders: every family loads and computes what transformers does, bad ones are told.

The folders of `goldens/huggingface` were written by transformers itself. Live tests need torch and
transformers, and are skipped without them.
"""

import functools
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from speculative_t5x import (
    checkpoints,
    families,
    huggingface,
    huggingface_config,
    layouts,
    pair,
    reading,
    tensor_files,
)
from speculative_t5x.errors import UserError
from speculative_t5x.network import T5Config, Transformer
from trees import assert_same, flatten

GOLDENS = pathlib.Path(__file__).parent / 'goldens' / 'huggingface'
FAMILIES = ('t5_1_0', 't5_1_1', 'mt5', 'umt5', 'umt5_tied', 'byt5', 'unusual')
TOLERANCE = 1e-4


@functools.cache
def compiled(config, method='__call__'):
  run = lambda params, *args: Transformer(config).apply({'params': params}, *args, method=method)
  return jax.jit(run, static_argnums=2 if method == 'init_cache' else ())


def network_tree(config):
  tokens = jnp.ones((1, 1), jnp.int32)
  return jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens, tokens)['params']


@pytest.fixture
def folder(tmp_path):
  """Copies a golden folder to where a test may edit it."""
  def copy(name='t5_1_1'):
    return pathlib.Path(shutil.copytree(GOLDENS / name, tmp_path / name))
  return copy


def edit_config(path, file='config.json', **changes):
  values = json.loads((path / file).read_text()) | changes
  (path / file).write_text(json.dumps({k: v for k, v in values.items() if v is not Ellipsis}))


def edit_tensors(path, edit):
  tensors = safetensors.numpy.load_file(path / 'model.safetensors')
  edit(tensors)
  safetensors.numpy.save_file(tensors, path / 'model.safetensors')


def message_of(path):
  """The UserError of loading `path`; it must be one line that names the path."""
  with pytest.raises(UserError) as caught:
    checkpoints.load_params(path)
  message = str(caught.value)
  assert '\n' not in message and str(path) in message and len(message) < 600
  return message


@pytest.mark.parametrize('name', FAMILIES)
def test_logits_equal_transformers(name):
  config = families.config_of(GOLDENS / name)
  params = checkpoints.load_params(GOLDENS / name, like=network_tree(config))
  with np.load(GOLDENS / name / 'golden.npz') as golden:
    inputs, tokens, expected = (golden[key] for key in (
        'encoder_input_tokens', 'decoder_input_tokens', 'logits'))
  assert (inputs == 0).any() and config.num_encoder_layers != config.num_decoder_layers
  logits = compiled(config)(params, inputs, tokens)
  assert logits.dtype == jnp.float32
  np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
  assert expected.std() > 0.3
  # The decode step as well, of several tokens at every row's own place.
  cache = compiled(config, 'init_cache')(params, inputs, tokens.shape[1] + 3)
  for start in range(0, 12, 3):
    positions = np.full(len(tokens), start, np.int32)
    logits, cache = compiled(config, 'decode_step')(
        params, tokens[:, start : start + 3], positions, cache)
    np.testing.assert_allclose(logits, expected[:, start : start + 3], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize('name, left_out', [
    ('unusual', 'layer_norm_epsilon'), ('unusual', 'relative_attention_max_distance'),
    ('unusual', 'mlp_activations'), ('unusual', 'scale_logits_via_embedding'),
    ('umt5', 'relative_bias_per_layer'),
])
def test_every_setting_counts(name, left_out):
  """Goldens would not notice an option that has no effect."""
  config = families.config_of(GOLDENS / name)
  usual = T5Config(vocab_size=1, mlp_activations=('gelu', 'linear'))
  changed = {left_out: getattr(usual, left_out)}
  assert getattr(config, left_out) != changed[left_out]
  params = checkpoints.load_params(GOLDENS / name)
  if left_out == 'relative_bias_per_layer':
    for stack in ('encoder', 'decoder'):
      params[stack]['relpos_bias'] = params[stack]['layers_0']['relpos_bias']
  with np.load(GOLDENS / name / 'golden.npz') as golden:
    logits = compiled(T5Config(**vars(config) | changed))(
        params, golden['encoder_input_tokens'], golden['decoder_input_tokens'])
    assert np.abs(logits - golden['logits']).max() > 10 * TOLERANCE


CONFIGS = [
    T5Config(vocab_size=9, emb_dim=6, num_heads=2, head_dim=5, num_encoder_layers=2,
             num_decoder_layers=3, mlp_dim=7, mlp_activations=activations,
             logits_via_embedding=tied, relative_bias_per_layer=per_layer)
    for activations in (('relu',), ('gelu', 'linear'))
    for tied in (False, True) for per_layer in (False, True)
]


@pytest.mark.parametrize('config', CONFIGS)
def test_names_are_those_of_the_network(config):
  ours = {name: leaf.shape for name, leaf in flatten(network_tree(config)).items()}
  tensors = huggingface.tensors(config)
  assert {name: tensor.shape for name, tensor in tensors.items()} == ours
  assert len({tensor.name for tensor in tensors.values()}) == len(tensors)


@pytest.mark.parametrize('name', FAMILIES)
@pytest.mark.parametrize('shard_bytes', [5 * 10**9, 10_000])
def test_what_is_written_reads_back(tmp_path, monkeypatch, name, shard_bytes):
  monkeypatch.setattr(huggingface, 'MAX_SHARD_BYTES', shard_bytes)
  found = families.describe(GOLDENS / name)
  params = checkpoints.load_params(GOLDENS / name)
  huggingface.write_folder(
      tmp_path, found.arrays, found.config, iter(flatten(params).items()),
      model_type=found.model_type, eos_id=1)
  assert_same(checkpoints.load_params(tmp_path), params)
  assert families.describe(tmp_path).config == found.config
  files = sorted(path.name for path in tmp_path.iterdir())
  if shard_bytes > 10_000:
    # The tensors, byte for byte, as transformers wrote them.
    assert files == ['config.json', 'model.safetensors']
    assert (tmp_path / files[1]).read_bytes() == (GOLDENS / name / files[1]).read_bytes()
  else:
    assert len(files) > 4 and 'model.safetensors.index.json' in files


def test_dtypes(folder):
  path = folder()
  half = checkpoints.load_params(path, dtype='bfloat16')
  whole = checkpoints.load_params(path)
  assert_same(half, whole, ml_dtypes.bfloat16)
  for dtype in (ml_dtypes.bfloat16, np.float16):
    edit_tensors(path, lambda tensors, dtype=dtype: tensors.update(
        {name: value.astype(dtype) for name, value in tensors.items()}))
    assert_same(checkpoints.load_params(path), checkpoints.load_params(path), dtype)
    assert families.describe(path).dtypes == (np.dtype(dtype).name,)
  edit_tensors(path, lambda tensors: tensors.update(
      {'lm_head.weight': tensors['lm_head.weight'].astype(np.int8)}))
  assert "tensor 'lm_head.weight': expected a dtype among F64, F32, F16, BF16, found I8" in (
      message_of(path))


def test_nothing_is_read_before_names_and_shapes_are_right(monkeypatch):
  monkeypatch.setattr(
      tensor_files, '_read_local', lambda *_: lambda: pytest.fail('read a tensor'))
  like = network_tree(families.config_of(GOLDENS / 't5_1_1'))
  checkpoints.open_params(GOLDENS / 't5_1_1', like=like)
  # T5X, for whose restore this is, reads no such folder.
  with pytest.raises(UserError, match=r'found a Hugging Face folder .convert it with python -m'):
    checkpoints.check_params(GOLDENS / 't5_1_1', like)
  del like['decoder']['logits_dense']
  with pytest.raises(UserError, match="'decoder/logits_dense/kernel' differs: expected no such"):
    checkpoints.load_params(GOLDENS / 't5_1_1', like=like)


def test_embedding_under_the_names_that_are_in_use(folder):
  path = folder()
  expected = checkpoints.load_params(path)
  # MADLAD-400 as published: no shared.weight, pad 1 and EOS 2.
  edit_tensors(path, lambda tensors: tensors.update(
      {'decoder.embed_tokens.weight': tensors.pop('shared.weight')}))
  edit_config(path, pad_token_id=1, eos_token_id=2)
  edit_config(path, 'generation_config.json', pad_token_id=1, eos_token_id=2)
  assert_same(checkpoints.load_params(path), expected)
  assert families.describe(path).eos_id == 2
  # Flan-T5 stores copies.
  edit_tensors(path, lambda tensors: tensors.update(
      {'encoder.embed_tokens.weight': tensors['decoder.embed_tokens.weight']}))
  assert_same(checkpoints.load_params(path), expected)
  edit_tensors(path, lambda tensors: tensors['encoder.embed_tokens.weight'].__setitem__((3, 4), 1))
  assert message_of(path).endswith(
      "tensor 'decoder.embed_tokens.weight': expected a copy of 'encoder.embed_tokens.weight', "
      'found other values')


def test_tied_and_untied_logits(folder):
  tied, untied = folder('t5_1_0'), folder('t5_1_1')
  expected = checkpoints.load_params(tied)
  edit_tensors(tied, lambda tensors: tensors.update({'lm_head.weight': tensors['shared.weight']}))
  assert_same(checkpoints.load_params(tied), expected)
  edit_tensors(tied, lambda tensors: tensors['lm_head.weight'].__setitem__((0, 0), 1))
  assert "tensor 'lm_head.weight': expected a copy of 'shared.weight'" in message_of(tied)
  edit_config(tied, tie_word_embeddings=False, scale_decoder_outputs=...)
  assert 'logits_dense' in checkpoints.load_params(tied)['decoder']

  # As transformers 4 wrote it.
  edit_config(untied, tie_word_embeddings=False, scale_decoder_outputs=...,
              transformers_version='4.23.1')
  assert 'logits_dense' in checkpoints.load_params(untied)['decoder']
  edit_tensors(untied, lambda tensors: tensors.pop('lm_head.weight'))
  assert "tie_word_embeddings: expected a tensor 'lm_head.weight'" in message_of(untied)


@pytest.mark.parametrize('change, good', [
    ({}, True),
    ({'transformers_version': '4.30.0'}, False),
    ({'transformers_version': '4.30.0', 'tie_word_embeddings': False}, True),
    ({'transformers_version': '4.30.0', 'tie_word_embeddings': ...}, True),
    ({'transformers_version': ..., 'tie_word_embeddings': True}, False),
])
def test_mt5_of_either_release(folder, change, good):
  path = folder('mt5')
  edit_config(path, **change)
  if good:
    assert not families.config_of(path).logits_via_embedding
  else:
    assert 'tie_word_embeddings: expected false for mt5' in message_of(path)


def test_unused_tensor_of_early_conversions(folder):
  path = folder('t5_1_0')
  expected = checkpoints.load_params(path)
  name = 'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'
  edit_tensors(path, lambda tensors: tensors.update({name: np.ones((32, 3), np.float32)}))
  assert_same(checkpoints.load_params(path), expected)


@pytest.fixture
def bucket(monkeypatch, tmp_path):
  """A folder that tensorstore reads as gs://bucket/, and what is read of which file there."""
  reads = []

  class Recorded:
    def __init__(self, store):
      self._store = store

    def read(self, name, byte_range=slice(None)):
      if byte_range.start is None or byte_range.start < byte_range.stop:
        reads.append((name, byte_range))
      return self._store.read(name, byte_range=byte_range)

  def open_store(spec, original=layouts.open_store):
    assert spec['driver'] == 'gcs' and spec['bucket'] == 'bucket'
    return Recorded(original({'driver': 'file', 'path': f'{tmp_path}/{spec["path"]}'}))

  monkeypatch.setattr(layouts, 'open_store', open_store)
  return tmp_path, reads


def write_sharded(folder, name, monkeypatch):
  """A golden in many small files."""
  monkeypatch.setattr(huggingface, 'MAX_SHARD_BYTES', 10_000)
  found = families.describe(GOLDENS / name)
  params = checkpoints.load_params(GOLDENS / name)
  folder.mkdir(parents=True)
  huggingface.write_folder(
      folder, found.arrays, found.config, iter(flatten(params).items()),
      model_type=found.model_type, eos_id=1)
  return found, params


def test_folder_in_a_bucket(bucket, monkeypatch):
  folder = bucket[0] / 'models' / 'sharded'
  found, params = write_sharded(folder, 'umt5', monkeypatch)
  path = 'gs://bucket/models/sharded'
  assert_same(checkpoints.load_params(path), params)
  assert_same(checkpoints.load_params(path, dtype='bfloat16'), params, ml_dtypes.bfloat16)
  assert families.describe(f'{path}/').config == found.config
  next(folder.glob('*.safetensors')).unlink()
  with pytest.raises(UserError, match=r'index.json names model-.*: expected this file, found none'):
    checkpoints.load_params(path)


def test_nothing_in_a_bucket_is_read_twice(bucket, monkeypatch):
  root, reads = bucket
  folder = root / 'sharded'
  _, params = write_sharded(folder, 'umt5', monkeypatch)
  monkeypatch.setattr(tempfile, 'tempdir', '/nonexistent')  # Nor copied.
  assert_same(pair.load_model('gs://bucket/sharded').params, params)
  files = {path.name for path in folder.iterdir()}
  assert {name for name, _ in reads} == {*files, 'generation_config.json'}
  for path in folder.iterdir():
    seen = np.zeros(path.stat().st_size, int)
    for _, part in (read for read in reads if read[0] == path.name):
      seen[part] += 1
    # The last byte is asked for first, to see whether the file is complete.
    seen[-1] -= path.suffix == '.safetensors'
    assert (seen == 1).all(), path.name


def test_only_a_part_of_a_bucket_is_read(bucket, monkeypatch):
  root, reads = bucket
  _, params = write_sharded(root / 'sharded', 'umt5', monkeypatch)
  found = families.describe('gs://bucket/sharded')
  # Headers: nothing of tensors but the last byte of each file.
  past_headers = [part for name, part in reads if name.endswith('safetensors') and part.start > 8]
  assert {part.stop - part.start for part in past_headers} == {1}
  reads.clear()

  class Half:
    def addressable_devices_indices_map(self, shape):
      return {None: (slice(0, shape[0] // 2), *[slice(None)] * (len(shape) - 1))}

  monkeypatch.setattr(reading._Output, 'take', lambda self: next(iter(self._memory.values())))
  name = 'token_embedder/embedding'
  (_, value), = reading.read_all(
      'x', {name: found.arrays[name]}, sharding_of=lambda *_: Half())
  np.testing.assert_array_equal(value, flatten(params)[name][:16])
  assert sum(part.stop - part.start for _, part in reads) == value.nbytes


@pytest.mark.parametrize('share', [0.0, 0.0001, 0.3, 0.99])
def test_truncated_file_in_a_bucket(bucket, share):
  path = bucket[0] / 'm'
  shutil.copytree(GOLDENS / 't5_1_1', path)
  content = (path / 'model.safetensors').read_bytes()
  (path / 'model.safetensors').write_bytes(content[:int(share * len(content))])
  with pytest.raises(UserError) as caught:
    families.describe('gs://bucket/m')
  assert re.fullmatch(
      r'gs://bucket/m: model.safetensors: expected a complete safetensors file, found a truncated '
      r'or damaged file \(.*\)', str(caught.value))


@pytest.mark.parametrize('share', [0.0, 0.001, 0.3, 0.99])
def test_truncated_files(folder, share):
  path = folder()
  for file in ('model.safetensors', 'config.json', 'generation_config.json'):
    content = (path / file).read_bytes()
    (path / file).write_bytes(content[:int(share * len(content))])
    if file == 'generation_config.json' and not (path / file).stat().st_size:
      checkpoints.load_params(path)
    else:
      message = message_of(path)
      assert f'{file}: expected' in message and 'truncated or damaged' in message
    (path / file).write_bytes(content)
  checkpoints.load_params(path)


def test_damaged_index(folder, monkeypatch):
  path = folder()
  index = path / 'model.safetensors.index.json'
  names = list(safetensors.numpy.load_file(path / 'model.safetensors'))
  where = dict.fromkeys(names, 'model.safetensors')
  index.write_text(json.dumps({'weight_map': where}))
  checkpoints.load_params(path)
  index.write_text(json.dumps({'weight_map': where | {'x': 'model-2.safetensors'}}))
  assert 'index.json names model-2.safetensors: expected this file, found none' in message_of(path)
  index.write_text(json.dumps({'weight_map': where | {'x': 'model.safetensors'}}))
  assert "model.safetensors: expected tensor 'x' as in" in message_of(path)
  index.write_text(json.dumps({'weight_map': where | {'x': '../model.safetensors'}}))
  assert "expected names of files beside it, found '../model.safetensors'" in message_of(path)
  index.write_text(json.dumps({'metadata': {}}))
  assert "index.json: expected 'weight_map', found none" in message_of(path)
  index.write_text('{"weight_map": ')
  assert 'index.json: expected complete JSON' in message_of(path)


def test_folders_without_a_file(folder, tmp_path):
  path = folder()
  (path / 'config.json').unlink()
  assert 'expected config.json beside the safetensors files, found none' in message_of(path)
  path = folder('t5_1_0')
  (path / 'model.safetensors').unlink()
  assert message_of(path).endswith(
      'expected model.safetensors or model.safetensors.index.json, found neither')
  (path / 'pytorch_model.bin').write_bytes(b'')
  assert '(only pytorch_model.bin: load and save it with' in message_of(path)
  (tmp_path / 'empty').mkdir()
  assert "found neither 'checkpoint' nor '_METADATA' nor 'config.json'" in (
      message_of(tmp_path / 'empty'))


@pytest.mark.parametrize('edit, message', [
    (lambda t: t.pop('encoder.block.1.layer.1.DenseReluDense.wi_1.weight'),
     "expected tensor 'encoder.block.1.layer.1.DenseReluDense.wi_1.weight' by config.json"),
    (lambda t: t.pop('shared.weight'), "expected tensor 'shared.weight' by config.json"),
    (lambda t: t.update({'encoder.block.1.layer.0.SelfAttention.q.bias': np.ones(3)}),
     "tensor 'encoder.block.1.layer.0.SelfAttention.q.bias': expected no such tensor"),
    (lambda t: t.update({'decoder.final_layer_norm.weight': np.ones(13, np.float32)}),
     "tensor 'decoder.final_layer_norm.weight': expected shape (12,) by config.json, found (13,)"),
    (lambda t: t.update({'lm_head.weight': t['lm_head.weight'].T.copy()}),
     "tensor 'lm_head.weight': expected shape (32, 12) by config.json, found (12, 32)"),
])
def test_tensors_that_are_not_the_network_s(folder, edit, message):
  path = folder()
  edit_tensors(path, edit)
  assert message in message_of(path)


@pytest.mark.parametrize('change, message', [
    ({'model_type': 'bert', 'architectures': ['BertForMaskedLM']},
     "config.json: model_type: expected t5, mt5, umt5, found 'bert'"),
    ({'model_type': ...}, 'model_type: expected t5, mt5, umt5, found None'),
    ({'architectures': ['T5EncoderModel']},
     'architectures: expected T5ForConditionalGeneration, found T5EncoderModel'),
    ({'architectures': ['MT5ForConditionalGeneration']}, 'found MT5ForConditionalGeneration'),
    ({'is_encoder_decoder': False}, 'is_encoder_decoder: expected true, found false'),
    ({'quantization_config': {'bits': 8}}, 'quantization_config: expected none'),
    ({'feed_forward_proj': 'gelu'}, "feed_forward_proj: expected .*, found 'gelu'"),
    ({'feed_forward_proj': 'gated-tanh'}, "found 'gated-tanh'"),
    ({'d_kv': 5.0}, 'd_kv: expected a whole number, found 5.0'),
    ({'d_model': 0}, 'emb_dim: expected at least 1, found 0'),
    ({'layer_norm_epsilon': 'tiny'}, 'config.json: '),
    ({'relative_attention_num_buckets': 30}, 'expected a multiple of 4, found 30'),
    ({'relative_attention_max_distance': 16}, 'max_distance: expected more than half of the 32'),
    ({'num_heads': 4}, r'relative_attention_bias.*expected shape \(32, 4\) by .*, found \(32, 3\)'),
    ({'d_kv': 4}, r'SelfAttention.q.*expected shape \(12, 12\) by .*, found \(15, 12\)'),
    ({'num_decoder_layers': 4}, "expected tensor 'decoder.block.3"),
    ({'num_decoder_layers': 2}, "tensor 'decoder.block.2.*': expected no such tensor"),
    ({'pad_token_id': 2}, r'pad_token_id: expected 0 \(or 1 .*\), found 2'),
    ({'pad_token_id': 1}, 'pad_token_id: .*found 1'),
    ({'decoder_start_token_id': 2}, 'decoder_start_token_id: expected 0, found 2'),
    ({'eos_token_id': [1, 2]}, r'eos_token_id: expected one id, found \[1, 2\]'),
    ({'forced_bos_token_id': 7}, 'forced_bos_token_id: expected none, found 7'),
])
def test_config_refuses(folder, change, message):
  path = folder()
  (path / 'generation_config.json').unlink()
  edit_config(path, **change)
  with pytest.raises(UserError, match=message) as caught:
    families.describe(path)
  assert '\n' not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize('change, message', [
    ({'decoder_start_token_id': 5}, 'generation_config.json: decoder_start_token_id: .*found 5'),
    ({'eos_token_id': [1, 3]}, 'generation_config.json: eos_token_id: expected one id'),
    ({'bad_words_ids': [[4]]}, 'generation_config.json: bad_words_ids: expected none'),
])
def test_generation_config_refuses(folder, change, message):
  path = folder()
  edit_config(path, 'generation_config.json', **change)
  with pytest.raises(UserError, match=message):
    families.describe(path)


def test_settings_that_are_honoured(folder):
  path = folder()
  edit_config(path, eos_token_id=[1])
  assert families.describe(path).eos_id == 1
  edit_config(path, 'generation_config.json', eos_token_id=3)
  assert families.describe(path).eos_id == 3
  edit_config(path, architectures=['T5WithLMHeadModel'], feed_forward_proj='gated-swish',
              num_decoder_layers=3)
  assert families.config_of(path).mlp_activations == ('silu', 'linear')
  edit_config(path, d_model=..., d_kv=..., d_ff=..., vocab_size=...)
  assert 'expected shape (32128, 512) by config.json' in message_of(path)


@pytest.mark.parametrize('config, model_type, message', [
    (T5Config(vocab_size=8, mlp_activations=('relu', 'relu')), 't5', 'mlp_activations'),
    (T5Config(vocab_size=8, mlp_activations=('linear', 'gelu')), 't5', 'mlp_activations'),
    (T5Config(vocab_size=8, relative_bias_per_layer=True), 't5', 'relative_bias_per_layer'),
    (T5Config(vocab_size=8), 'umt5', 'relative_bias_per_layer: expected True for umt5'),
    (T5Config(vocab_size=8, logits_via_embedding=True), 'mt5', 'logits_via_embedding'),
])
def test_networks_that_transformers_has_not(config, model_type, message):
  with pytest.raises(UserError, match=message):
    huggingface_config.render(config, model_type=model_type, eos_id=1, dtype='float32')


def test_import_loads_no_checkpoint_library():
  code = (
      'import sys, speculative_t5x.huggingface; '
      "print([name for name in ('safetensors', 'tensorstore', 'transformers') "
      'if name in sys.modules])'
  )
  out = subprocess.run([sys.executable, '-c', code], check=True, capture_output=True, text=True)
  assert out.stdout.strip() == '[]'


@functools.cache
def goldens_script():
  """The script that makes the goldens, whose networks the live tests use."""
  pytest.importorskip('torch', reason='needs torch')
  pytest.importorskip('transformers', reason='needs transformers')
  path = pathlib.Path(__file__).parents[1] / 'scripts/goldens/make_transformers_goldens.py'
  spec = importlib.util.spec_from_file_location('make_transformers_goldens', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize('name', FAMILIES)
@pytest.mark.parametrize('max_shard_size', ['5GB', '20KB'])
def test_live_logits_equal_transformers(tmp_path, name, max_shard_size):
  script = goldens_script()
  model = script.build_family(name)
  model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
  assert (tmp_path / 'model.safetensors').exists() == (max_shard_size == '5GB')
  inputs, tokens = script.batch_for(model.config, np.random.default_rng(1))
  config = families.config_of(tmp_path)
  params = checkpoints.load_params(tmp_path, like=network_tree(config))
  logits = compiled(config)(params, inputs, tokens)
  expected = script.logits_of(model, inputs, tokens)
  print(f'{name}: largest difference of logits {np.abs(logits - expected).max():.2e}')
  np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


def test_golden_folders_are_those_of_the_script():
  script = goldens_script()
  assert tuple(script.FAMILIES) == FAMILIES
  for name in FAMILIES:
    state = script.build_family(name).state_dict()
    for tensor, value in safetensors.numpy.load_file(GOLDENS / name / 'model.safetensors').items():
      np.testing.assert_array_equal(value, state[tensor].numpy(), err_msg=f'{name} {tensor}')
    assert flax.traverse_util.flatten_dict(checkpoints.load_params(GOLDENS / name))
