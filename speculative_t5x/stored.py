"""Arrays of a checkpoint that are known by name, shape and dtype, and not read yet."""

import collections
import dataclasses
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from speculative_t5x.errors import UserError

# Arrays that are read at once.
READS_AT_ONCE = 16

# Modules that T5X's scalable network scans over: their arrays have the layers as axis 1.
SCANNED = re.compile(r'(encoder|decoder)/\1/(.+)')
# Kernels that it keeps with an axis of heads.
PROJECTION = re.compile(r'.*attention/(query|key|value|out)/kernel')


@dataclasses.dataclass(frozen=True)
class StoredArray:
  """One array, wherever it is.

  Attributes:
    shape: of the array.
    dtype: numpy dtype it is stored in.
    start: starts reading; returns a function that waits for the numpy array.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  start: Callable[[], Callable[[], np.ndarray]]

  @property
  def size(self) -> int:
    """How many numbers it holds."""
    return math.prod(self.shape)

  @property
  def num_bytes(self) -> int:
    """What it takes as it is stored."""
    return self.size * self.dtype.itemsize


def in_memory(array: np.ndarray) -> StoredArray:
  """An array that needs no reading."""
  return StoredArray(array.shape, array.dtype, lambda: lambda: array)


def read_all(
    path: str, arrays: Mapping[str, StoredArray], *, dtype: Any = None
) -> Iterator[tuple[str, np.ndarray]]:
  """Reads arrays in their order, some of them at once.

  What is read is cast and let go, so that a large model stored in float32 is never held whole
  beside its bfloat16 parameters. Progress is shown on a terminal.

  Args:
    path: the checkpoint, for messages.
    arrays: by name.
    dtype: floating dtype to cast floating arrays to; None keeps the stored one.

  Yields:
    Name and array.

  Raises:
    UserError: an array cannot be read.
  """
  waiting, reads = collections.deque(arrays.items()), collections.deque()
  progress = tqdm(
      total=sum(array.num_bytes for array in arrays.values()), desc='parameters', unit='B',
      unit_scale=True, leave=False, disable=not sys.stderr.isatty(),
  )
  with progress:
    while waiting or reads:
      while waiting and len(reads) < READS_AT_ONCE:
        name, array = waiting.popleft()
        reads.append((name, array.start()))
      name, read = reads.popleft()
      try:
        value = np.asarray(read())
      except UserError:
        raise
      except (ValueError, OSError) as error:
        raise UserError(f"{path}: cannot read parameter '{name}': {one_line(error)}") from error
      progress.update(value.nbytes)
      del read
      yield name, cast(value, dtype)


def cast(array: np.ndarray, dtype: Any) -> np.ndarray:
  """Casts floating arrays, bfloat16 included; leaves others alone."""
  if dtype is None or not jnp.issubdtype(array.dtype, jnp.floating):
    return array
  return array.astype(jnp.dtype(dtype), copy=False)


def minimal_tree(arrays: Mapping[str, StoredArray]) -> dict[str, StoredArray]:
  """Turns the arrays of T5X's scalable network into those of its minimal one.

  Args:
    arrays: by name. Those of scanned modules are cut along axis 1, so that every layer has its
      own; attention kernels `[E, H, K]` and `[H, K, E]` become matrices. Others stay as they are.

  Returns:
    The arrays by the names of the minimal network, `encoder/layers_0/…`.
  """
  found = {}
  for name, array in arrays.items():
    match = SCANNED.fullmatch(name)
    if not match or len(array.shape) < 2:
      found[name] = _join_heads(name, array)
      continue
    stack = _Stack(array)
    shape = (array.shape[0], *array.shape[2:])
    for layer in range(array.shape[1]):
      own = f'{match[1]}/layers_{layer}/{match[2]}'
      found[own] = _join_heads(own, StoredArray(shape, array.dtype, stack.start_of(layer)))
  return found


def is_minimal(shapes: Mapping[str, tuple[int, ...]]) -> bool:
  """Whether parameters of these names and shapes are laid out as in T5X's minimal network."""
  return not any(
      SCANNED.fullmatch(name) or (PROJECTION.fullmatch(name) and len(shape) > 2)
      for name, shape in shapes.items()
  )


def _join_heads(name: str, array: StoredArray) -> StoredArray:
  """The kernel of an attention as a matrix, `H * K` by the other axis."""
  match = PROJECTION.fullmatch(name)
  if not match or len(array.shape) != 3:
    return array
  first, second, third = array.shape
  shape = (first * second, third) if match[1] == 'out' else (first, second * third)

  def start():
    wait = array.start()
    return lambda: np.asarray(wait()).reshape(shape)

  return StoredArray(shape, array.dtype, start)


class _Stack:
  """The layers of one array, which is read once and let go when all of them were handed out."""

  def __init__(self, array: StoredArray):
    self._array = array
    self._left = set(range(array.shape[1]))
    self._wait = None
    self._value = None

  def start_of(self, layer: int) -> Callable[[], Callable[[], np.ndarray]]:
    """The `StoredArray.start` of one layer."""
    def wait():
      if self._value is None:
        self._value, self._wait = np.asarray(self._wait()), None
      layer_of = np.ascontiguousarray(self._value[:, layer])
      self._left.discard(layer)
      if not self._left:
        self._value = None
        self._left = set(range(self._array.shape[1]))
      return layer_of

    def start():
      if self._wait is None and self._value is None:
        self._wait = self._array.start()
      return wait

    return start


def one_line(error: BaseException) -> str:
  """The message of a library's error on one line, without tensorstore's dump of the spec."""
  return ' '.join(re.split(r' \[(?:tensorstore_spec|source locations)=', str(error))[0].split())
