"""Checkpoints: every layout loads, what is written reads back, bad ones give one clear line."""

import json
import shutil
import subprocess
import sys

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from speculative_t5x import checkpoints, layouts
from speculative_t5x.errors import UserError
from speculative_t5x.network import T5Config, Transformer


def tiny_params(dtype=np.float32):
  """A tree with the names of T5, a zero-filled array (chunks of zeros must be stored) included."""
  random = np.random.default_rng(0)
  wi = random.normal(size=(4, 8)).astype(dtype)
  return {
      'token_embedder': {'embedding': random.normal(size=(6, 4)).astype(dtype)},
      'encoder': {'encoder_norm': {'scale': np.zeros((4,), dtype)}},
      'decoder': {'layers_0': {'mlp': {'wi': {'kernel': wi}}}},
  }


def assert_same(found, expected):
  found = flax.traverse_util.flatten_dict(found, sep='/')
  expected = flax.traverse_util.flatten_dict(expected, sep='/')
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    assert found[name].dtype == value.dtype, name
    np.testing.assert_array_equal(found[name], value, err_msg=name)


def write_msgpack(path, tree):
  path.write_bytes(flax.serialization.msgpack_serialize(tree))


def edit_msgpack(path, edit):
  tree = flax.serialization.msgpack_restore(path.read_bytes())
  edit(tree)
  write_msgpack(path, tree)


def message_of(path, **kwargs):
  """The UserError of loading `path`; it must be one line that names the path."""
  with pytest.raises(UserError) as caught:
    checkpoints.load_params(path, **kwargs)
  message = str(caught.value)
  assert '\n' not in message and str(path) in message and len(message) < 600
  return message


@pytest.mark.parametrize('dtype', [np.float32, ml_dtypes.bfloat16])
def test_native_round_trip(tmp_path, dtype):
  path = tmp_path / 'new' / 'checkpoint_7'
  checkpoints.save_params(path, tiny_params(dtype), step=7)
  assert_same(checkpoints.load_params(path), tiny_params(dtype))
  assert [entry.name for entry in path.parent.iterdir()] == ['checkpoint_7']
  contents = flax.serialization.msgpack_restore((path / 'checkpoint').read_bytes())
  assert contents['version'] == 3
  assert contents['optimizer']['state']['step'] == 7
  zarray = json.loads((path / 'target.token_embedder.embedding' / '.zarray').read_text())
  assert zarray['dtype'] == {np.float32: '<f4'}.get(dtype, 'bfloat16')


def test_dtype_casts_floating_arrays_on_both_sides(tmp_path):
  params = tiny_params()
  params['encoder']['count'] = np.arange(3, dtype=np.int32)
  checkpoints.save_params(tmp_path / 'half', params, dtype='bfloat16')
  half = checkpoints.load_params(tmp_path / 'half')
  assert half['token_embedder']['embedding'].dtype == ml_dtypes.bfloat16
  assert half['encoder']['count'].dtype == np.int32
  wide = checkpoints.load_params(tmp_path / 'half', dtype='float32')
  assert wide['token_embedder']['embedding'].dtype == np.float32
  np.testing.assert_array_equal(
      wide['token_embedder']['embedding'],
      params['token_embedder']['embedding'].astype(ml_dtypes.bfloat16).astype(np.float32),
  )


def test_large_arrays_are_written_in_several_chunks(tmp_path, monkeypatch):
  monkeypatch.setattr(checkpoints, 'MAX_CHUNK_BYTES', 40)
  checkpoints.save_params(tmp_path / 'c', tiny_params())
  chunks = {entry.name for entry in (tmp_path / 'c' / 'target.token_embedder.embedding').iterdir()}
  assert chunks == {'.zarray', '0.0', '1.0', '2.0'}
  assert_same(checkpoints.load_params(tmp_path / 'c'), tiny_params())


@pytest.mark.parametrize('kvstore', [
    {'driver': 'file'}, {'driver': 'gfile'}, {'driver': 'gcs', 'bucket': 't5x-dummy-bucket'},
])
@pytest.mark.parametrize('path_inside', [True, False])
def test_native_arrays_are_sought_where_the_checkpoint_is(tmp_path, kvstore, path_inside):
  path = tmp_path / 'checkpoint_0'
  checkpoints.save_params(path, tiny_params())

  def rewrite(tree):
    spec = tree['optimizer']['target']['token_embedder']['embedding']
    stored_as = spec['kvstore']['path']
    spec['kvstore'] = dict(kvstore)
    (spec['kvstore'] if path_inside else spec)['path'] = stored_as

  edit_msgpack(path / 'checkpoint', rewrite)
  moved = path.rename(tmp_path / 'elsewhere')
  assert_same(checkpoints.load_params(moved), tiny_params())
  assert_same(checkpoints.load_params(moved / 'checkpoint'), tiny_params())


def test_bucket_paths_become_gcs_specs():
  assert layouts.kvstore_of('gs://b/models/checkpoint_1/', 'state/') == {
      'driver': 'gcs', 'bucket': 'b', 'path': 'models/checkpoint_1/state/'
  }
  spec = layouts.array_spec(layouts.kvstore_of('gs://b/m'), 'target.encoder.x')
  assert spec['kvstore'] == {'driver': 'gcs', 'bucket': 'b', 'path': 'm/target.encoder.x/'}


