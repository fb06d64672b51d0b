"""What a slice needs for a pair: its compiled programs summed up.

Every figure is of one chip.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from speculative_t5x import analysis
from speculative_t5x.errors import UserError
from speculative_t5x.network import T5Config
from speculative_t5x.tpu.programs import DoesNotFit, Planner, Program, Request


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a slice needs.

  Attributes:
    request: what was asked for, in words and numbers.
    hbm_bytes: memory of a chip.
    needed_bytes: of the speculative program.
    fits: whether it does.
    largest_batch: that fits; None when none does.
    too_large_batch: the smallest that the compiler refused; None where `largest_batch` is
      extrapolated from two batch sizes.
    programs: 'speculative' and 'plain' decoding; the steps 'target_1', 'target_verify', 'draft_1';
      'encoder'; and 't5x', T5X's own decoding of the target.
    t5x_absent: why there is no 't5x'; None when there is.
    c: time of a draft step / of a target step.
    v: time of the target on gamma + 1 tokens / on one.
    factor: speed over plain decoding that alpha, c and v predict.
    best_gamma: of the formula, v growing evenly up to this one.
    traffic_c: c, by traffic in place of time.
    traffic_v: v, likewise.
    traffic_factor: the factor, likewise.
    cycle_c: c, by the compiler's cycles in place of time.
    cycle_v: v, likewise.
    cycle_factor: the factor, likewise.
  """

  request: dict[str, Any]
  hbm_bytes: int
  needed_bytes: int
  fits: bool
  largest_batch: int | None
  too_large_batch: int | None
  programs: dict[str, Program]
  t5x_absent: str | None
  c: float
  v: float
  factor: float
  best_gamma: int
  traffic_c: float
  traffic_v: float
  traffic_factor: float
  cycle_c: float
  cycle_v: float
  cycle_factor: float


def plan(request: Request) -> Plan:
  """Compiles all programs of a request.

  Args:
    request: what to plan.

  Returns:
    The plan.

  Raises:
    UserError: see `Planner`; `DoesNotFit` where the compiler finds so.
  """
  planner = Planner(request)
  chip = planner.chip
  programs = {
      name: found for name, (found, _) in {
          'speculative': planner.decode(request.gamma, request.batch_size),
          'plain': planner.decode(0, request.batch_size),
          'target_1': planner.step('target', 1),
          'target_verify': planner.step('target', request.gamma + 1),
          'draft_1': planner.step('draft', 1),
          'encoder': planner.encoder(),
      }.items()
  }
  t5x_absent = None
  try:
    programs['t5x'], _ = planner.t5x_decode()
  except ImportError as error:
    t5x_absent = f'not importable here: {error}'
  except UserError as error:
    t5x_absent = str(error)
  needed = _needed(programs['speculative'])

  def needs(batch_size):
    try:
      return _needed(planner.decode(request.gamma, batch_size)[0])
    except DoesNotFit:
      return None

  largest, too_large = largest_batch(
      needs, request.batch_size, needed, chip.hbm_bytes, verify=request.verify_largest_batch)
  estimates = {}
  for prefix, field in (('', 'seconds'), ('traffic_', 'traffic_bytes'), ('cycle_', 'cycles')):
    ratio = lambda name, field=field: (
        getattr(programs[name], field) / getattr(programs['target_1'], field))
    c, v = ratio('draft_1'), ratio('target_verify')
    estimates |= {
        f'{prefix}c': c, f'{prefix}v': v,
        f'{prefix}factor': float(
            analysis.walltime_improvement(request.alpha, request.gamma, c, v)),
    }
  return Plan(
      request={
          **{field.name: getattr(request, field.name) for field in dataclasses.fields(request)
             if field.name not in ('target', 'draft')},
          **{name: _sizes(getattr(request, name)) for name in ('target', 'draft')},
      },
      hbm_bytes=chip.hbm_bytes, needed_bytes=needed, fits=needed <= chip.hbm_bytes,
      largest_batch=largest, too_large_batch=too_large, programs=programs, t5x_absent=t5x_absent,
      best_gamma=analysis.best_gamma(
          request.alpha, estimates['c'],
          lambda gamma: 1 + max(estimates['v'] - 1, 0) * gamma / request.gamma, gamma_max=32),
      **estimates,
  )


def largest_batch(
    needs: Callable[[int], int | None], batch_size: int, needed: int, capacity: int, *,
    verify: bool,
) -> tuple[int | None, int | None]:
  """The largest batch that fits.

  Args:
    needs: bytes that a batch takes, None if the compiler refuses it; each call compiles.
    batch_size: one that compiles.
    needed: bytes that it takes.
    capacity: of a chip.
    verify: whether to try; otherwise it is extrapolated from `batch_size` and another size.

  Returns:
    The largest batch, None if there is none, and the smallest known not to fit, at most a 32nd
    larger; None without `verify`.
  """
  other, other_needed = 2 * batch_size, needs(2 * batch_size)
  if other_needed is None and batch_size > 1:
    other, other_needed = batch_size // 2, needs(batch_size // 2)
  guess = batch_size
  if other_needed is not None:
    a_row = (other_needed - needed) / (other - batch_size)
    guess += int((capacity - needed) // max(a_row, 1))
  if not verify:
    return (guess if guess >= 1 else None), None
  fits = lambda size: (found := needs(size)) is not None and found <= capacity
  step = stride = max(guess // 32, 1)
  low, high, size = 0, None, max(guess, 1)
  while high is None or high - low > step:
    low, high = (size, high) if fits(size) else (low, size)
    if high is not None and low:
      size = (low + high) // 2
    else:
      # Away from the guess, in strides that double, until one fits and another does not.
      size = low + stride if high is None else max(high - stride, high // 2)
      stride *= 2
  return low or None, high


def _needed(program: Program) -> int:
  return program.argument_bytes + program.temporary_bytes + program.output_bytes


def _sizes(config: T5Config) -> dict[str, Any]:
  """A network's sizes, as JSON can hold them."""
  return {
      name: str(value) if name == 'dtype' else value
      for name, value in dataclasses.asdict(config).items()
  }
