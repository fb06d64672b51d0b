"""Reading and writing the parameters of T5X checkpoints, without T5X.

Three layouts are read, told apart by what is found at the path:

* T5X's native one: a directory with a msgpack file `checkpoint`, whose leaves are small arrays or
  tensorstore specs, beside one zarr folder an array (`target.encoder.encoder_norm.scale`).
* The older single file: the same msgpack tree with every array inside.
* Orbax's: a directory (T5X puts it in a subfolder `state`) whose `_METADATA` describes the tree,
  or an older msgpack file `checkpoint` with placeholders; arrays are zarr or zarr3, in folders or
  in one OCDBT database.

All arrays go through tensorstore. Orbax's own reader is not used: its restore needs the whole
tree, optimizer included, and its errors do not name the parameter. Chunks that are absent are
errors here, where zarr's default would be to read them as zeros.

Writing produces the native layout, version 3, as `t5x.checkpoints.Checkpointer` does.
"""

import collections
import json
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import flax
import jax.numpy as jnp
import numpy as np

from speculative_t5x.errors import UserError

# T5X's current version; version 2 differed in writing bfloat16 as uint16 (`t5x/checkpoints.py`).
VERSION = 3

# T5X's choice: large enough to be few files, small enough to partition.
MAX_CHUNK_BYTES = 64 * 1024 * 1024

# Subfolders that T5X ('state') and Orbax's managers put the tree into.
ITEM_FOLDERS = ('', 'state/', 'default/', 'params/', 'items/', 'pytree/')

# Names that lead from the root of a checkpoint to its parameters.
WRAPPERS = ('optimizer', '_optimizer', 'target', 'params')

# A tree without any of `WRAPPERS` is taken for the parameters themselves if it has one of these.
MODULES = ('token_embedder', 'encoder', 'decoder')

PLACEHOLDER = 'PLACEHOLDER://'
# Arrays that are read at once.
READS_AT_ONCE = 16


def load_params(
    path: str | os.PathLike, *, like: Mapping[str, Any] | None = None, dtype: Any = None
) -> dict[str, Any]:
  """Reads the parameters of a checkpoint; optimizer states are left unread.

  Args:
    path: a checkpoint directory or file, local or `gs://`.
    like: nested dict of what the parameters must be, with a `shape` at each leaf (arrays or
      `jax.ShapeDtypeStruct`); names and shapes are compared before any array is read.
    dtype: floating dtype to cast floating arrays to; None keeps the stored one.

  Returns:
    Nested dict of numpy arrays (`bfloat16` is that of `ml_dtypes`), by module name.

  Raises:
    UserError: nothing at `path`; not a checkpoint; a truncated file; an array or a part of one
      that is missing; the first parameter, by name, that differs from `like`.
  """
  path = os.path.expanduser(os.fspath(path))
  leaves = _find_leaves(path)
  arrays = {name: _open(path, name, leaf) for name, leaf in leaves.items()}
  arrays = {name: array() for name, array in arrays.items()}
  if like is not None:
    _check_like(path, arrays, like)
  # Some reads are under way at once. What is read is cast and let go, so that a large model stored
  # in float32 is never held whole beside its bfloat16 parameters.
  params, waiting, reads = {}, collections.deque(arrays), collections.deque()
  while waiting or reads:
    while waiting and len(reads) < READS_AT_ONCE:
      name = waiting.popleft()
      reads.append((name, _start_read(arrays.pop(name))))
    name, read = reads.popleft()
    try:
      value = np.asarray(read())
    except (ValueError, OSError) as error:
      raise UserError(f"{path}: cannot read parameter '{name}': {_one_line(error)}") from error
    params[name] = _cast(value, dtype)
  return flax.traverse_util.unflatten_dict(params, sep='/')


def check_params(path: str | os.PathLike, like: Mapping[str, Any]) -> None:
  """Compares the names and shapes of a checkpoint's parameters, without reading an array.

  Args:
    path: as of `load_params`.
    like: as of `load_params`.

  Raises:
    UserError: as `load_params`, but for what only reading an array shows.
  """
  path = os.path.expanduser(os.fspath(path))
  arrays = {name: _open(path, name, leaf) for name, leaf in _find_leaves(path).items()}
  _check_like(path, {name: array() for name, array in arrays.items()}, like)