def test_small_arrays_may_be_inside_the_msgpack_file(tmp_path):
  path = tmp_path / 'checkpoint_0'
  checkpoints.save_params(path, tiny_params())
  scale = np.arange(4, dtype=np.float32)
  edit_msgpack(
      path / 'checkpoint',
      lambda tree: tree['optimizer']['target']['encoder'].update(encoder_norm={'scale': scale}),
  )
  expected = tiny_params()
  expected['encoder']['encoder_norm']['scale'] = scale
  assert_same(checkpoints.load_params(path), expected)


@pytest.mark.parametrize('wrap', [
    lambda params: {'version': 3, 'optimizer': {'target': params, 'state': {'step': np.int32(1)}}},
    lambda params: {'target': params, 'state': {}},
    lambda params: {'step': np.int32(1), 'params': params},
    lambda params: params,
])
def test_single_file_layouts(tmp_path, wrap):
  write_msgpack(tmp_path / 'checkpoint_0', wrap(tiny_params()))
  assert_same(checkpoints.load_params(tmp_path / 'checkpoint_0'), tiny_params())


def test_t5x_single_file_checkpoint(shared_data):
  config = T5Config(
      vocab_size=32128, emb_dim=8, num_heads=4, num_encoder_layers=2, num_decoder_layers=2,
      head_dim=3, mlp_dim=16, mlp_activations=('gelu', 'linear'),
  )
  tokens = jnp.ones((1, 1), jnp.int32)
  like = jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens, tokens)['params']
  params = checkpoints.load_params(shared_data / 'test_t5_tiny.checkpoint_0', like=like)
  assert params['token_embedder']['embedding'].shape == (32128, 8)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize('name', ['tiny_t5/checkpoint_1', 'tiny_orbax/1'])
def test_t5x_checkpoints_without_parameters_say_so(shared_data, name):
  # T5X's own test data hold optimizer states under these two layouts and an empty target.
  assert "expected parameters under 'target', found none" in message_of(shared_data / name)


def save_orbax(path, tree, **options):
  import orbax.checkpoint as ocp

  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
    checkpointer.save(path, args=ocp.args.PyTreeSave(jax.tree.map(jnp.asarray, tree)))


@pytest.mark.parametrize('options', [
    {'use_ocdbt': True}, {'use_ocdbt': False}, {'use_ocdbt': True, 'use_zarr3': True},
])
@pytest.mark.parametrize('item', ['', 'state'])
@pytest.mark.parametrize('plain', [False, True])
def test_orbax_layouts(tmp_path, options, item, plain):
  params = tiny_params()
  params['encoder']['half'] = np.ones((2, 3), ml_dtypes.bfloat16)
  state = {'step': np.int32(1), 'param_states': {'m': np.ones(3)}, 'empty': {}}
  tree = params if plain else {'target': params, 'state': state, 'flax_mutables': {}}
  save_orbax(tmp_path / 'checkpoint_1' / item, tree, **options)
  assert_same(checkpoints.load_params(tmp_path / 'checkpoint_1'), params)


def test_orbax_standard_checkpoint(tmp_path):
  import orbax.checkpoint as ocp

  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / 'c', {'params': tiny_params(), 'step': 3})
  assert_same(checkpoints.load_params(tmp_path / 'c'), tiny_params())


@pytest.mark.parametrize('ocdbt', [False, True])
def test_orbax_before_metadata_files(tmp_path, ocdbt):
  # The tree in msgpack with placeholders, as in T5X's `tiny_orbax`, and the arrays beside it.
  save_orbax(tmp_path / 'c', {'_optimizer': {'target': tiny_params()}}, use_ocdbt=ocdbt)
  (tmp_path / 'c' / '_METADATA').unlink()
  names = flax.traverse_util.flatten_dict({'_optimizer': {'target': tiny_params()}})
  placeholders = {keys: 'PLACEHOLDER://' + '.'.join(keys) for keys in names}
  tree = flax.traverse_util.unflatten_dict(placeholders) | {'params_axes': None}
  write_msgpack(tmp_path / 'c' / 'checkpoint', tree)
  assert_same(checkpoints.load_params(tmp_path / 'c'), tiny_params())


def test_missing_path(tmp_path):
  assert 'found nothing at this path' in message_of(tmp_path / 'checkpoint_1')


def test_folder_that_is_no_checkpoint(tmp_path):
  assert "found neither 'checkpoint' nor '_METADATA'" in message_of(tmp_path)
  for step in (9, 10):
    checkpoints.save_params(tmp_path / f'checkpoint_{step}', tiny_params())
  assert 'it holds checkpoint_10: name that' in message_of(tmp_path)


@pytest.mark.parametrize(
    'text', ['model_checkpoint_path: "model.ckpt-1"\n', '# a text\n', '{"a": 1}']
)
def test_file_of_another_format(tmp_path, text):
  (tmp_path / 'file').write_text(text)
  assert 'file of another format' in message_of(tmp_path / 'file')


