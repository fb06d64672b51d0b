"""The verification rules, by enumeration of every draft outcome."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative_t5x import sampling, verification


def random_law(rng, *shape):
  """A law with exact zeros now and then."""
  law = rng.random(shape) * (rng.random(shape) > 0.3)
  law[..., 0] += (law.sum(-1) == 0)
  return (law / law.sum(-1, keepdims=True)).astype(np.float32)


def output_law(rule, q, p, steps=64):
  """Law of the first token of a round, by enumeration of drafts and a grid of uniforms.

  With gamma 1 the acceptance uniform is integrated on a grid of midpoints, and the next token's
  by its exact law.
  """
  vocab = q.shape[-1]
  law = np.zeros(vocab)
  grid = (np.arange(steps) + 0.5) / steps
  pairs = np.array(list(itertools.product(grid, grid)), np.float32)
  for x in range(vocab):
    if q[0, x] == 0:
      continue
    n = len(pairs)
    accepted, following = rule(
        jnp.full((n, 1), x, jnp.int32), jnp.tile(q[None], (n, 1, 1)), jnp.tile(p[None], (n, 1, 1)),
        jnp.asarray(pairs[:, :1]), jnp.asarray(pairs[:, 1]),
    )
    first = np.where(np.asarray(accepted) == 1, x, np.asarray(following))
    law += q[0, x] * np.bincount(first, minlength=vocab) / n
  return law


def round_law(p_of, q_of, gamma, vocab):
  """Exact law of gamma + 1 tokens of one round, completed by the target, in float64.

  Acceptance probabilities and residuals are the rule's own, taken from `verification.residual`
  and the strict comparison r * q < p, whose probability is min(1, p / q).
  """
  law = {}

  def add(prefix, probability):
    if len(prefix) == gamma + 1:
      law[prefix] = law.get(prefix, 0.0) + probability
      return
    for token, chance in enumerate(p_of(prefix)):
      if chance:
        add((*prefix, token), probability * chance)

  for drafts in itertools.product(range(vocab), repeat=gamma):
    drawn = np.prod([q_of(drafts[:i])[x] for i, x in enumerate(drafts)])
    if not drawn:
      continue
    reach = drawn
    for i, x in enumerate(drafts):
      p, q = p_of(drafts[:i]), q_of(drafts[:i])
      accept = min(1.0, p[x] / q[x])
      left = np.asarray(
          verification.residual(jnp.asarray(p[None]), jnp.asarray(q[None])))[0].astype(float)
      if accept < 1:
        left /= left.sum()
        for token, chance in enumerate(left):
          if chance:
            add((*drafts[:i], token), reach * (1 - accept) * chance)
      reach *= accept
      if not reach:
        break
    if reach:
      add(drafts, reach)
  return law


@pytest.mark.parametrize('seed', range(40))
def test_round_has_the_target_law(seed):
  rng = np.random.default_rng(seed)
  vocab, gamma = int(rng.integers(2, 5)), int(rng.integers(1, 4))
  prefixes = [x for n in range(gamma + 1) for x in itertools.product(range(vocab), repeat=n)]
  p = {x: random_law(rng, vocab).astype(np.float64) for x in prefixes}
  q = {x: random_law(rng, vocab).astype(np.float64) for x in prefixes}
  law = round_law(p.__getitem__, q.__getitem__, gamma, vocab)
  for outcome in itertools.product(range(vocab), repeat=gamma + 1):
    wanted = np.prod([p[outcome[:i]][x] for i, x in enumerate(outcome)])
    assert law.get(outcome, 0.0) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize('seed', range(8))
def test_compiled_rule_has_the_target_law(seed):
  rng = np.random.default_rng(100 + seed)
  q, p = random_law(rng, 1, 4), random_law(rng, 2, 4)
  law = output_law(jax.jit(verification.token_wise), q, p)
  # The grid of 64 midpoints resolves a probability to 1/128 for each of two uniforms.
  np.testing.assert_allclose(law, p[0], atol=2 / 64)


def test_inclusive_comparison_would_accept_a_token_of_probability_zero():
  p = jnp.asarray([[[0.0, 1.0], [0.5, 0.5]]])
  q = jnp.asarray([[[1.0, 0.0]]])
  accepted, following = verification.token_wise(
      jnp.zeros((1, 1), jnp.int32), q, p, jnp.zeros((1, 1)), jnp.zeros(1))
  assert (int(accepted[0]), int(following[0])) == (0, 1)


def test_residual_without_mass_is_p():
  p = jnp.asarray([[0.25, 0.75]])
  np.testing.assert_array_equal(verification.residual(p, p), p)
  # q above p everywhere: nothing left over either, and nothing divided by zero.
  np.testing.assert_array_equal(verification.residual(p, p + 1e-3), p)


def test_fully_accepted_round_takes_the_last_law():
  p = jnp.asarray([[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])
  accepted, following = verification.token_wise(
      jnp.zeros((1, 1), jnp.int32), p[:, :1], p, jnp.full((1, 1), 0.999), jnp.full(1, 0.5))
  assert (int(accepted[0]), int(following[0])) == (1, 2)


@pytest.mark.parametrize('gamma', [0, 1, 5])
def test_greedy_is_token_wise_on_one_hot_laws(gamma):
  rng = np.random.default_rng(gamma)
  draft = rng.integers(0, 3, (50, gamma))
  target = np.where(rng.random((50, gamma + 1)) < 0.7,
                    np.pad(draft, ((0, 0), (0, 1))), rng.integers(0, 3, (50, gamma + 1)))
  one_hot = lambda x: jax.nn.one_hot(x, 3)
  general = verification.token_wise(
      jnp.asarray(draft, jnp.int32), one_hot(draft), one_hot(target),
      jnp.asarray(rng.random((50, gamma)), jnp.float32), jnp.asarray(rng.random(50), jnp.float32))
  special = verification.greedy(jnp.asarray(draft), jnp.asarray(target))
  for a, b in zip(general, special, strict=True):
    np.testing.assert_array_equal(a, b)


def test_sample_never_draws_a_token_without_mass():
  law = jnp.asarray([0.0, 0.3, 0.0, 0.7, 0.0])
  uniforms = jnp.asarray([0.0, 0.29, 0.31, 0.9, np.nextafter(np.float32(1), np.float32(0))])
  drawn = sampling.sample(jnp.tile(law, (5, 1)), uniforms)
  np.testing.assert_array_equal(drawn, [1, 1, 3, 3, 3])
