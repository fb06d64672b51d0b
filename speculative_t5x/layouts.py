"""The layouts of T5X and Orbax: which array of a checkpoint is which parameter.

* T5X's native one: a directory with a msgpack file `checkpoint`, whose leaves are small arrays or
  tensorstore specs, beside one zarr folder an array (`target.encoder.encoder_norm.scale`).
* The older single file: the same msgpack tree with every array inside.
* Orbax's: a directory (T5X puts it in a subfolder `state`) whose `_METADATA` describes the tree,
  or an older msgpack file `checkpoint` with placeholders; arrays are zarr or zarr3, in folders or
  in one OCDBT database.

All arrays go through tensorstore. Orbax's own reader is not used: its restore needs the whole
tree, optimizer included, and its errors do not name the parameter. Chunks that are absent are
errors here, where zarr's default would be to read them as zeros.
"""

import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import flax
import numpy as np

from speculative_t5x.errors import UserError
from speculative_t5x.stored import Index, StoredArray, Wait, in_memory, one_line

# Subfolders that T5X ('state') and Orbax's managers put the tree into.
ITEM_FOLDERS = ('', 'state/', 'default/', 'params/', 'items/', 'pytree/')

# Names that lead from the root of a checkpoint to its parameters.
WRAPPERS = ('optimizer', '_optimizer', 'target', 'params')

# A tree without any of `WRAPPERS` is taken for the parameters themselves if it has one of these.
MODULES = ('token_embedder', 'encoder', 'decoder')

PLACEHOLDER = 'PLACEHOLDER://'


def find_leaves(path: str) -> tuple[str, dict[str, Any]]:
  """The parameters of a T5X or Orbax checkpoint.

  Args:
    path: the checkpoint, local or `gs://`.

  Returns:
    'T5X' or 'Orbax', and each parameter by name: a numpy array or a tensorstore spec.

  Raises:
    UserError: nothing at `path`, not a checkpoint, or a truncated file.
  """
  if not path.startswith('gs://') and not os.path.exists(path):
    raise UserError(
        f'{path}: expected a T5X, Orbax or Hugging Face checkpoint, found nothing at this path'
    )
  if os.path.isfile(path):
    folder, file = os.path.split(os.path.abspath(path))
    return _msgpack_leaves(path, kvstore_of(folder), read_file(path, kvstore_of(folder), file))
  for item in ITEM_FOLDERS:
    kvstore = kvstore_of(path, item)
    if (content := read_file(path, kvstore, '_METADATA')) is not None:
      return 'Orbax', _orbax_leaves(path, kvstore, content)
    if (content := read_file(path, kvstore, 'checkpoint')) is not None:
      return _msgpack_leaves(path, kvstore, content)
  if path.startswith('gs://'):
    folder, _, file = path.rstrip('/').rpartition('/')
    if (content := read_file(path, kvstore_of(folder), file)) is not None:
      return _msgpack_leaves(path, kvstore_of(folder), content)
  message = (
      f"{path}: expected a T5X, Orbax or Hugging Face checkpoint, found neither 'checkpoint' nor "
      "'_METADATA' nor 'config.json'"
  )
  inside = [entry.name for entry in pathlib.Path(path).glob('checkpoint_*')]
  steps = [int(match[1]) for name in inside if (match := re.fullmatch(r'checkpoint_(\d+)', name))]
  if steps:
    message += f' (it holds checkpoint_{max(steps)}: name that)'
  raise UserError(message)


def open_array(path: str, name: str, leaf: Any) -> Callable[[], StoredArray]:
  """Starts opening one array.

  Args:
    path: the checkpoint, for messages.
    name: the parameter, for messages.
    leaf: a numpy array, or a tensorstore spec with absolute paths.

  Returns:
    A function that waits for the array.
  """
  import tensorstore as ts

  if not isinstance(leaf, dict):
    return lambda: in_memory(leaf)
  try:
    opening = ts.open(leaf, open=True, read=True)
  except ValueError as error:
    raise UserError(f"{path}: cannot open parameter '{name}': {one_line(error)}") from error

  def wait():
    try:
      store = opening.result()
    except (ValueError, OSError) as error:
      raise UserError(f"{path}: cannot open parameter '{name}': {one_line(error)}") from error
    # Versions before 3 hid bfloat16 in uint16; T5X refuses them too.
    if store.dtype.name == 'uint16':
      raise UserError(f"{path}: parameter '{name}': expected a floating dtype, found uint16")
    chunk = store.chunk_layout.read_chunk.shape or store.shape
    return StoredArray(
        tuple(store.shape), np.dtype(store.dtype.numpy_dtype),
        lambda index, out: _start(store, index, out), tuple(chunk),
    )

  return wait


