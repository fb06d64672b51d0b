"""Reads compiled modules: traffic to the chip's memory, and collectives.

XLA's own count of bytes has weights that are prefetched into the chip twice. Here every instruction
counts what it reads from and writes to memory: operands and results whose layout names no other
space, as `S(1)`, on-chip memory, and on v4 `S(3)`.
"""

import functools
import re
from collections import Counter
from typing import NamedTuple

BITS = {
    'pred': 8, 's4': 4, 'u4': 4, 's8': 8, 'u8': 8, 's16': 16, 'u16': 16, 'bf16': 16, 'f16': 16,
    's32': 32, 'u32': 32, 'f32': 32, 's64': 64, 'u64': 64, 'f64': 64,
}
COLLECTIVES = (
    'all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute',
    'ragged-all-to-all', 'collective-broadcast',
)
# What moves nothing itself: names, parts of tuples, control flow.
SILENT = {
    'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'conditional',
    'call', 'after-all', 'partition-id', 'replica-id', 'iota', 'opt-barrier', 'domain',
}

# The host's memory is no chip's.
_ON_CHIP = re.compile(r'S\((?!5\))\d+\)')
_ARRAY = re.compile(r'(\w+)\[([\d,]*)\](\{[^}]*\})?')
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$')


class Instruction(NamedTuple):
  """One instruction.

  Attributes:
    name: its own.
    type: of its result, as the module prints it.
    opcode: what it does.
    operands: names.
    text: the rest of its line.
  """

  name: str
  type: str
  opcode: str
  operands: list[str]
  text: str


@functools.lru_cache(maxsize=2)
def computations(module: str) -> tuple[dict[str, list[Instruction]], str]:
  """The computations of a module by name, and the entry's name.

  Args:
    module: `Compiled.as_text()`.

  Returns:
    Both.
  """
  found, entry, current = {}, '', None
  for line in module.splitlines():
    if line.endswith('{') and not line.startswith((' ', 'HloModule')):
      name = line.removeprefix('ENTRY ').split(' ', 1)[0].lstrip('%')
      current = found.setdefault(name, [])
      if line.startswith('ENTRY '):
        entry = name
    elif line.startswith('}'):
      current = None
    elif current is not None and (match := _INSTRUCTION.match(line)):
      current.append(_instruction(*match.groups()))
  return found, entry


def _instruction(name, rest):
  """Splits `type opcode(operands), attributes`."""
  kind, rest = _split_type(rest)
  opcode, _, rest = rest.partition('(')
  depth, end = 1, len(rest)
  for place, letter in enumerate(rest):
    depth += (letter in '([{') - (letter in ')]}')
    if not depth:
      end = place
      break
  operands = re.findall(r'%([\w.\-]+)', rest[:end])
  return Instruction(name, kind, opcode.strip(), operands, rest[end:])


def _split_type(rest):
  """A type, which may be a tuple's, and what stands behind it."""
  if not rest.startswith('('):
    kind, _, rest = rest.partition(' ')
    return kind, rest
  depth = 0
  for place, letter in enumerate(rest):
    depth += (letter == '(') - (letter == ')')
    if not depth:
      return rest[: place + 1], rest[place + 1 :].lstrip()
  return rest, ''


def memory_bytes(kind: str) -> int:
  """Bytes of the arrays of a type that lie in the chip's memory, without padding by tiles."""
  return sum(size for size, on_chip in arrays(kind) if not on_chip)


