"""The paper's formulas against its own figures and against direct computation."""

import subprocess
import sys

import numpy as np
import pytest

from speculative_t5x import analysis
from speculative_t5x.errors import UserError

# Table 1 of the paper: alpha, gamma, operations and speed at c = c_hat = 0.
TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]

# "Expected" column of the paper's EnDe and CNN/DM runs: alpha, gamma, c, expected factor.
EXPECTED = [
    (0.75, 7, 0.02, 3.2), (0.80, 7, 0.04, 3.3), (0.82, 7, 0.11, 2.5), (0.62, 7, 0.02, 2.3),
    (0.68, 5, 0.04, 2.4), (0.71, 3, 0.11, 2.0), (0.65, 5, 0.02, 2.4), (0.73, 5, 0.04, 2.6),
    (0.74, 3, 0.11, 2.0), (0.53, 5, 0.02, 1.9), (0.55, 3, 0.04, 1.8), (0.56, 3, 0.11, 1.6),
]


@pytest.mark.parametrize('alpha, gamma, operations, speed', TABLE_1)
def test_table_1(alpha, gamma, operations, speed):
  assert round(analysis.operations_factor(alpha, gamma, 0.0), 2) == operations
  assert round(analysis.walltime_improvement(alpha, gamma, 0.0), 2) == speed


@pytest.mark.parametrize('alpha, gamma, c, expected', EXPECTED)
def test_expected_factors_of_the_published_runs(alpha, gamma, c, expected):
  # Alpha and c are published with two digits, so the factor is known to about 0.1.
  assert analysis.walltime_improvement(alpha, gamma, c) == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize('gamma', [0, 1, 4, 10])
def test_expected_tokens_is_the_closed_form(gamma):
  alpha = np.linspace(0, 0.99, 100)
  closed = (1 - alpha ** (gamma + 1)) / (1 - alpha)
  np.testing.assert_allclose(analysis.expected_tokens(alpha, gamma), closed, rtol=1e-12)


def test_expected_tokens_is_the_mean_of_the_capped_geometric_law():
  alpha, gamma = 0.7, 3
  lengths = np.arange(1, gamma + 2)
  law = np.append((1 - alpha) * alpha ** np.arange(gamma), alpha**gamma)
  assert law.sum() == pytest.approx(1)
  assert analysis.expected_tokens(alpha, gamma) == pytest.approx((law * lengths).sum())


@pytest.mark.parametrize('gamma', [0, 1, 7])
def test_expected_tokens_at_the_ends(gamma):
  assert analysis.expected_tokens(0.0, gamma) == 1
  assert analysis.expected_tokens(1.0, gamma) == gamma + 1


def test_cost_of_verification_divides_the_factor():
  plain = analysis.walltime_improvement(0.8, 4, 0.0)
  assert analysis.walltime_improvement(0.8, 4, 0.0, v=2.5) == pytest.approx(plain / 2.5)
  assert analysis.walltime_improvement(0.8, 4, 0.1, v=2.5) == pytest.approx(plain / 2.9)


def test_operations_count_the_draft():
  assert analysis.operations_factor(1.0, 4, 0.25) == pytest.approx((1 + 5) / 5)
  assert analysis.operations_factor(0.0, 4, 0.25) == pytest.approx(6)


@pytest.mark.parametrize('alpha', [0.05, 0.3, 0.6, 0.9])
@pytest.mark.parametrize('c', [0.02, 0.11, 0.3, 0.6, 0.95])
def test_some_gamma_helps_iff_alpha_exceeds_c(alpha, c):
  gamma = analysis.best_gamma(alpha, c)
  assert (gamma > 0) == (alpha > c) == (analysis.guaranteed_improvement(alpha, c) > 1)
  if gamma:
    best = analysis.walltime_improvement(alpha, gamma, c)
    assert best >= analysis.guaranteed_improvement(alpha, c)
    assert best >= analysis.walltime_improvement(alpha, gamma + 1, c)
    assert best >= analysis.walltime_improvement(alpha, gamma - 1, c)


def test_best_gamma_follows_the_measured_cost():
  cheap = analysis.best_gamma(0.9, 0.05)
  dear = analysis.best_gamma(0.9, 0.05, v=lambda gamma: 1 + 0.2 * gamma)
  assert 0 < dear < cheap
  assert analysis.best_gamma(0.9, 0.05, v=lambda gamma: gamma + 1.0) == 0
  assert analysis.best_gamma(0.9, 0.0, gamma_max=7) == 7
  assert analysis.best_gamma(0.9, 0.0, gamma_max=0) == 0


def test_oracle_tokens_is_the_limit():
  assert analysis.oracle_tokens(0.8) == pytest.approx(analysis.expected_tokens(0.8, 400))
  assert analysis.oracle_tokens(1.0) == np.inf


@pytest.mark.parametrize(
    'call, name',
    [
        (lambda: analysis.expected_tokens(1.1, 3), 'alpha'),
        (lambda: analysis.expected_tokens(np.array([0.5, -0.1]), 3), 'alpha'),
        (lambda: analysis.expected_tokens(float('nan'), 3), 'alpha'),
        (lambda: analysis.expected_tokens(0.5, -1), 'gamma'),
        (lambda: analysis.walltime_improvement(0.5, 3, -0.1), 'c'),
        (lambda: analysis.walltime_improvement(0.5, 3, 0.1, v=0.0), 'v'),
        (lambda: analysis.operations_factor(0.5, 3, -0.1), 'c_hat'),
        (lambda: analysis.oracle_tokens(-1.0), 'alpha'),
        (lambda: analysis.best_gamma(0.5, 0.1, gamma_max=-1), 'gamma'),
    ],
)
def test_values_out_of_range_are_named(call, name):
  with pytest.raises(UserError, match=f'^{name}: expected .* found'):
    call()


def test_needs_no_jax():
  code = 'import sys; from speculative_t5x import analysis; assert "jax" not in sys.modules'
  subprocess.run([sys.executable, '-c', code], check=True)
