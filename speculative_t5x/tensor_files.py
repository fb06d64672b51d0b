"""Safetensors files, read by parts: locally, or from a bucket by ranges of bytes.

A file is eight bytes with the length of its header, the header in JSON, and the tensors, row by
row. The library `safetensors` reads no buckets, and keeps a file mapped, whose pages then count as
memory of the process beside the arrays read from it. Here a part is mapped while it is read.
"""

import dataclasses
import json
import math
import os
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from speculative_t5x import layouts
from speculative_t5x.errors import UserError
from speculative_t5x.stored import Index, StoredArray, Wait, one_line

# Safetensors' word -> numpy's.
DTYPES = {'F64': 'float64', 'F32': 'float32', 'F16': 'float16', 'BF16': 'bfloat16'}

LENGTH_BYTES = 8
# The library's own limit.
MAX_HEADER_BYTES = 100_000_000


@dataclasses.dataclass(frozen=True)
class TensorFile:
  """A safetensors file.

  Attributes:
    path: the folder, local or `gs://`.
    file: its name there.
    tensors: what it holds, by name: `dtype`, `shape` and `data_offsets` as in the header.
    start: where the first tensor begins, in bytes.
  """

  path: str
  file: str
  tensors: dict[str, dict[str, Any]]
  start: int

  def array(self, name: str) -> StoredArray:
    """A tensor of one of `DTYPES`, as it is stored."""
    tensor = self.tensors[name]
    shape, dtype = tuple(tensor['shape']), jnp.dtype(DTYPES[tensor['dtype']])
    offset = self.start + tensor['data_offsets'][0]
    read = _read_remote if is_remote(self.path) else _read_local

    def start(index: Index, out: np.ndarray) -> Wait:
      # Whole rows lie together.
      rows, within = (index[0], index[1:]) if shape else (slice(0, 1), ())
      row_bytes = math.prod(shape[1:]) * dtype.itemsize
      begin = offset + rows.start * row_bytes
      wait = read(self, begin, begin + (rows.stop - rows.start) * row_bytes)

      def finish():
        part = wait().view(dtype).reshape(-1, *shape[1:])[(slice(None), *within)]
        out[...] = part.reshape(out.shape)

      return finish

    return StoredArray(shape, dtype, start, (1, *shape[1:]) if shape else ())


def open_file(path: str, file: str) -> TensorFile | None:
  """Reads the header of a file.

  Args:
    path: the folder, local or `gs://`.
    file: its name there.

  Returns:
    The file, or None where there is none.

  Raises:
    UserError: it is truncated or damaged.
  """
  if is_remote(path):
    read = lambda start, stop: _fetch(path, file, start, stop)
    # A range of no bytes only says whether there is a file.
    if read(0, 0) is None:
      return None
    size = None
  else:
    local = os.path.join(path, file)
    if not os.path.isfile(local):
      return None
    size = os.path.getsize(local)

    def read(start, stop):
      with open(local, 'rb') as opened:
        opened.seek(start)
        return opened.read(stop - start)

  try:
    length = int.from_bytes(_all_of(read, 0, LENGTH_BYTES), 'little')
    if length > MAX_HEADER_BYTES:
      raise ValueError(f'a header of {length} bytes')
    start = LENGTH_BYTES + length
    tensors = json.loads(_all_of(read, LENGTH_BYTES, start))
    tensors.pop('__metadata__', None)
    stop = start + _length_of(tensors)
    if size is not None and size != stop:
      raise ValueError(f'expected {stop} bytes')
    if size is None and stop > start:
      _all_of(read, stop - 1, stop)
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    found = 'file' if size is None else f'one of {size} bytes'
    raise UserError(
        f'{path}: {file}: expected a complete safetensors file, found a truncated or damaged '
        f'{found} ({one_line(error)})'
    ) from error
  return TensorFile(path, file, tensors, start)


def is_remote(path: str) -> bool:
  """Whether `path` is in a bucket."""
  return path.startswith('gs://')


def exists(path: str, file: str) -> bool:
  """Whether a folder, local or `gs://`, has a file of this name, which is not read."""
  if is_remote(path):
    return _fetch(path, file, 0, 0) is not None
  return os.path.isfile(os.path.join(path, file))


def read_file(path: str, file: str) -> bytes | None:
  """The content of a file of a folder, local or `gs://`, or None where there is none."""
  if is_remote(path):
    return layouts.read_file(path, layouts.kvstore_of(path), file)
  try:
    return pathlib.Path(path, file).read_bytes()
  except (FileNotFoundError, NotADirectoryError):
    return None
  except OSError as error:
    raise UserError(f"{path}: cannot read '{file}': {error.strerror}") from error


def _length_of(tensors: dict[str, Any]) -> int:
  """How many bytes the tensors take, which must lie one after the other."""
  stop = 0
  for name, tensor in sorted(tensors.items(), key=lambda item: item[1]['data_offsets']):
    first, last = tensor['data_offsets']
    if first != stop or last < first:
      raise ValueError(f"tensor '{name}' at bytes {first} to {last}")
    if (dtype := DTYPES.get(tensor['dtype'])) is not None:
      expected = math.prod(tensor['shape']) * jnp.dtype(dtype).itemsize
      if last - first != expected:
        raise ValueError(f"tensor '{name}' of {last - first} bytes, expected {expected}")
    stop = last
  return stop


def _all_of(read, start: int, stop: int) -> bytes:
  """Bytes of a file, which must all be there."""
  content = read(start, stop)
  if content is None or len(content) != stop - start:
    raise ValueError(f'it ends before byte {stop}')
  return content


def _read_local(file: TensorFile, start: int, stop: int):
  """A function that maps a range of bytes into memory."""
  path = os.path.join(file.path, file.file)
  if start == stop:
    return lambda: np.empty(0, np.uint8)
  return lambda: np.memmap(path, np.uint8, 'r', offset=start, shape=(stop - start,))


def _read_remote(file: TensorFile, start: int, stop: int):
  """Starts reading a range of bytes; returns a function that waits for it."""
  if start == stop:
    return lambda: np.empty(0, np.uint8)
  store = layouts.open_store(layouts.kvstore_of(file.path))
  reading = store.read(file.file, byte_range=slice(start, stop))

  def wait():
    found = reading.result()
    if found.state == 'missing':
      raise FileNotFoundError(f'{file.file} is no longer there')
    return np.frombuffer(found.value, np.uint8)

  return wait


def _fetch(path: str, file: str, start: int, stop: int) -> bytes | None:
  """A range of bytes, or None where there is no file."""
  try:
    found = layouts.open_store(layouts.kvstore_of(path)).read(
        file, byte_range=slice(start, stop)).result()
  except ValueError as error:
    if 'OUT_OF_RANGE' in str(error):
      return b''
    raise UserError(f"{path}: cannot read '{file}': {one_line(error)}") from error
  except OSError as error:
    raise UserError(f"{path}: cannot read '{file}': {one_line(error)}") from error
  return None if found.state == 'missing' else bytes(found.value)