def test_file_of_another_tree(tmp_path):
  write_msgpack(tmp_path / 'file', {'weights': {'layer': np.ones(2)}})
  assert 'found none (only: weights)' in message_of(tmp_path / 'file')


@pytest.mark.parametrize('share', [0.0, 0.3, 0.99])
def test_truncated_msgpack(tmp_path, share):
  checkpoints.save_params(tmp_path / 'native', tiny_params())
  write_msgpack(tmp_path / 'single', {'target': tiny_params()})
  for path, file in (
      (tmp_path / 'native', tmp_path / 'native' / 'checkpoint'),
      (tmp_path / 'single', tmp_path / 'single'),
  ):
    content = file.read_bytes()
    file.write_bytes(content[:int(share * len(content))])
    assert 'truncated or damaged' in message_of(path)


def test_truncated_array(tmp_path):
  checkpoints.save_params(tmp_path / 'c', tiny_params())
  chunk = tmp_path / 'c' / 'target.token_embedder.embedding' / '0.0'
  chunk.write_bytes(chunk.read_bytes()[:-20])
  assert "cannot read parameter 'token_embedder/embedding'" in message_of(tmp_path / 'c')


def test_missing_array(tmp_path):
  checkpoints.save_params(tmp_path / 'c', tiny_params())
  shutil.rmtree(tmp_path / 'c' / 'target.encoder.encoder_norm.scale')
  message = message_of(tmp_path / 'c')
  assert "cannot open parameter 'encoder/encoder_norm/scale'" in message
  assert 'does not exist' in message


def test_missing_chunk_is_not_read_as_zeros(tmp_path, monkeypatch):
  monkeypatch.setattr(checkpoints, 'MAX_CHUNK_BYTES', 40)
  checkpoints.save_params(tmp_path / 'c', tiny_params())
  (tmp_path / 'c' / 'target.token_embedder.embedding' / '1.0').unlink()
  message = message_of(tmp_path / 'c')
  assert "cannot read parameter 'token_embedder/embedding'" in message
  assert 'missing' in message


@pytest.mark.parametrize('ocdbt', [False, True])
def test_damaged_orbax(tmp_path, ocdbt):
  path = tmp_path / 'c'
  save_orbax(path, {'target': tiny_params()}, use_ocdbt=ocdbt)
  if ocdbt:
    for data in path.glob('**/d/*'):
      data.unlink()
  else:
    (path / 'target.token_embedder.embedding' / '0.0').unlink()
  assert 'parameter ' in message_of(path)
  content = (path / '_METADATA').read_bytes()
  (path / '_METADATA').write_bytes(content[:len(content) // 2])
  assert 'truncated or damaged' in message_of(path)


def test_first_parameter_that_differs_is_named(tmp_path):
  checkpoints.save_params(tmp_path / 'c', tiny_params())
  like = jax.eval_shape(lambda: tiny_params())
  checkpoints.load_params(tmp_path / 'c', like=like)

  wrong = jax.tree.map(lambda leaf: leaf, like)
  wrong['token_embedder']['embedding'] = jax.ShapeDtypeStruct((5, 4), jnp.float32)
  assert message_of(tmp_path / 'c', like=wrong).endswith(
      "parameter 'token_embedder/embedding' differs: expected shape (5, 4), found shape (6, 4)"
  )
  wrong['encoder']['encoder_norm'] = {'bias': wrong['encoder']['encoder_norm']['scale']}
  assert message_of(tmp_path / 'c', like=wrong).endswith(
      "parameter 'encoder/encoder_norm/bias' differs: "
      'expected shape (4,), found no such parameter'
  )
  del wrong['decoder']
  assert message_of(tmp_path / 'c', like=wrong).endswith(
      "parameter 'decoder/layers_0/mlp/wi/kernel' differs: "
      'expected no such parameter, found shape (4, 8)'
  )


def test_save_refuses_an_existing_path(tmp_path):
  checkpoints.save_params(tmp_path / 'c', tiny_params())
  with pytest.raises(UserError, match='existing one'):
    checkpoints.save_params(tmp_path / 'c', {'encoder': {'x': np.ones(1)}})
  assert_same(checkpoints.load_params(tmp_path / 'c'), tiny_params())
  with pytest.raises(UserError, match='local directory'):
    checkpoints.save_params('gs://bucket/c', tiny_params())


def test_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
  def interrupt(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(flax.serialization, 'msgpack_serialize', interrupt)
  with pytest.raises(KeyboardInterrupt):
    checkpoints.save_params(tmp_path / 'c', tiny_params())
  assert not list(tmp_path.iterdir())


def test_import_loads_no_checkpoint_library():
  code = (
      'import sys, speculative_t5x.checkpoints; '
      "print([name for name in ('orbax.checkpoint', 'tensorstore', 't5x', 'tensorflow') "
      'if name in sys.modules])'
  )
  out = subprocess.run([sys.executable, '-c', code], check=True, capture_output=True, text=True)
  assert out.stdout.strip() == '[]'
