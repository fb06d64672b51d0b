"""Reading and writing the parameters of checkpoints, without T5X, Orbax or transformers.

Three kinds are read, told apart by what is found at the path:

* T5X's, native or a single file, and Orbax's: see `layouts`.
* Hugging Face's: a folder with `config.json` and safetensors files, see `huggingface`.

Whatever the kind, the tree is that of T5X's minimal network; a tree of its scalable network is
taken apart.
Writing here produces T5X's native layout, version 3, as `t5x.checkpoints.Checkpointer` does.
"""

import collections
import contextlib
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import flax
import jax
import numpy as np

from speculative_t5x import huggingface, layouts, reading
from speculative_t5x.errors import UserError
from speculative_t5x.stored import StoredArray, cast, is_minimal, minimal_tree

# T5X's current version; version 2 differed in writing bfloat16 as uint16 (`t5x/checkpoints.py`).
VERSION = 3

# T5X's choice: large enough to be few files, small enough to partition.
MAX_CHUNK_BYTES = 64 * 1024 * 1024

# Arrays that are written at once.
WRITES_AT_ONCE = 16

# Where parameters are to be: all alike, a tree of shardings by module name, or a function of a
# parameter's name (`/` between levels) and shape.
Shardings = jax.sharding.Sharding | Mapping[str, Any] | reading.ShardingOf


def load_params(
    path: str | os.PathLike, *, like: Mapping[str, Any] | None = None, dtype: Any = None,
    sharding: Shardings | None = None,
) -> dict[str, Any]:
  """Reads the parameters of a checkpoint; optimizer states are left unread.

  Beside the parameters themselves little memory is taken, see `reading`; but a checkpoint that is
  a single msgpack file is read whole.

  Args:
    path: a checkpoint directory or file, local or `gs://`.
    like: nested dict of what the parameters must be, with a `shape` at each leaf (arrays or
      `jax.ShapeDtypeStruct`); names and shapes are compared before any array is read.
    dtype: floating dtype to cast floating arrays to; None keeps the stored one.
    sharding: where to put the parameters; each process reads what its devices are to hold, and no
      more. A parameter whose sharding is None stays on the host, as do all without this argument.

  Returns:
    Nested dict by module name: of numpy arrays (`bfloat16` is that of `ml_dtypes`), and
    `jax.Array`s where there is a sharding. The tree of T5X's scalable network, with stacked layers
    and an axis of heads, becomes that of its minimal network, unless `like` is laid out as the
    former.

  Raises:
    UserError: nothing at `path`; not a checkpoint; a truncated file; an array or a part of one
      that is missing; the first parameter, by name, that differs from `like`; a parameter that
      `sharding` leaves out, or that does not divide as it says.
  """
  path = os.path.expanduser(os.fspath(path))
  _, arrays = open_params(path, like=like)
  return read_params(path, arrays, dtype=dtype, sharding=sharding)


def read_params(
    path: str, arrays: Mapping[str, StoredArray], *, like: Mapping[str, Any] | None = None,
    dtype: Any = None, sharding: Shardings | None = None, to_device: bool = False,
) -> dict[str, Any]:
  """`load_params` of a checkpoint that is open.

  Args:
    path: the checkpoint, for messages.
    arrays: as from `open_params`.
    like: as of `load_params`; None if it was given to `open_params`.
    dtype: as of `load_params`.
    sharding: as of `load_params`.
    to_device: whether what has no sharding goes to the default device, uncommitted.

  Returns:
    As `load_params`.

  Raises:
    UserError: as `load_params`.
  """
  if like is not None:
    check_shapes(path, arrays, _shapes_of(like))
  values = reading.read_all(
      path, arrays, dtype=dtype, sharding_of=_sharding_of(path, arrays, sharding))
  # One by one, so that no second copy is ever whole. `jnp.asarray` would copy bfloat16.
  place = jax.device_put if to_device else lambda value: value
  params = {name: place(value) for name, value in values}
  return flax.traverse_util.unflatten_dict(params, sep='/')


def _sharding_of(
    path: str, arrays: Mapping[str, StoredArray], sharding: Shardings | None
) -> reading.ShardingOf | None:
  """`sharding` as a function."""
  if sharding is None or callable(sharding):
    return sharding
  if isinstance(sharding, jax.sharding.Sharding):
    return lambda name, shape: sharding
  flat = flax.traverse_util.flatten_dict(flax.core.unfreeze(sharding), sep='/')
  for name in sorted(flat.keys() ^ arrays.keys()):
    expected, found = ('no such parameter', 'one') if name in flat else ('one', 'none')
    raise UserError(f"{path}: sharding of parameter '{name}': expected {expected}, found {found}")
  return lambda name, shape: flat[name]


def check_params(path: str | os.PathLike, like: Mapping[str, Any]) -> None:
  """Compares a checkpoint with what T5X's own restore, which renames nothing, is to find there.

  Args:
    path: as of `load_params`.
    like: as of `load_params`; names and shapes must be those in the checkpoint.

  Raises:
    UserError: as `load_params`, but for what only reading an array shows; and `path` is a Hugging
      Face folder.
  """
  path = os.path.expanduser(os.fspath(path))
  if huggingface.is_folder(path):
    raise UserError(
        f'{path}: expected a T5X or Orbax checkpoint, found a Hugging Face folder (convert it with '
        'python -m speculative_t5x.convert)'
    )
  check_shapes(path, _open_stored(path)[1], _shapes_of(like))


