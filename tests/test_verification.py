"""The verification rules, by enumeration of every draft and every outcome of the uniforms."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative_t5x import sampling, verification
from speculative_t5x.errors import UserError

# How near to a threshold the uniforms are taken: a threshold that is off by more is noticed.
NEAR = 1e-4


def random_laws(rng, *shape):
  """Laws with exact zeros now and then."""
  law = rng.random(shape) * (rng.random(shape) > 0.3)
  law[..., 0] += law.sum(-1) == 0
  return law / law.sum(-1, keepdims=True)


class Models:
  """`cases` random targets and drafts: laws of every prefix of up to `gamma` tokens.

  With `stops`, drafting ends early at some prefixes: q is zero there and behind.
  """

  def __init__(self, seed, cases, vocab, gamma, stops=False):
    rng = np.random.default_rng(seed)
    self.cases, self.vocab, self.gamma = cases, vocab, gamma
    self.p = [random_laws(rng, cases, vocab**n, vocab) for n in range(gamma + 1)]
    self.q = [random_laws(rng, cases, vocab**n, vocab) for n in range(gamma)]
    # Some drafts are the target, at some prefixes: nothing is left over there.
    for p, q in zip(self.p, self.q, strict=False):
      same = rng.random(q.shape[:2]) < 0.2
      q[same] = p[same]
    has_stopped = np.zeros((cases, 1), bool)
    for q in self.q if stops else []:
      has_stopped |= rng.random(q.shape[:2]) < 0.3
      q[has_stopped] = 0
      has_stopped = np.repeat(has_stopped, vocab, axis=1)

  def along(self, laws, drafts):
    """Laws `[cases, len(laws), V]` after each prefix of `drafts`."""
    codes = [0]
    for token in drafts[: len(laws) - 1]:
      codes.append(codes[-1] * self.vocab + token)
    return np.stack([law[:, code] for law, code in zip(laws, codes, strict=True)], axis=1)


def token_wise_thresholds(p, q, drafts):
  """Probability that each draft is accepted when those before it are; float64 `[cases, gamma]`."""
  return np.minimum(1, np.stack([ratio(p[:, i, x], q[:, i, x]) for i, x in enumerate(drafts)], 1))


def ratio(p, q):
  """p / q; 0 where nothing was drafted."""
  return np.where(q > 0, p / np.maximum(q, 1e-300), 0)


def block_thresholds(p, q, drafts):
  """h of arXiv 2403.10444; float64 `[cases, gamma]`."""
  kept, found = np.ones(len(p)), []
  for i, x in enumerate(drafts):
    kept = np.minimum(1, kept * ratio(p[:, i, x], q[:, i, x]))
    if i + 1 == len(drafts):
      found.append(kept)
    else:
      mass = np.maximum(kept[:, None] * p[:, i + 1] - q[:, i + 1], 0).sum(1)
      stop = mass + 1 - kept
      found.append(np.where(stop > 0, mass / np.maximum(stop, 1e-300), 1))
  return np.stack(found, axis=1)


RULES = {
    'token_wise': (verification.token_wise, token_wise_thresholds),
    'block': (verification.block, block_thresholds),
}


def enumerate_rule(models, rule, thresholds):
  """Exact law of gamma + 1 tokens of a round, the target completing it, and accepted drafts.

  The compiled rule is run on every draft with uniforms on either side of every threshold, and with
  0 where the threshold is 0; each run has the probability of its draft and of its side.

  Returns:
    float64 `[cases, V ** (gamma + 1)]`, and the expected number of accepted drafts `[cases]`.
  """
  vocab, gamma, cases = models.vocab, models.gamma, models.cases
  rule = jax.jit(rule)
  # By accepted drafts: mass of every prefix with the target's token behind it.
  reached = [np.zeros((cases, vocab**n, vocab)) for n in range(gamma + 1)]
  expected = np.zeros(cases)
  for drafts in itertools.product(range(vocab), repeat=gamma):
    p, q = models.along(models.p, drafts), models.along(models.q, drafts)
    # Where nothing is drafted the token, here 0, says nothing.
    drawn = np.prod([
        np.where(q[:, i].any(1), q[:, i, x], x == 0) for i, x in enumerate(drafts)], axis=0)
    limits = thresholds(p, q, drafts)
    for below in itertools.product([True, False], repeat=gamma):
      weight = drawn * np.prod(np.where(below, limits, 1 - limits), axis=1)
      above = np.where(limits > 0, np.minimum(limits + NEAR, 1 - 1e-7), 0)
      uniforms = np.where(below, np.maximum(limits - NEAR, 0), above)
      accepted, law = rule(
          jnp.tile(jnp.asarray(drafts, jnp.int32), (cases, 1)), jnp.asarray(q, jnp.float32),
          jnp.asarray(p, jnp.float32), jnp.asarray(uniforms, jnp.float32))
      law = np.asarray(law, np.float64)
      law /= law.sum(1, keepdims=True)
      code = 0
      for n in range(gamma + 1):
        here = np.asarray(accepted) == n
        reached[n][here, code] += weight[here, None] * law[here]
        if n < gamma:
          code = code * vocab + drafts[n]
      expected += weight * np.asarray(accepted)
  total = np.zeros((cases, vocab ** (gamma + 1)))
  for n, mass in enumerate(reached):
    mass = mass.reshape(cases, -1)
    for later in models.p[n + 1 :]:
      mass = (mass[..., None] * later).reshape(cases, -1)
    total += mass
  return total, expected


def target_law(models):
  law = np.ones((models.cases, 1))
  for p in models.p:
    law = (law[..., None] * p).reshape(models.cases, -1)
  return law


SIZES = [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 2), (2, 3), (3, 3)]
CASES = 400


@pytest.mark.parametrize('stops', [False, True])
@pytest.mark.parametrize('vocab, gamma', SIZES)
def test_both_rules_have_the_target_law_and_a_block_accepts_no_fewer(vocab, gamma, stops):
  models = Models(vocab * 10 + gamma, CASES, vocab, gamma, stops)
  accepted = {}
  for name, (rule, thresholds) in RULES.items():
    law, accepted[name] = enumerate_rule(models, rule, thresholds)
    np.testing.assert_allclose(law, target_law(models), atol=2e-6, err_msg=name)
  assert (accepted['block'] >= accepted['token_wise'] - 1e-6).all()
  if gamma > 1:
    assert accepted['block'].mean() > accepted['token_wise'].mean() + 1e-3


def broken_rules():
  """Ways to get a rule wrong; the enumeration must notice each."""
  def no_residual(draft_tokens, q, p, uniforms):
    accepted, _ = verification.token_wise(draft_tokens, q, p, uniforms)
    return accepted, verification.at_position(p, accepted)

  def inclusive(draft_tokens, q, p, uniforms):
    at = lambda law: jnp.take_along_axis(law, draft_tokens[..., None], -1)[..., 0]
    accepted = verification.leading_count(uniforms * at(q) <= at(p[:, :-1]))
    _, law = verification.token_wise(draft_tokens, q, p, uniforms)
    return accepted, law

  def block_with_the_residual_of_one_token(draft_tokens, q, p, uniforms):
    accepted, _ = verification.block(draft_tokens, q, p, uniforms)
    pick = lambda law: verification.at_position(law, accepted)
    return accepted, verification.residual(pick(p), pick(verification.pad_q(q)))

  def block_that_stops_at_the_first_refusal(draft_tokens, q, p, uniforms):
    judge = lambda u: verification.block(draft_tokens, q, p, u)[0]
    gamma = draft_tokens.shape[1]
    # A draft is refused where its uniform alone does not allow it.
    alone = [judge(jnp.where(jnp.arange(gamma) == i, uniforms, 1.0)) == i + 1 for i in range(gamma)]
    accepted = verification.leading_count(jnp.stack(alone, axis=1))
    law = verification.block(
        draft_tokens, q, p, jnp.where(jnp.arange(gamma) < accepted[:, None], 0.0, 1.0))[1]
    return accepted, law

  def accepts_what_was_not_drafted(draft_tokens, q, p, uniforms):
    at = lambda law: jnp.take_along_axis(law, draft_tokens[..., None], -1)[..., 0]
    accepted = verification.leading_count(uniforms * at(q) < at(p[:, :-1]))
    pick = lambda law: verification.at_position(law, accepted)
    return accepted, verification.residual(pick(p), pick(verification.pad_q(q)))

  return {
      'not_drafted': (accepts_what_was_not_drafted, token_wise_thresholds),
      'no_residual': (no_residual, token_wise_thresholds),
      'inclusive': (inclusive, token_wise_thresholds),
      'residual_of_one_token': (block_with_the_residual_of_one_token, block_thresholds),
      'first_refusal': (block_that_stops_at_the_first_refusal, block_thresholds),
  }


@pytest.mark.parametrize('name', broken_rules())
def test_the_enumeration_detects(name):
  models = Models(7, 50, 3, 2, stops=name == 'not_drafted')
  law, _ = enumerate_rule(models, *broken_rules()[name])
  assert np.abs(law - target_law(models)).max() > 1e-2


@pytest.mark.parametrize('lenience', [1.0, 0.7, 0.3, 0.05])
def test_lenience_keeps_every_token_below_p_over_l(lenience):
  models = Models(11, 300, 4, 1)
  judge = lambda *args: verification.VerificationRule(lenience=lenience, name='token_wise').sampled(
      *args)

  def thresholds(p, q, drafts):
    return np.minimum(1, token_wise_thresholds(p, q * lenience, drafts))

  law, accepted = enumerate_rule(models, judge, thresholds)
  p, q = models.p[0][:, 0], models.q[0][:, 0]
  first = law.reshape(-1, 4, 4).sum(2)
  assert (first <= p / lenience + 1e-6).all()
  np.testing.assert_allclose(accepted, np.minimum(p / lenience, q).sum(1), atol=1e-6)
  if lenience == 1:
    np.testing.assert_allclose(law, target_law(models), atol=2e-6)
  else:
    assert np.abs(first - p).max() > 1e-2


def test_lenient_greedy_accepts_what_is_nearly_the_argmax():
  logits = jnp.log(jnp.asarray([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]]))
  near = lambda tokens, lenience: verification.near_argmax(
      logits, jnp.asarray([tokens]), lenience).tolist()[0]
  assert near([0, 2], 1.0) == [True, True]
  assert near([1, 2], 0.61) == [False, True]
  assert near([1, 1], 0.59) == [True, False]
  accepted, following = verification.greedy(
      jnp.asarray([[1, 0]]), jnp.asarray([[0, 2, 1]]), jnp.asarray([[True, False]]))
  assert (int(accepted[0]), int(following[0])) == (1, 2)


@pytest.mark.parametrize('arguments, named', [
    ({'name': 'best'}, 'verification: expected one of token_wise, block, found best'),
    ({'lenience': 0.0}, r'lenience: expected a number in \(0, 1\], found 0.0'),
    ({'lenience': 1.5}, r'lenience: expected a number in \(0, 1\], found 1.5'),
    ({'lenience': 0.5, 'name': 'block'}, 'lenience: expected 1 with block verification'),
])
def test_settings_out_of_range_are_refused(arguments, named):
  with pytest.raises(UserError, match=named):
    verification.VerificationRule(**arguments)


@pytest.mark.parametrize('rule', [verification.token_wise, verification.block])
def test_a_token_of_probability_zero_is_refused_at_any_uniform(rule):
  p = jnp.asarray([[[0.0, 1.0], [0.5, 0.5]]])
  q = jnp.asarray([[[1.0, 0.0]]])
  accepted, law = rule(jnp.zeros((1, 1), jnp.int32), q, p, jnp.zeros((1, 1)))
  assert int(accepted[0]) == 0
  np.testing.assert_array_equal(law, [[0.0, 1.0]])


def test_residual_without_mass_is_p():
  p = jnp.asarray([[0.25, 0.75]])
  np.testing.assert_array_equal(verification.residual(p, p), p)
  # q above p everywhere: nothing left over either, and nothing divided by zero.
  np.testing.assert_array_equal(verification.residual(p, p + 1e-3), p)


@pytest.mark.parametrize('rule', [verification.token_wise, verification.block])
@pytest.mark.parametrize('gamma', [1, 4])
def test_a_draft_that_is_the_target_is_accepted_whole(rule, gamma):
  rng = np.random.default_rng(gamma)
  p = random_laws(rng, 200, gamma + 1, 3).astype(np.float32)
  drafts = (rng.random((200, gamma, 1)) > np.cumsum(p, -1)[:, :-1]).sum(-1)
  accepted, law = rule(
      jnp.asarray(drafts, jnp.int32), p[:, :-1], p, jnp.full((200, gamma), 1 - 1e-6))
  assert (np.asarray(accepted) == gamma).all()
  np.testing.assert_allclose(law, p[:, -1], rtol=1e-5)


@pytest.mark.parametrize('rule', [verification.token_wise, verification.block])
@pytest.mark.parametrize('gamma', [0, 1, 5])
def test_greedy_is_either_rule_on_one_hot_laws(gamma, rule):
  rng = np.random.default_rng(gamma)
  draft = rng.integers(0, 3, (50, gamma))
  target = np.where(rng.random((50, gamma + 1)) < 0.7,
                    np.pad(draft, ((0, 0), (0, 1))), rng.integers(0, 3, (50, gamma + 1)))
  one_hot = lambda x: jax.nn.one_hot(x, 3)
  accepted, law = rule(
      jnp.asarray(draft, jnp.int32), one_hot(draft), one_hot(target),
      jnp.asarray(rng.random((50, gamma)), jnp.float32))
  expected, following = verification.greedy(jnp.asarray(draft), jnp.asarray(target))
  np.testing.assert_array_equal(accepted, expected)
  np.testing.assert_array_equal(jnp.argmax(law, -1), following)


def test_sample_never_draws_a_token_without_mass():
  law = jnp.asarray([0.0, 0.3, 0.0, 0.7, 0.0])
  uniforms = jnp.asarray([0.0, 0.29, 0.31, 0.9, np.nextafter(np.float32(1), np.float32(0))])
  drawn = sampling.sample(jnp.tile(law, (5, 1)), uniforms)
  np.testing.assert_array_equal(drawn, [1, 1, 3, 3, 3])
