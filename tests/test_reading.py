"""Reading parts of arrays: little memory beside the parameters, and no more than a device holds."""

import itertools
import json
import math
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from speculative_t5x import checkpoints, convert, families, huggingface, reading, tensor_files
from speculative_t5x.errors import UserError
from speculative_t5x.network import T5Config
from speculative_t5x.stored import StoredArray, in_memory, minimal_tree, transposed

LAYOUTS = ('t5x', 'orbax', 'huggingface')
# 400 MB in float32, of which no array is more than 2 %, as in the models that memory is short for:
# T5 XXL's embedding is 1.2 % of it.
LARGE = T5Config(
    vocab_size=4000, emb_dim=512, num_heads=8, num_encoder_layers=10, num_decoder_layers=10,
    head_dim=64, mlp_dim=2048, mlp_activations=('gelu', 'linear'))
LARGE_COUNT = sum(math.prod(shape) for shape in families.shapes(LARGE).values())
SMALL = T5Config(
    vocab_size=64, emb_dim=16, num_heads=6, num_encoder_layers=2, num_decoder_layers=2,
    head_dim=4, mlp_dim=32, mlp_activations=('gelu', 'linear'))


def values_of(config, dtype):
  """Random parameters of a network, one at a time."""
  random = np.random.default_rng(0)
  for name, shape in families.shapes(config).items():
    yield name, random.standard_normal(shape, np.float32).astype(dtype)


def write(folder, config, layout, dtype):
  """A checkpoint of `values_of`."""
  values = values_of(config, dtype)
  if layout == 't5x':
    checkpoints.write_native(folder, values)
  elif layout == 'orbax':
    convert._write_orbax(folder, values, 0)
  else:
    arrays = {name: StoredArray(shape, np.dtype(dtype), None, shape)
              for name, shape in families.shapes(config).items()}
    huggingface.write_folder(folder, arrays, config, values, model_type='t5', eos_id=1)
  return folder


# What is taken before a checkpoint is known, with all libraries: loading a tiny one imports them.
# What reading takes at any size, such as the stacks of threads; it varies from run to run.
FIXED = 8 * 2**20

MEASURE = """
import json, re, sys
import jax, numpy as np
from speculative_t5x import checkpoints, pair
tiny, path, dtype, way = sys.argv[1:]
# Of this program: `getrusage` includes what the process was before it became it.
peak = lambda: 1024 * int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])

def load(path):
  if way == 'model':
    return pair.load_model(path, dtype=dtype or 'float32').params
  return checkpoints.load_params(path, dtype=dtype or None)

load(tiny)
before = peak()
params = load(path)
after = peak()
leaves = jax.tree.leaves(params)
print(json.dumps({
    'taken': after - before, 'weights': sum(x.nbytes for x in leaves),
    'dtypes': sorted({str(x.dtype) for x in leaves}),
    'sum': float(sum(np.asarray(x[:1], np.float64).sum() for x in leaves))}))
"""


def python(code, *arguments, devices=1):
  """What a process of its own prints, as JSON."""
  done = subprocess.run(
      [sys.executable, '-c', code, *map(str, arguments)], capture_output=True, text=True,
      env={**os.environ, 'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}'})
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(
    not os.path.exists('/proc/self/status'), reason='reads the peak of memory as Linux tells it')
@pytest.mark.parametrize('layout', LAYOUTS)
def test_little_memory_is_taken_beside_the_parameters(tmp_path, layout):
  """At most 1.2 times the parameters, also where they are cast and where JAX has them."""
  for stored in (np.float32, ml_dtypes.bfloat16):
    name = np.dtype(stored).name
    for folder, config in ((tmp_path / f'tiny_{name}', SMALL), (tmp_path / name, LARGE)):
      folder.mkdir()
      write(folder, config, layout, stored)
  expected = sum(
      value[:1].astype(np.float64).sum() for _, value in values_of(LARGE, ml_dtypes.bfloat16))
  for stored, dtype, way in (
      ('float32', '', 'params'), ('float32', 'bfloat16', 'params'),
      ('bfloat16', 'float32', 'model'), ('float32', 'bfloat16', 'model'),
  ):
    found = python(MEASURE, tmp_path / f'tiny_{stored}', tmp_path / stored, dtype, way)
    print(f'{layout} {stored} -> {dtype or "as stored"}, {way}: '
          f'{found["taken"] / found["weights"]:.3f} times the parameters')
    assert found['dtypes'] == [dtype or stored]
    assert math.isclose(found['sum'], expected, rel_tol=1e-2)
    assert found['weights'] == LARGE_COUNT * np.dtype(
        ml_dtypes.bfloat16 if found['dtypes'] == ['bfloat16'] else np.float32).itemsize
    # Less than what the parameters take could not be: a peak of before would hide them.
    assert found['taken'] / found['weights'] >= 0.95, (layout, stored, dtype, way)
    assert found['taken'] <= 1.2 * found['weights'] + FIXED, (layout, stored, dtype, way)


