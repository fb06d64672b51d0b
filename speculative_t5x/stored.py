"""Arrays of a checkpoint that are known by name, shape and dtype, and not read yet.

Any part of one can be read, into memory that the caller gives, so that a device gets its own part
and nothing else, and a large model is never held twice. `reading` decides what to read when.
"""

import dataclasses
import math
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

# Modules that T5X's scalable network scans over: their arrays have the layers as axis 1.
SCANNED = re.compile(r'(encoder|decoder)/\1/(.+)')
# Kernels that it keeps with an axis of heads.
PROJECTION = re.compile(r'.*attention/(query|key|value|out)/kernel')

# A part of an array: a slice with `start` and `stop` for every axis.
Index = tuple[slice, ...]
# Waits for a read that was started.
Wait = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class StoredArray:
  """One array, wherever it is.

  Attributes:
    shape: of the array.
    dtype: numpy dtype it is stored in.
    start: starts reading the part at an index into an array of the part's shape, which may be a
      view and of another dtype; returns a function that waits for it.
    chunk: shape of what is stored together; parts that end at its multiples are read once.
    stack: what the array is a layer of, if it is one; see `minimal_tree`.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  start: Callable[[Index, np.ndarray], Wait]
  chunk: tuple[int, ...]
  stack: 'Stack | None' = None

  @property
  def size(self) -> int:
    """How many numbers it holds."""
    return math.prod(self.shape)

  @property
  def num_bytes(self) -> int:
    """What it takes as it is stored."""
    return self.size * self.dtype.itemsize

  @property
  def whole(self) -> Index:
    """The index of all of it."""
    return tuple(slice(0, size) for size in self.shape)


def in_memory(array: np.ndarray) -> StoredArray:
  """An array that needs no reading."""
  def start(index, out):
    out[...] = array[index]
    return lambda: None

  return StoredArray(array.shape, array.dtype, start, array.shape)


def transposed(array: StoredArray) -> StoredArray:
  """An array with its axes in reverse."""
  return StoredArray(
      array.shape[::-1], array.dtype, lambda index, out: array.start(index[::-1], out.T),
      array.chunk[::-1],
  )


def cast_dtype(dtype: np.dtype, wanted: Any) -> np.dtype:
  """`wanted` for a floating dtype, bfloat16 included; others, and with None all, stay."""
  if wanted is None or not jnp.issubdtype(dtype, jnp.floating):
    return dtype
  return jnp.dtype(wanted)


def cast(array: np.ndarray, dtype: Any) -> np.ndarray:
  """Casts floating arrays, bfloat16 included; leaves others alone."""
  return array.astype(cast_dtype(array.dtype, dtype), copy=False)


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
    stack = Stack(array)
    for layer in range(stack.depth):
      own = f'{match[1]}/layers_{layer}/{match[2]}'
      found[own] = _join_heads(own, stack.layer(layer))
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
  axis = 0 if match[1] == 'out' else 1  # of the heads
  width = array.shape[axis + 1]

  def join(sizes):
    return (*sizes[:axis], sizes[axis] * width, *sizes[axis + 2:])

  def start(index, out):
    first, last = index[axis].start, index[axis].stop
    heads = slice(first // width, -(-last // width))
    source = (*index[:axis], heads, slice(0, width), *index[axis + 1:])
    split = list(out.shape)
    split[axis : axis + 1] = heads.stop - heads.start, width
    if first % width == 0 and last % width == 0:
      return array.start(source, out.reshape(split))  # Cutting an axis in two needs no copy.
    # A part that ends inside a head: read the head.
    part = np.empty(split, out.dtype)
    wait = array.start(source, part)
    offset = first - heads.start * width
    inside = [slice(None)] * out.ndim
    inside[axis] = slice(offset, offset + last - first)

    def finish():
      wait()
      out[...] = part.reshape(join(split))[tuple(inside)]

    return finish

  return StoredArray(join(array.shape), array.dtype, start, join(array.chunk), array.stack)


class Stack:
  """An array whose axis 1 is the layers, from which the arrays of single layers are read.

  All layers lie in the same chunks. Parts that only differ in the layer are read together, if the
  first has not been let go when the last is asked for.

  Attributes:
    depth: how many layers.
  """

  def __init__(self, array: StoredArray):
    self._array = array
    self._latest = lambda: None
    self.depth = array.shape[1]

  def layer(self, number: int) -> StoredArray:
    """The array of one layer."""
    without = lambda sizes: (sizes[0], *sizes[2:])

    def start(index, out):
      part = self._latest()
      if part is None or part.index != index:
        part = _Part(self._array, index)
        # Weakly, so that it goes with the last layer that waits for it.
        self._latest = weakref.ref(part)

      def wait():
        out[...] = part.read()[:, number]

      return wait

    array = self._array
    return StoredArray(without(array.shape), array.dtype, start, without(array.chunk), self)


class _Part:
  """The same part of every layer."""

  def __init__(self, array: StoredArray, index: Index):
    self.index = index
    source = (index[0], slice(0, array.shape[1]), *index[1:])
    self._value = np.empty([x.stop - x.start for x in source], array.dtype)
    self._wait = array.start(source, self._value)

  def read(self) -> np.ndarray:
    """Waits for it, once."""
    if self._wait is not None:
      self._wait()
      self._wait = None
    return self._value


def one_line(error: BaseException) -> str:
  """The message of a library's error on one line, without tensorstore's dump of the spec."""
  return ' '.join(re.split(r' \[(?:tensorstore_spec|source locations)=', str(error))[0].split())
