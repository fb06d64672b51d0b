"""The formulas of Leviathan et al. 2023 (arXiv 2211.17192): what a pair should gain.

alpha is the mean acceptance rate, gamma the number of drafts a round, c the time of a draft step
in target steps, c_hat the same in arithmetic operations, and v the time of the target on
gamma + 1 tokens in steps on one. The paper takes v = 1, which holds where a step is bound by
reading weights; on a CPU or with a large batch it does not, and v has to be measured.

Every formula assumes that drafts are accepted independently with one probability. Arrays of alpha
are taken as well as numbers. Nothing here needs JAX.

    python -m speculative_t5x.analysis --plots DIR

draws the paper's figures 2 to 5.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence

import numpy as np

from speculative_t5x.errors import UserError

Number = float | np.ndarray


def expected_tokens(alpha: Number, gamma: int) -> Number:
  """Expected tokens a round, (1 - alpha^(gamma+1)) / (1 - alpha) (equation 1).

  Args:
    alpha: acceptance rate in [0, 1], a number or an array.
    gamma: drafts a round, at least 0.

  Returns:
    Between 1 and gamma + 1, shaped as `alpha`.

  Raises:
    UserError: a value is out of range.
  """
  _check(alpha, gamma)
  # The sum 1 + alpha + … + alpha^gamma is the same number, and right at and near alpha = 1.
  return np.polyval(np.ones(gamma + 1), alpha)


def walltime_improvement(alpha: Number, gamma: int, c: float, v: float = 1.0) -> Number:
  """Time of plain decoding over time of speculative decoding (equation 3.8 for v = 1).

  (1 - alpha^(gamma+1)) / ((1 - alpha)(gamma c + v)).

  Args:
    alpha: acceptance rate in [0, 1], a number or an array.
    gamma: drafts a round, at least 0.
    c: time of one draft step / time of one target step on one token, at least 0.
    v: time of the target on gamma + 1 tokens / on one, above 0.

  Returns:
    The factor, shaped as `alpha`; above 1 is faster.

  Raises:
    UserError: a value is out of range.
  """
  _at_least_zero('c', c)
  if not v > 0:
    raise UserError(f'v: expected a number above 0, found {v}')
  return expected_tokens(alpha, gamma) / (gamma * c + v)


def operations_factor(alpha: Number, gamma: int, c_hat: float) -> Number:
  """Arithmetic operations of speculative over those of plain decoding (equation 3.11).

  (1 - alpha)(gamma c_hat + gamma + 1) / (1 - alpha^(gamma+1)).

  Args:
    alpha: acceptance rate in [0, 1], a number or an array.
    gamma: drafts a round, at least 0.
    c_hat: operations a token of the draft / of the target, at least 0.

  Returns:
    The factor, shaped as `alpha`; above 1 is more work.

  Raises:
    UserError: a value is out of range.
  """
  _at_least_zero('c_hat', c_hat)
  return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def guaranteed_improvement(alpha: Number, c: float) -> Number:
  """What gamma = 1 gives at v = 1, (1 + alpha) / (1 + c); above 1 iff alpha > c (corollary 3.9).

  Args:
    alpha: acceptance rate in [0, 1], a number or an array.
    c: time of one draft step / time of one target step, at least 0.

  Returns:
    The factor, shaped as `alpha`. If it is at most 1, no gamma helps.

  Raises:
    UserError: a value is out of range.
  """
  return walltime_improvement(alpha, 1, c)


def oracle_tokens(alpha: float) -> float:
  """Most tokens a round that any choice of gamma reaches, 1 / (1 - alpha).

  Args:
    alpha: acceptance rate in [0, 1].

  Returns:
    The limit of `expected_tokens` for large gamma; infinity at alpha = 1.

  Raises:
    UserError: `alpha` is out of range.
  """
  _check(alpha, 0)
  return np.inf if alpha == 1 else 1 / (1 - alpha)


def best_gamma(
    alpha: float, c: float, v: Callable[[int], float] | None = None, gamma_max: int = 64
) -> int:
  """The gamma with the largest `walltime_improvement` (section 3.5).

  Args:
    alpha: acceptance rate in [0, 1].
    c: time of one draft step / time of one target step on one token, at least 0.
    v: maps gamma to the time of the target on gamma + 1 tokens / on one; None is 1 everywhere.
      It is asked for 1 to `gamma_max`.
    gamma_max: largest gamma tried, at least 0.

  Returns:
    The smallest of the best; 0 (plain decoding) if none is faster than plain decoding.

  Raises:
    UserError: a value is out of range.
  """
  _check(alpha, gamma_max)
  _at_least_zero('c', c)
  cost = v or (lambda gamma: 1.0)
  factors = [1.0] + [
      float(walltime_improvement(alpha, gamma, c, cost(gamma)))
      for gamma in range(1, gamma_max + 1)
  ]
  return int(np.argmax(factors))


def _check(alpha: Number, gamma: int) -> None:
  """Refuses an alpha outside [0, 1] and a gamma below 0."""
  if not np.all((np.asarray(alpha) >= 0) & (np.asarray(alpha) <= 1)):
    raise UserError(f'alpha: expected numbers in [0, 1], found {alpha}')
  if gamma < 0:
    raise UserError(f'gamma: expected at least 0, found {gamma}')


def _at_least_zero(name: str, value: float) -> None:
  """Refuses a negative cost."""
  if not value >= 0:
    raise UserError(f'{name}: expected at least 0, found {value}')


def main(arguments: Sequence[str] | None = None) -> int:
  """Draws the paper's figures; returns the exit code."""
  # Plots build upon this module.
  from speculative_t5x import plots

  parser = argparse.ArgumentParser(
      prog='python -m speculative_t5x.analysis', description=__doc__.splitlines()[0])
  parser.add_argument('--plots', required=True, type=pathlib.Path, help='folder of the PNG files')
  folder = parser.parse_args(arguments).plots
  try:
    for path in plots.draw_all(folder):
      print(path)
  except OSError as error:
    print(f'error: plots: expected a folder to write to, found {folder} ({error.strerror})',
          file=sys.stderr)
    return 2
  return 0


if __name__ == '__main__':
  sys.exit(main())