SHARD = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from speculative_t5x import checkpoints, reading
path, dtype = sys.argv[1:]
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ('data', 'model'))
whole = checkpoints.load_params(path, dtype=dtype)
flat = lambda tree: {jax.tree_util.keystr(k, simple=True, separator='/'): v
                     for k, v in jax.tree_util.tree_leaves_with_path(tree)}

def spec(name, shape):
  # Of `out`, 24 joined columns by 4: parts of 6, while a head has 4.
  if len(shape) < 2:
    return P()
  if 'relpos' in name:
    return P(('data', 'model')) if shape[0] % 4 == 0 else P('data')
  return P(None, ('data', 'model')) if 'wo' in name or 'query' in name else P('model', 'data')

sharding_of = lambda name, shape: NamedSharding(mesh, spec(name, shape))
read = {}
start = reading._Read.start
def count(self):
  read[self.output.name] = read.get(self.output.name, 0) + self.num_bytes
  return start(self)
reading._Read.start = count
params = checkpoints.load_params(path, dtype=dtype, sharding=sharding_of)
tree = jax.tree_util.tree_map_with_path(
    lambda k, v: sharding_of(jax.tree_util.keystr(k, simple=True, separator='/'), v.shape), whole)
again = checkpoints.load_params(path, dtype=dtype, sharding=tree)
one = checkpoints.load_params(
    path, dtype=dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[2]))
held = 0
for name, value in flat(params).items():
  expected = flat(whole)[name]
  assert isinstance(value, jax.Array) and value.sharding == sharding_of(name, expected.shape), name
  for shard in value.addressable_shards:
    assert shard.data.shape == value.sharding.shard_shape(value.shape), name
    np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index], name)
  np.testing.assert_array_equal(np.asarray(flat(again)[name]), expected, name)
  np.testing.assert_array_equal(np.asarray(flat(one)[name]), expected, name)
  assert flat(one)[name].devices() == {jax.devices()[2]}
  held += sum(x.data.nbytes for x in value.addressable_shards if x.device == jax.devices()[0])