def arrays(kind: str) -> list[tuple[int, bool]]:
  """Bytes of each array of a type, and whether it lies on chip."""
  found = []
  for dtype, shape, layout in _ARRAY.findall(kind):
    if dtype not in BITS:
      continue
    count = 1
    for size in shape.split(','):
      count *= int(size or 1)
    found.append((count * BITS[dtype] // 8, bool(_ON_CHIP.search(layout))))
  return found


def traffic(module: str, computation: str | None = None) -> int:
  """Bytes that one run of a computation moves to and from the chip's memory.

  Loops inside it count once. An update in place counts as one reading of the whole.

  Args:
    module: `Compiled.as_text()`.
    computation: which; None is the entry.

  Returns:
    Bytes on one chip.
  """
  every, entry = computations(module)
  instructions = every[computation or entry]
  types = {instruction.name: instruction.type for instruction in instructions}
  total = 0
  for instruction in instructions:
    opcode = instruction.opcode
    if opcode in SILENT or opcode.endswith('-done'):
      continue
    if opcode.endswith('slice-start'):
      # Of the operand, only what arrives is read.
      total += arrays(instruction.type)[1][0] if len(arrays(instruction.type)) > 1 else 0
      continue
    operands = [types.get(name, '') for name in instruction.operands]
    total += sum(map(memory_bytes, operands))
    if opcode.endswith('-start'):
      # Its result is a tuple of destination, source and a token.
      first = arrays(instruction.type)[:1]
      total += sum(size for size, on_chip in first if not on_chip)
    elif not (_updates_in_place(instruction) and instruction.type in operands):
      total += memory_bytes(instruction.type)
  return total


def _updates_in_place(instruction: Instruction) -> bool:
  """Whether the compiler says so, by the name it gives to fusions of such updates."""
  return 'dynamic-update-slice' in instruction.opcode or 'dynamic-update-slice' in instruction.name


def collectives(module: str) -> dict[str, Counter]:
  """Collectives of each computation that has some, by kind.

  Args:
    module: `Compiled.as_text()`.

  Returns:
    Counts by computation and kind; a start and its end count once.
  """
  every, _ = computations(module)
  found = {}
  for name, instructions in every.items():
    kinds = Counter(
        instruction.opcode.removesuffix('-start') for instruction in instructions
        if instruction.opcode.removesuffix('-start') in COLLECTIVES)
    if kinds:
      found[name] = kinds
  return found


def loop_bodies(module: str) -> list[str]:
  """Names of the computations that loops repeat, and of those that these call.

  Args:
    module: `Compiled.as_text()`.

  Returns:
    Names; fusions are not among them, for what they hold is no step of its own.
  """
  every, _ = computations(module)
  found, pending = [], [
      name for instructions in every.values() for instruction in instructions
      if instruction.opcode == 'while' for name in _called(instruction)
  ]
  while pending:
    name = pending.pop()
    if name in every and name not in found:
      found.append(name)
      pending += [
          inner for instruction in every[name] if instruction.opcode in ('call', 'conditional')
          for inner in _called(instruction)
      ]
  return found


def _called(instruction: Instruction) -> list[str]:
  """Computations that a loop, a call or a conditional runs."""
  attributes = re.findall(
      r'(?:body|condition|to_apply|\w+_computation|branch_computations)=(\{[^}]*\}|%[\w.\-]+)',
      instruction.text)
  return [name for text in attributes for name in re.findall(r'%([\w.\-]+)', text)]


def copies(module: str, least_bytes: int, computation: str | None = None) -> list[tuple[str, int]]:
  """Layout changes and copies of large arrays within memory.

  Args:
    module: `Compiled.as_text()`.
    least_bytes: of those reported.
    computation: which; None is all.

  Returns:
    Type and bytes of each.
  """
  every, _ = computations(module)
  chosen = every.values() if computation is None else [every[computation]]
  found = []
  for instructions in chosen:
    types = {instruction.name: instruction.type for instruction in instructions}
    for instruction in instructions:
      size = _copied_bytes(instruction, types)
      if size >= max(least_bytes, 1):
        found.append((instruction.type, size))
  return found


def _copied_bytes(instruction, types):
  """Bytes that an instruction writes to memory as it read them there; 0 if it does anything else.

  A prefetch into the chip, or back, is none: one end lies on chip.
  """
  if instruction.opcode not in ('copy', 'copy-start', 'transpose') and not (
      instruction.opcode == 'fusion'
      and re.match(r'(copy|transpose)(_bitcast|_copy|_transpose)*_fusion', instruction.name)):
    return 0
  written = arrays(instruction.type)[:1]
  read = arrays(types.get(instruction.operands[0], '')) if instruction.operands else []
  if not written or written[0][1] or (read and read[0][1]):
    return 0
  return written[0][0]


def cycles(module: str, computation: str | None = None) -> int:
  """The compiler's estimates of one run of a computation, summed over its instructions.

  They are of work on operands where they lie: a prefetch that runs beside other work counts
  nothing. Loops inside the computation count nothing, either.

  Args:
    module: `Compiled.as_text()`.
    computation: which; None is the entry.

  Returns:
    Cycles of the chip's clock.
  """
  every, entry = computations(module)
  return sum(
      int(count) for instruction in every[computation or entry]
      for count in re.findall(r'"estimated_cycles":"?(\d+)', instruction.text))


def sorts(module: str, length: int) -> int:
  """Sorts and top-k searches over an axis of `length` numbers or more.

  Args:
    module: `Compiled.as_text()`.
    length: of the axis.

  Returns:
    How many there are.
  """
  every, _ = computations(module)
  total = 0
  for instructions in every.values():
    types = {instruction.name: instruction.type for instruction in instructions}
    for instruction in instructions:
      if instruction.opcode not in ('sort', 'topk') and 'TopK' not in instruction.text:
        continue
      shapes = [shape for name in instruction.operands
                for _, shape, _ in _ARRAY.findall(types.get(name, ''))]
      total += any(int(size or 1) >= length for shape in shapes for size in shape.split(','))
  return total