def save_params(
    path: str | os.PathLike, params: Mapping[str, Any], *, step: int = 0, dtype: Any = None
) -> None:
  """Writes parameters as a native T5X checkpoint, readable by T5X's `Checkpointer`.

  The tree is that of T5X's `InferenceState`: parameters and step, no optimizer states, so
  training from it needs T5X's `fallback_to_scratch` or a fresh optimizer. The directory appears
  under its name only when it is complete.

  Args:
    path: local directory to create; T5X expects the name `checkpoint_<step>`.
    params: nested dict of arrays, by module name.
    step: training step to record.
    dtype: floating dtype to cast floating arrays to; None keeps each array's own.

  Raises:
    UserError: `path` exists already or is not local.
    ValueError: `params` is empty.
  """
  path = os.path.expanduser(os.fspath(path))
  if re.match(r'\w+://', path):
    raise UserError(f'{path}: expected a local directory to write a checkpoint to')
  if os.path.lexists(path):
    raise UserError(f'{path}: expected a new directory for the checkpoint, found an existing one')
  final = pathlib.Path(path).absolute()
  flat = flax.traverse_util.flatten_dict(flax.core.unfreeze(params), sep='/')
  if not flat:
    raise ValueError('no parameters to save')
  final.parent.mkdir(parents=True, exist_ok=True)
  # A sibling, so that the rename stays within one file system.
  partial = final.with_name(f'{final.name}.tmp-{uuid.uuid4().hex[:8]}')
  partial.mkdir()
  try:
    specs = _write_arrays(partial, {name: _cast(np.asarray(x), dtype) for name, x in flat.items()})
    state = {
        'state': {'step': np.asarray(step, np.int32)},
        'target': flax.traverse_util.unflatten_dict(specs, sep='/'),
    }
    # Written last: a directory without this file is not a checkpoint.
    (partial / 'checkpoint').write_bytes(
        flax.serialization.msgpack_serialize({'version': VERSION, 'optimizer': state})
    )
    partial.rename(final)
  except BaseException:
    shutil.rmtree(partial, ignore_errors=True)
    raise


