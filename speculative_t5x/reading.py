"""Reads the arrays of a checkpoint, to the host or straight to the devices that ask for a part.

Arrays are read in pieces, a few at once, into the memory that holds them in the end, and cast on
the way. So what is held beside the parameters is what is under way, in the few forms that a chunk
has from file to array: a sixty-fourth of the checkpoint, or one chunk of it if that is larger.
"""

import collections
import ctypes
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from speculative_t5x.errors import UserError
from speculative_t5x.stored import Index, StoredArray, cast_dtype, one_line

# How an array is placed, by its name and shape; None is on the host, as numpy.
ShardingOf = Callable[[str, tuple[int, ...]], jax.sharding.Sharding | None]

# What is read at once: shares of all that is to be read, within limits. The upper ones keep the
# links to a bucket busy; the lower ones keep small checkpoints from being read in crumbs.
PIECE_SHARE, MIN_PIECE_BYTES, MAX_PIECE_BYTES = 128, 2**20, 2**25
UNDER_WAY_SHARE, MIN_UNDER_WAY_BYTES, MAX_UNDER_WAY_BYTES = 64, 2**22, 2**30
MAX_READS = 128

# JAX uses aligned memory of the host as it is where the CPU is the device, and copies other.
ALIGNMENT = 64


def read_all(
    path: str, arrays: Mapping[str, StoredArray], *, dtype: Any = None,
    sharding_of: ShardingOf | None = None,
) -> Iterator[tuple[str, np.ndarray | jax.Array]]:
  """Reads arrays in their order. Progress is shown on a terminal.

  Args:
    path: the checkpoint, for messages.
    arrays: by name.
    dtype: floating dtype to cast floating arrays to; None keeps the stored one.
    sharding_of: where each array is to be; of arrays with a sharding, only what this process's
      devices hold is read.

  Yields:
    Name and array, numpy's or JAX's.

  Raises:
    UserError: an array cannot be read, or its axes do not divide as its sharding says.
  """
  outputs = [
      _Output(path, name, array, dtype, sharding_of and sharding_of(name, array.shape))
      for name, array in arrays.items()
  ]
  total = sum(output.num_bytes for output in outputs)
  within = lambda share, least, most: min(max(total // share, least), most)
  limit = within(UNDER_WAY_SHARE, MIN_UNDER_WAY_BYTES, MAX_UNDER_WAY_BYTES)
  reads = _reads(outputs, within(PIECE_SHARE, MIN_PIECE_BYTES, MAX_PIECE_BYTES))
  waiting, under_way, num_bytes, untrimmed = next(reads, None), collections.deque(), 0, 0
  outputs = None  # Each goes with its last read.
  progress = tqdm(
      total=total, desc='parameters', unit='B', unit_scale=True, leave=False,
      disable=not sys.stderr.isatty(),
  )
  with progress:
    while waiting or under_way:
      while waiting and (not under_way or (
          num_bytes + waiting.num_bytes <= limit and len(under_way) < MAX_READS)):
        num_bytes += waiting.num_bytes
        under_way.append((waiting, waiting.start()))
        waiting = next(reads, None)
      read, wait = under_way.popleft()
      read.finish(wait)
      num_bytes -= read.num_bytes
      progress.update(read.num_bytes)
      untrimmed += read.num_bytes
      if untrimmed >= limit:
        _trim()()
        untrimmed = 0
      output = read.output
      del read, wait
      if output.is_complete:
        name, value = output.name, output.take()
        del output
        yield name, value
        del value


class _Output:
  """One array as it is wanted: the parts of it, and how they become an array.

  Attributes:
    name: of the array.
    array: where it comes from.
    parts: the indices of the parts, each once.
    left: how many reads it still needs.
  """

  def __init__(
      self, path: str, name: str, array: StoredArray, dtype: Any,
      sharding: jax.sharding.Sharding | None,
  ):
    self.path, self.name, self.array, self.left = path, name, array, 0
    self._dtype, self._sharding = cast_dtype(array.dtype, dtype), sharding
    self._memory = {}
    if sharding is None:
      self.parts = (array.whole,)
      return
    try:
      of_devices = sharding.addressable_devices_indices_map(array.shape)
    except (ValueError, IndexError) as error:
      raise UserError(
          f"{path}: parameter '{name}' of shape {array.shape} cannot be sharded as {sharding}: "
          f'{one_line(error)}'
      ) from error
    self._devices = {
        device: tuple(
            slice(*part.indices(size)[:2]) for part, size in zip(index, array.shape, strict=True))
        for device, index in of_devices.items()
    }
    self.parts = tuple({_key(part): part for part in self._devices.values()}.values())

  @property
  def num_bytes(self) -> int:
    """What is read of it, as it is stored."""
    return sum(math.prod(_shape(part)) for part in self.parts) * self.array.dtype.itemsize

  @property
  def is_complete(self) -> bool:
    """Whether all reads are done."""
    return self.left == 0

  def memory(self, part: Index) -> np.ndarray:
    """Where a part goes."""
    key = _key(part)
    if key not in self._memory:
      self._memory[key] = _aligned(_shape(part), self._dtype)
    return self._memory[key]

  def take(self) -> np.ndarray | jax.Array:
    """The array; its memory is handed over."""
    memory, self._memory = self._memory, {}
    if self._sharding is None:
      return memory.popitem()[1]
    pieces = [
        jax.device_put(memory[_key(part)], device) for device, part in self._devices.items()]
    array = jax.make_array_from_single_device_arrays(self.array.shape, self._sharding, pieces)
    # Copies to devices are under way until then, with the host's memory.
    return jax.block_until_ready(array)


@dataclasses.dataclass(frozen=True)
class _Read:
  """One piece of a part of an array."""

  output: _Output
  part: Index
  piece: Index

  @property
  def num_bytes(self) -> int:
    return math.prod(_shape(self.piece)) * self.output.array.dtype.itemsize

  def start(self) -> Callable[[], None]:
    inside = tuple(
        slice(piece.start - part.start, piece.stop - part.start)
        for piece, part in zip(self.piece, self.part, strict=True))
    # With the ellipsis, what a whole index of no axes gives is a view as well.
    out = self.output.memory(self.part)[(*inside, ...)]
    return self._checked(lambda: self.output.array.start(self.piece, out))

  def finish(self, wait: Callable[[], None]) -> None:
    self._checked(wait)
    self.output.left -= 1

  def _checked(self, action: Callable[[], Any]) -> Any:
    try:
      return action()
    except UserError:
      raise
    except (ValueError, OSError) as error:
      raise UserError(
          f"{self.output.path}: cannot read parameter '{self.output.name}': {one_line(error)}"
      ) from error


def _reads(outputs: list[_Output], piece_bytes: int) -> Iterator[_Read]:
  """What to read, in order: the layers of a stack piece by piece, other arrays one by one."""
  outputs = collections.deque(outputs)
  while outputs:
    group = [outputs.popleft()]
    stack = group[0].array.stack
    while stack is not None and outputs and outputs[0].array.stack is stack:
      group.append(outputs.popleft())
    each = []
    for output in group:
      item_bytes = output.array.dtype.itemsize * (stack.depth if stack else 1)
      each.append([
          _Read(output, part, piece) for part in output.parts
          for piece in _pieces(part, output.array.chunk, piece_bytes // item_bytes)])
      output.left = len(each[-1])
    group = output = None
    for layers in itertools.zip_longest(*each):
      yield from (read for read in layers if read is not None)


def _pieces(part: Index, chunk: tuple[int, ...], size: int) -> Iterator[Index]:
  """Cuts a part where chunks end, into pieces of about `size` numbers, but of whole chunks."""
  lengths = _shape(part)
  steps = [max(1, step) for step in chunk]
  piece = [max(1, min(pair)) for pair in zip(steps, lengths, strict=True)]
  for axis in reversed(range(len(steps))):
    # Only multiples of the chunk end where chunks do.
    steps[axis] *= max(1, size // math.prod(piece))
    piece[axis] = max(1, min(steps[axis], lengths[axis]))
  cuts = []
  for bounds, step in zip(part, steps, strict=True):
    inner = range((bounds.start // step + 1) * step, bounds.stop, step)
    edges = [bounds.start, *inner, bounds.stop]
    cuts.append([slice(*pair) for pair in itertools.pairwise(edges)])
  yield from itertools.product(*cuts)


@functools.cache
def _trim() -> Callable[[], Any]:
  """Gives the system back what threads have freed that decode chunks; glibc keeps it for each."""
  try:
    trim = ctypes.CDLL(None).malloc_trim
  except (AttributeError, OSError, TypeError):  # Another C library.
    return lambda: None
  return lambda: trim(0)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """Memory for an array, at an address that JAX takes over without a copy."""
  count = math.prod(shape) * dtype.itemsize
  memory = np.empty(count + ALIGNMENT, np.uint8)
  offset = -memory.ctypes.data % ALIGNMENT
  return memory[offset : offset + count].view(dtype).reshape(shape)


def _shape(index: Index) -> tuple[int, ...]:
  return tuple(part.stop - part.start for part in index)


def _key(index: Index) -> tuple[tuple[int, int], ...]:
  """The index as something with a hash, which slices have not before Python 3.12."""
  return tuple((part.start, part.stop) for part in index)