def _start(store: Any, index: Index, out: np.ndarray) -> Wait:
  """Starts reading a part of a tensorstore into `out`, chunk by chunk."""
  import tensorstore as ts

  part = store[index][ts.d[:].translate_to[0]]
  if np.dtype(store.dtype.numpy_dtype) != out.dtype:
    part = ts.cast(part, out.dtype.name)
  return ts.array(out).write(part).result


def kvstore_of(path: str, item: str = '') -> dict[str, Any]:
  """The tensorstore spec of a directory, by where it is and not by where it was written."""
  if match := re.fullmatch(r'gs://([^/]+)/?(.*)', path):
    prefix = match[2].rstrip('/')
    return {'driver': 'gcs', 'bucket': match[1], 'path': (f'{prefix}/' if prefix else '') + item}
  return {'driver': 'file', 'path': f'{os.path.abspath(path)}/{item}'}


def open_store(kvstore: dict[str, Any]) -> Any:
  """The `tensorstore.KvStore` of a spec."""
  import tensorstore as ts

  return ts.KvStore.open(kvstore).result()


def read_file(path: str, kvstore: dict[str, Any], name: str) -> bytes | None:
  """The content of one file, or None where there is none."""
  try:
    read = open_store(kvstore).read(name).result()
  except (ValueError, OSError) as error:
    raise UserError(f"{path}: cannot read '{name}': {one_line(error)}") from error
  return None if read.state == 'missing' else bytes(read.value)


def array_spec(
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
  return read_file(path, kvstore, 'manifest.ocdbt') is not None


def _msgpack_leaves(
    path: str, kvstore: dict[str, Any], content: bytes
) -> tuple[str, dict[str, Any]]:
  """Leaves of the msgpack file of T5X, native or older, and of Orbax before `_METADATA`."""
  # A checkpoint is a msgpack map; text and most other formats do not start like one.
  if content and not (0x80 <= content[0] <= 0x8F or content[0] in (0xDE, 0xDF)):
    raise UserError(f'{path}: expected a T5X or Orbax checkpoint, found a file of another format')
  try:
    tree = flax.serialization.msgpack_restore(content)
  except Exception as error:  # msgpack and the array decoder raise many kinds; all mean this.
    raise UserError(
        f'{path}: expected a complete msgpack file, found a truncated or damaged one of '
        f'{len(content)} bytes ({one_line(error) or type(error).__name__})'
    ) from error
  tree = _params_of(path, tree)
  ocdbt = _is_ocdbt(path, kvstore)

  def is_leaf(_, value):
    return 'driver' in value and 'kvstore' in value if isinstance(value, dict) else True

  layout, leaves = 'T5X', {}
  for name, leaf in flax.traverse_util.flatten_dict(tree, is_leaf=is_leaf, sep='/').items():
    if isinstance(leaf, dict):
      # Before tensorstore 0.1.14 the path stood beside `kvstore`. Driver and bucket are those of
      # where the checkpoint was written and say nothing of where it is now.
      stored_as = leaf['kvstore'].get('path') or leaf.get('path') or name
      leaves[name] = array_spec(kvstore, stored_as)
    elif isinstance(leaf, str) and leaf.startswith(PLACEHOLDER):
      leaves[name] = array_spec(kvstore, leaf.removeprefix(PLACEHOLDER), ocdbt=ocdbt)
      layout = 'Orbax'
    elif isinstance(leaf, np.ndarray | np.generic):
      leaves[name] = np.asarray(leaf)
    elif leaf is not None:
      raise UserError(
          f"{path}: parameter '{name}': expected an array, found {type(leaf).__name__}"
      )
  return layout, leaves


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
      name: array_spec(kvstore, stored_as, **options)
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
