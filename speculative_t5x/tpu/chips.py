"""Figures of the TPU chips that can be planned for, from Google Cloud's documentation."""

import re
from typing import NamedTuple

from speculative_t5x.errors import UserError


class Chip(NamedTuple):
  """One chip.

  Attributes:
    hbm_bytes: its memory.
    hbm_bytes_a_second: bandwidth of its memory.
    flops: bfloat16 operations a second at most.
  """

  hbm_bytes: int
  hbm_bytes_a_second: float
  flops: float


GIB = 2**30
CHIPS = {
    'v4': Chip(32 * GIB, 1.228e12, 275e12),
    'v5e': Chip(16 * GIB, 0.819e12, 197e12),
    'v5p': Chip(95 * GIB, 2.765e12, 459e12),
    'v6e': Chip(32 * GIB, 1.640e12, 918e12),
}


def chip_of(topology: str) -> Chip:
  """The chip of a topology such as 'v5p:2x2x1'.

  Raises:
    UserError: it is not written so, or the generation is unknown.
  """
  if not re.fullmatch(r'\w+:\d+x\d+(x\d+)?', topology):
    raise UserError(f'--topology: expected one such as v5p:2x2x1 or v5e:2x4, found {topology}')
  name = topology.partition(':')[0]
  if name not in CHIPS:
    raise UserError(f'--topology: expected one of {", ".join(CHIPS)}, found {name}')
  return CHIPS[name]