def open_params(
    path: str | os.PathLike, *, like: Mapping[str, Any] | None = None
) -> tuple[str, dict[str, StoredArray]]:
  """Finds the parameters of a checkpoint, without reading an array.

  Args:
    path: as of `load_params`.
    like: as of `load_params`.

  Returns:
    'T5X', 'Orbax' or 'Hugging Face', and the arrays by name, `/` between levels.

  Raises:
    UserError: as `load_params`, but for what only reading an array shows.
  """
  path = os.path.expanduser(os.fspath(path))
  if huggingface.is_folder(path):
    layout, arrays = 'Hugging Face', huggingface.open_folder(path)[1]
  else:
    layout, arrays = _open_stored(path)
  expected = None if like is None else _shapes_of(like)
  if expected is None or is_minimal(expected):
    arrays = minimal_tree(arrays)
  if expected is not None:
    check_shapes(path, arrays, expected)
  return layout, arrays


def _open_stored(path: str) -> tuple[str, dict[str, StoredArray]]:
  """The layout and the arrays of a T5X or Orbax checkpoint, as they are stored."""
  layout, leaves = layouts.find_leaves(path)
  opening = {name: layouts.open_array(path, name, leaf) for name, leaf in leaves.items()}
  return layout, {name: wait() for name, wait in opening.items()}


def _shapes_of(like: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  like = flax.traverse_util.flatten_dict(flax.core.unfreeze(like), sep='/')
  return {name: tuple(leaf.shape) for name, leaf in like.items()}


def check_shapes(
    path: str, arrays: Mapping[str, StoredArray], expected: Mapping[str, tuple[int, ...]]
) -> None:
  """Refuses parameters of other names or shapes.

  Args:
    path: the checkpoint, for messages.
    arrays: what it holds, by name.
    expected: the shape of each parameter, by name.

  Raises:
    UserError: the first parameter, by name, whose presence or shape differs.
  """
  found = {name: tuple(array.shape) for name, array in arrays.items()}
  for name in sorted(expected.keys() | found.keys()):
    if expected.get(name) != found.get(name):
      raise UserError(
          f"{path}: parameter '{name}' differs: expected {_shape_text(expected.get(name))}, "
          f'found {_shape_text(found.get(name))}'
      )


def _shape_text(shape: tuple[int, ...] | None) -> str:
  return 'no such parameter' if shape is None else f'shape {shape}'


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
  flat = flax.traverse_util.flatten_dict(flax.core.unfreeze(params), sep='/')
  if not flat:
    raise ValueError('no parameters to save')
  with new_folder(path) as partial:
    write_native(
        partial, ((name, cast(np.asarray(x), dtype)) for name, x in flat.items()), step=step
    )


@contextlib.contextmanager
def new_folder(path: str | os.PathLike) -> Iterator[pathlib.Path]:
  """A folder to write into, which gets its name when the block ends without an exception.

  Args:
    path: local directory to create.

  Yields:
    An empty folder beside it.

  Raises:
    UserError: `path` exists already or is not local.
  """
  path = os.path.expanduser(os.fspath(path))
  if re.match(r'\w+://', path):
    raise UserError(f'{path}: expected a local directory to write a checkpoint to')
  if os.path.lexists(path):
    raise UserError(f'{path}: expected a new directory for the checkpoint, found an existing one')
  final = pathlib.Path(path).absolute()
  final.parent.mkdir(parents=True, exist_ok=True)
  # A sibling, so that the rename stays within one file system.
  partial = final.with_name(f'{final.name}.tmp-{uuid.uuid4().hex[:8]}')
  partial.mkdir()
  try:
    yield partial
    partial.rename(final)
  except BaseException:
    shutil.rmtree(partial, ignore_errors=True)
    raise


def write_native(
    folder: pathlib.Path, arrays: Iterable[tuple[str, np.ndarray]], *, step: int = 0
) -> None:
  """Writes T5X's native layout into an empty folder.

  Args:
    folder: where to.
    arrays: name, `/` between levels, and array of each parameter; a few are held at once.
    step: training step to record.
  """
  state = {
      'state': {'step': np.asarray(step, np.int32)},
      'target': flax.traverse_util.unflatten_dict(_write_arrays(folder, arrays), sep='/'),
  }
  # Written last: a directory without this file is not a checkpoint.
  (folder / 'checkpoint').write_bytes(
      flax.serialization.msgpack_serialize({'version': VERSION, 'optimizer': state})
  )


def _write_arrays(
    folder: pathlib.Path, arrays: Iterable[tuple[str, np.ndarray]]
) -> dict[str, Any]:
  """Writes one zarr folder an array; returns the specs, with paths relative to `folder`."""
  import tensorstore as ts

  specs, writes = {}, collections.deque()
  for name, array in arrays:
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
    while len(writes) >= WRITES_AT_ONCE:
      writes.popleft().result()
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
