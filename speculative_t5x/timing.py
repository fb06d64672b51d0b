"""Wall-clock comparison of several ways to do the same thing, in turns."""

import time
from collections.abc import Callable, Mapping

import jax


def race(
    ways: Mapping[str, Callable[[], object]], repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
  """Times every way `repeats` times.

  Each is run once before its time is taken, so that compilation does not count. In every repeat all
  of them run one after the other, in an order that is reversed each time: what slows the machine
  down for a while slows all of them.

  Args:
    ways: by name, functions that return arrays.
    repeats: timed runs of each.
    clock: seconds.

  Returns:
    Seconds of every run, by name.
  """
  for way in ways.values():
    jax.block_until_ready(way())
  seconds = {name: [] for name in ways}
  for repeat in range(repeats):
    for name in list(ways) if repeat % 2 == 0 else reversed(list(ways)):
      start = clock()
      jax.block_until_ready(ways[name]())
      seconds[name].append(clock() - start)
  return seconds