print(json.dumps({'held': held, 'whole': sum(x.nbytes for x in flat(whole).values())}))
"""


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_devices_hold_their_parts(tmp_path, layout, dtype):
  write(tmp_path, SMALL, layout, np.float32)
  found = python(SHARD, tmp_path, dtype, devices=4)
  assert found['held'] < 0.3 * found['whole']


class Half:
  """A sharding of one process of two, whose devices hold the second half of an axis."""

  def __init__(self, axis):
    self.axis = axis

  def addressable_devices_indices_map(self, shape):
    index = [slice(None)] * len(shape)
    if len(shape) > self.axis and shape[self.axis] % 2 == 0:
      index[self.axis] = slice(shape[self.axis] // 2, None)
    return {'a': tuple(index), 'b': tuple(index)}


def parts_of(path, arrays, axis, monkeypatch):
  """What a process with `Half` reads, by name."""
  monkeypatch.setattr(reading._Output, 'take', lambda self: list(self._memory.values()))
  found = dict(reading.read_all(str(path), arrays, sharding_of=lambda *_: Half(axis)))
  monkeypatch.undo()
  return found


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('axis', [0, 1])
def test_only_what_the_devices_of_a_process_hold_is_read(tmp_path, monkeypatch, layout, axis):
  """Chunks and bytes of the other half are destroyed: whoever reads them fails or finds NaN."""
  path = tmp_path / 'checkpoint'
  path.mkdir()
  monkeypatch.setattr(checkpoints, 'MAX_CHUNK_BYTES', 256)
  write(path, SMALL, layout, np.float32)
  expected = checkpoints.load_params(path)
  _, arrays = checkpoints.open_params(path)
  name, ours = 'encoder/layers_0/mlp/wi_0/kernel', expected
  for key in name.split('/'):
    ours = ours[key]
  if layout == 't5x':
    if axis:
      pytest.skip('chunks are rows')
    folder = path / f'target.{name.replace("/", ".")}'
    for row in range(2):
      (folder / f'{row}.0').unlink()
  elif layout == 'huggingface':
    # A row there is a column here.
    file = tensor_files.open_file(str(path), 'model.safetensors')
    theirs = 'encoder.block.0.layer.1.DenseReluDense.wi_0.weight'
    offset = file.start + file.tensors[theirs]['data_offsets'][0]
    stored = np.memmap(path / 'model.safetensors', np.float32, 'r+', offset, (32, 16))
    (stored.T[:8] if axis == 0 else stored.T[:, :16])[...] = np.nan
    stored.flush()
  found = parts_of(path, {name: arrays[name]}, axis, monkeypatch)[name]
  half = ours[8:] if axis == 0 else ours[:, 16:]
  assert len(found) == 1
  np.testing.assert_array_equal(found[0], half)
  if layout == 't5x':
    with pytest.raises(UserError, match=f"cannot read parameter '{name}'"):
      checkpoints.load_params(path)


def test_a_shardings_tree_names_every_parameter(tmp_path):
  write(tmp_path, SMALL, 't5x', np.float32)
  with pytest.raises(UserError, match=r"sharding of parameter 'decoder/.*': expected one, found n"):
    checkpoints.load_params(tmp_path, sharding={'token_embedder': {'embedding': None}})


@pytest.mark.parametrize('part', [(slice(0, 10), slice(0, 7)), (slice(3, 9), slice(2, 3)),
                                  (slice(0, 0), slice(0, 7)), ()])
@pytest.mark.parametrize('chunk', [(1, 7), (4, 3), (10, 7), (3, 1)])
@pytest.mark.parametrize('size', [1, 5, 12, 20, 1000])
def test_pieces_cover_a_part_once_and_end_where_chunks_do(part, chunk, size):
  seen = np.zeros((10, 7), int) if part else np.zeros((), int)
  chunk = chunk[:len(part)]
  pieces = list(reading._pieces(part, chunk, size))
  for piece in pieces:
    seen[piece] += 1
    for cut, whole, step in zip(piece, part, chunk, strict=True):
      assert cut.start == whole.start or cut.start % step == 0
      assert cut.stop == whole.stop or cut.stop % step == 0
    covered = math.prod(x.stop - x.start for x in piece)
    assert covered <= max(size, math.prod(chunk))
  expected = np.zeros_like(seen)
  expected[part] = 1
  np.testing.assert_array_equal(seen, expected)


@pytest.mark.parametrize('name', [
    'decoder/x_attention/query/kernel', 'decoder/x_attention/out/kernel'])
@pytest.mark.parametrize('stacked', [False, True])
def test_any_part_of_joined_heads_and_of_stacks(name, stacked):
  """Also parts that end inside a head, and those of one layer."""
  random = np.random.default_rng(0)
  shape = (3, 4, 5) if 'out' in name else (5, 3, 4)
  joined = (12, 5) if 'out' in name else (5, 12)
  layers = [random.normal(size=shape) for _ in range(3 if stacked else 1)]
  if stacked:
    array = in_memory(np.stack(layers, axis=1))
    found = minimal_tree({name.replace('decoder/', 'decoder/decoder/'): array})
    assert list(found) == [name.replace('decoder/', f'decoder/layers_{i}/') for i in range(3)]
  else:
    found = minimal_tree({name: in_memory(layers[0])})
  for array, layer in zip(found.values(), layers, strict=True):
    assert array.shape == joined
    for (a, b), (c, d) in itertools.product(
        itertools.combinations(range(0, joined[0] + 1, 2), 2),
        itertools.combinations(range(joined[1] + 1), 2)):
      out = np.zeros((b - a, d - c), np.float32)
      array.start((slice(a, b), slice(c, d)), out)()
      np.testing.assert_array_equal(
          out, layer.reshape(joined)[a:b, c:d].astype(np.float32))
      out = np.zeros((d - c, b - a), np.float32)
      transposed(array).start((slice(c, d), slice(a, b)), out)()
      np.testing.assert_array_equal(
          out, layer.reshape(joined).T[c:d, a:b].astype(np.float32))


def test_reads_under_way_are_bounded(monkeypatch):
  monkeypatch.setattr(reading, 'MIN_UNDER_WAY_BYTES', 4000)
  monkeypatch.setattr(reading, 'MIN_PIECE_BYTES', 1000)
  under_way, most = [], []

  def array(value):
    def start(index, out):
      part = value[index].copy()
      under_way.append(part.nbytes)
      most.append(sum(under_way))

      def wait():
        under_way.remove(part.nbytes)
        out[...] = part
      return wait

    return StoredArray(value.shape, value.dtype, start, (1, value.shape[1]))

  values = {f'x{i}': np.full((rows, 50), i, np.float32) for i, rows in enumerate((3, 70, 1, 40, 9))}
  found = dict(reading.read_all('x', {name: array(value) for name, value in values.items()}))
  assert list(found) == list(values)
  for name, value in values.items():
    np.testing.assert_array_equal(found[name], value)
    # Where the device is the CPU, JAX takes such memory as it is.
    assert found[name].ctypes.data % reading.ALIGNMENT == 0
  assert not under_way and 3000 <= max(most) <= 4000 and len(most) > 20