def _write_arrays(folder: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """Writes one zarr folder an array; returns the specs, with paths relative to `folder`."""
  import tensorstore as ts

  specs, writes = {}, []
  for name, array in arrays.items():
    stored_as = 'target.' + name.replace('/', '.') + '/'
    metadata = {
        'compressor': {'id': 'gzip', 'level': 1},
        'shape': list(array.shape),
        'chunks': _chunk_shape(array),
    }
    specs[name] = {
        'driver': 'zarr',
        'dtype': array.dtype.name,
        'kvstore': {'driver': 'file', 'path': stored_as},
        'metadata': metadata,
    }
    opened = ts.open(
        {**specs[name], 'kvstore': {'driver': 'file', 'path': f'{folder}/{stored_as}'}},
        create=True,
    ).result()
    writes.append(opened.write(array))
  for write in writes:
    write.result()
  return specs


def _chunk_shape(array: np.ndarray) -> list[int]:
  """The array's shape, its leading axes cut until a chunk holds at most `MAX_CHUNK_BYTES`."""
  chunk = [max(1, size) for size in array.shape]  # zarr has no empty chunks.
  for axis in range(array.ndim):
    row_bytes = array.dtype.itemsize * int(np.prod(chunk[axis + 1:], dtype=np.int64))
    chunk[axis] = min(chunk[axis], max(1, MAX_CHUNK_BYTES // row_bytes))
  return chunk


def _cast(array: np.ndarray, dtype: Any) -> np.ndarray:
  """Casts floating arrays, bfloat16 included; leaves others alone."""
  if dtype is None or not jnp.issubdtype(array.dtype, jnp.floating):
    return array
  return array.astype(jnp.dtype(dtype))


def _check_like(path: str, arrays: Mapping[str, Any], like: Mapping[str, Any]) -> None:
  """Raises on the first parameter, by name, whose presence or shape differs from `like`."""
  expected = {
      name: tuple(leaf.shape)
      for name, leaf in flax.traverse_util.flatten_dict(flax.core.unfreeze(like), sep='/').items()
  }
  found = {name: tuple(array.shape) for name, array in arrays.items()}
  for name in sorted(expected.keys() | found.keys()):
    if expected.get(name) != found.get(name):
      raise UserError(
          f"{path}: parameter '{name}' differs: expected {_shape_text(expected.get(name))}, "
          f'found {_shape_text(found.get(name))}'
      )


def _shape_text(shape: tuple[int, ...] | None) -> str:
  return 'no such parameter' if shape is None else f'shape {shape}'


def _open(path: str, name: str, leaf: Any) -> Callable[[], Any]:
  """Starts opening one array.

  Args:
    path: the checkpoint, for messages.
    name: the parameter, for messages.
    leaf: a numpy array, or a tensorstore spec with absolute paths.

  Returns:
    A function that waits, and returns the numpy array or the open `TensorStore`.
  """
  import tensorstore as ts

  if not isinstance(leaf, dict):
    return lambda: leaf
  try:
    opening = ts.open(leaf, open=True, read=True)
  except ValueError as error:
    raise UserError(f"{path}: cannot open parameter '{name}': {_one_line(error)}") from error

  def wait():
    try:
      store = opening.result()
    except (ValueError, OSError) as error:
      raise UserError(f"{path}: cannot open parameter '{name}': {_one_line(error)}") from error
    # Versions before 3 hid bfloat16 in uint16; T5X refuses them too.
    if store.dtype.name == 'uint16':
      raise UserError(f"{path}: parameter '{name}': expected a floating dtype, found uint16")
    return store

  return wait


def _start_read(array: Any) -> Callable[[], Any]:
  """Starts reading a `TensorStore`; returns a function that waits for its numpy array."""
  if isinstance(array, np.ndarray):
    return lambda: array
  return array.read().result


def _find_leaves(path: str) -> dict[str, Any]:
  """The parameters of the checkpoint at `path`, each a numpy array or a tensorstore spec."""
  if not path.startswith('gs://') and not os.path.exists(path):
    raise UserError(f'{path}: expected a T5X or Orbax checkpoint, found nothing at this path')
  if os.path.isfile(path):
    folder, file = os.path.split(os.path.abspath(path))
    return _msgpack_leaves(path, _kvstore(folder), _read_file(path, _kvstore(folder), file))
  for item in ITEM_FOLDERS:
    kvstore = _kvstore(path, item)
    if (content := _read_file(path, kvstore, '_METADATA')) is not None:
      return _orbax_leaves(path, kvstore, content)
    if (content := _read_file(path, kvstore, 'checkpoint')) is not None:
      return _msgpack_leaves(path, kvstore, content)
  if path.startswith('gs://'):
    folder, _, file = path.rstrip('/').rpartition('/')
    if (content := _read_file(path, _kvstore(folder), file)) is not None:
      return _msgpack_leaves(path, _kvstore(folder), content)
  message = (
      f"{path}: expected a T5X or Orbax checkpoint, found neither 'checkpoint' nor '_METADATA'"
  )
  inside = [entry.name for entry in pathlib.Path(path).glob('checkpoint_*')]
  steps = [int(match[1]) for name in inside if (match := re.fullmatch(r'checkpoint_(\d+)', name))]
  if steps:
    message += f' (it holds checkpoint_{max(steps)}: name that)'
  raise UserError(message)


def _kvstore(path: str, item: str = '') -> dict[str, Any]:
  """The tensorstore spec of a directory, by where it is and not by where it was written."""
  if match := re.fullmatch(r'gs://([^/]+)/?(.*)', path):
    prefix = match[2].rstrip('/')
    return {'driver': 'gcs', 'bucket': match[1], 'path': (f'{prefix}/' if prefix else '') + item}
  return {'driver': 'file', 'path': f'{os.path.abspath(path)}/{item}'}


def _read_file(path: str, kvstore: dict[str, Any], name: str) -> bytes | None:
  """The content of one file, or None where there is none."""
  import tensorstore as ts

  try:
    read = ts.KvStore.open(kvstore).result().read(name).result()
  except (ValueError, OSError) as error:
    raise UserError(f"{path}: cannot read '{name}': {_one_line(error)}") from error
  return None if read.state == 'missing' else bytes(read.value)


def _array_spec(
    kvstore: dict[str, Any], name: str, *, zarr3: bool = False, sparse: bool = False,
    ocdbt: bool = False,
) -> dict[str, Any]:
  """The spec to open array `name` with; its metadata comes from the array itself.

  Args:
    kvstore: the directory that holds the arrays.
    name: folder, or prefix in the database, of the array.
    zarr3: the array is in zarr's version 3.
    sparse: the writer left out chunks that hold only the fill value, so absence is not an error.
    ocdbt: the directory is an OCDBT database.
  """
  name = name.rstrip('/') + '/'
  if ocdbt:
    kvstore = {'driver': 'ocdbt', 'base': kvstore, 'path': name}
  else:
    kvstore = {**kvstore, 'path': kvstore['path'] + name}
  return {
      'driver': 'zarr3' if zarr3 else 'zarr',
      'kvstore': kvstore,
      'fill_missing_data_reads': sparse,
  }


def _is_ocdbt(path: str, kvstore: dict[str, Any]) -> bool:
  return _read_file(path, kvstore, 'manifest.ocdbt') is not None


def _msgpack_leaves(path: str, kvstore: dict[str, Any], content: bytes) -> dict[str, Any]:
  """Leaves of the msgpack file of T5X, native or older, and of Orbax before `_METADATA`."""
  # A checkpoint is a msgpack map; text and most other formats do not start like one.
  if content and not (0x80 <= content[0] <= 0x8F or content[0] in (0xDE, 0xDF)):
    raise UserError(f'{path}: expected a T5X or Orbax checkpoint, found a file of another format')
  try:
    tree = flax.serialization.msgpack_restore(content)
  except Exception as error:  # msgpack and the array decoder raise many kinds; all mean this.
    raise UserError(
        f'{path}: expected a complete msgpack file, found a truncated or damaged one of '
        f'{len(content)} bytes ({_one_line(error) or type(error).__name__})'
    ) from error
  tree = _params_of(path, tree)
  ocdbt = _is_ocdbt(path, kvstore)

  def is_leaf(_, value):
    return 'driver' in value and 'kvstore' in value if isinstance(value, dict) else True

  leaves = {}
  for name, leaf in flax.traverse_util.flatten_dict(tree, is_leaf=is_leaf, sep='/').items():
    if isinstance(leaf, dict):
      # Before tensorstore 0.1.14 the path stood beside `kvstore`. Driver and bucket are those of
      # where the checkpoint was written and say nothing of where it is now.
      stored_as = leaf['kvstore'].get('path') or leaf.get('path') or name
      leaves[name] = _array_spec(kvstore, stored_as)
    elif isinstance(leaf, str) and leaf.startswith(PLACEHOLDER):
      leaves[name] = _array_spec(kvstore, leaf.removeprefix(PLACEHOLDER), ocdbt=ocdbt)
    elif isinstance(leaf, np.ndarray | np.generic):
      leaves[name] = np.asarray(leaf)
    elif leaf is not None:
      raise UserError(
          f"{path}: parameter '{name}': expected an array, found {type(leaf).__name__}"
      )
  return leaves


def _orbax_leaves(path: str, kvstore: dict[str, Any], content: bytes) -> dict[str, Any]:
  """Leaves of an Orbax tree, from its `_METADATA`."""
  tree = {}
  try:
    metadata = json.loads(content)
    for entry in metadata['tree_metadata'].values():
      keys = tuple(str(key['key']) for key in entry['key_metadata'])
      # Empty containers and None have an entry but no array.
      if not entry['value_metadata'].get('skip_deserialize', False):
        tree[keys] = '.'.join(keys)
    tree = flax.traverse_util.unflatten_dict(tree)
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise UserError(
        f"{path}: expected Orbax's tree description in '_METADATA', found a truncated or damaged "
        f'file of {len(content)} bytes'
    ) from error
  tree = _params_of(path, tree)
  options = {
      'zarr3': bool(metadata.get('use_zarr3', False)),
      'sparse': not metadata.get('store_array_data_equal_to_fill_value', True),
      'ocdbt': _is_ocdbt(path, kvstore),
  }
  return {
      name: _array_spec(kvstore, stored_as, **options)
      for name, stored_as in flax.traverse_util.flatten_dict(tree, sep='/').items()
  }


def _params_of(path: str, tree: Any) -> dict[str, Any]:
  """The subtree of the parameters."""
  root = tree
  wrapped = False
  while isinstance(tree, dict) and (inner := [name for name in WRAPPERS if name in tree]):
    tree = tree[inner[0]]
    wrapped = True
  if not isinstance(tree, dict) or not tree or not (wrapped or set(MODULES) & tree.keys()):
    names = ', '.join(sorted(map(str, root))[:8]) if isinstance(root, dict) else type(root).__name__
    raise UserError(f"{path}: expected parameters under 'target', found none (only: {names})")
  return tree


def _one_line(error: BaseException) -> str:
  """The message of a library's error on one line, without tensorstore's dump of the spec."""
  return ' '.join(re.split(r' \[(?:tensorstore_spec|source locations)=', str(error))[0].split())
