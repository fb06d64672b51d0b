"""The loop: exact distribution, identity, lengths, prompts, statistics, compiled as one program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import toy
from speculative_t5x import analysis, decoding, sampling, step, verification
from speculative_t5x.drafters import ModelDrafter
from speculative_t5x.errors import UserError
from speculative_t5x.sampling import SamplingRule
from speculative_t5x.verification import VerificationRule

# Each distribution test rejects a correct program with this probability.
ERROR_RATE = 1e-4


def decode(
    target, draft, *, gamma, rule, batch=1, length=4, seed=0, draft_rule=None, inputs=None, **kwargs
):
  """Runs the loop on toy models."""
  if inputs is None:
    inputs = np.zeros((batch, length), np.int32)
  slots = decoding.cache_slots(inputs.shape[1], gamma)
  num_decodes = kwargs.get('num_decodes', 1)
  rows = len(inputs) * num_decodes
  if draft_rule is None:
    draft_rule = rule if np.ndim(rule.temperature) == 0 else SamplingRule(
        jnp.repeat(jnp.asarray(rule.temperature), num_decodes), rule.topk, rule.topp)

  @functools.partial(jax.jit)
  def run(key):
    return decoding.speculative_decode(
        jnp.asarray(inputs), target.cache(rows, slots), target, toy.EOS, gamma=gamma,
        drafter=ModelDrafter(draft, draft_rule) if gamma else None,
        draft_state=draft.cache(rows, slots) if gamma else None,
        rule=rule, decode_rng=key, **kwargs)

  return run(jax.random.key(seed))


def p_value(target, draft, *, gamma, rule, samples=120_000, length=3, **kwargs):
  """Chi-square of sampled outputs against the target's exact law."""
  result = decode(target, draft, gamma=gamma, rule=rule, batch=samples, length=length, **kwargs)
  drawn = np.asarray(result.sequences[:, 0])
  statistic, freedom = toy.chi_square(drawn, target.exact(length, rule))
  return scipy.stats.chi2.sf(statistic, freedom)


TARGET, DRAFT = toy.Toy(4, 1), toy.Toy(4, 2)
TOKEN_WISE = VerificationRule('token_wise')
VERIFICATIONS = [pytest.param(VerificationRule(name), id=name) for name in verification.RULES]


@pytest.mark.parametrize('verify', VERIFICATIONS)
@pytest.mark.parametrize('gamma', [0, 1, 2, 4])
@pytest.mark.parametrize(
    'rule', [SamplingRule(1.0), SamplingRule(0.6), SamplingRule(1.0, topk=2),
             SamplingRule(1.3, topp=0.7)], ids=str)
def test_samples_follow_the_target(gamma, rule, verify):
  assert p_value(TARGET, DRAFT, gamma=gamma, rule=rule, verify=verify) > ERROR_RATE


@pytest.mark.parametrize('temperature', [0.0, 1.0])
@pytest.mark.parametrize('gamma', [0, 1, 3])
def test_prompt_tokens_beyond_the_vocabulary_are_kept_and_read(temperature, gamma):
  # An embedding may have rows that no logits belong to.
  rule = SamplingRule(temperature)
  prompts = np.array([[0, 6, 5, 0, 0, 0], [0, 2, 6, 6, 5, 0]], np.int32)
  wide = toy.Toy(8, 5, scale=6.0)
  narrow = lambda tokens, positions, cache: (
      lambda logits, cache: (logits[..., :4], cache))(*wide(tokens, positions, cache))
  narrow.cache = wide.cache
  result = decode(narrow, narrow, gamma=gamma, rule=rule, inputs=prompts)
  sequences = np.asarray(result.sequences[:, 0])
  forced = prompts[:, 1:] != 0
  np.testing.assert_array_equal(sequences[:, :-1][forced], prompts[:, 1:][forced])
  if not temperature:
    for row, length in zip(sequences, forced.sum(axis=1), strict=True):
      context = [0, *map(int, row)]
      assert row[length] == np.argmax(wide.table[context[length - 1], context[length]][:4])


def test_samples_follow_the_target_with_a_draft_rule_of_its_own():
  rule = SamplingRule(1.0)
  for draft_rule in (SamplingRule(0.5), SamplingRule(1.0, topk=2)):
    assert p_value(TARGET, DRAFT, gamma=2, rule=rule, draft_rule=draft_rule) > ERROR_RATE


def test_samples_follow_the_target_at_mixed_temperatures():
  temperatures = np.tile(np.float32([0.0, 0.5, 1.0, 2.0]), 30_000)
  rule = SamplingRule(jnp.asarray(temperatures))
  result = decode(TARGET, DRAFT, gamma=2, rule=rule, batch=len(temperatures), length=3)
  for kind in range(4):
    drawn = np.asarray(result.sequences[kind::4, 0])
    statistic, freedom = toy.chi_square(drawn, TARGET.exact(3, rule, row=kind))
    assert scipy.stats.chi2.sf(statistic, freedom) > ERROR_RATE


def test_a_greedy_draft_rule_keeps_the_law():
  # One-hot q: drafts come without probabilities.
  draft_rule = SamplingRule(0.0)
  assert p_value(TARGET, DRAFT, gamma=2, rule=SamplingRule(1.0), draft_rule=draft_rule) > ERROR_RATE


class Mutations:
  """Ways in which others got it wrong. Each must make the distribution test fail."""

  @staticmethod
  def no_residual(monkeypatch):
    monkeypatch.setattr(verification, 'residual', lambda p, q: p)

  @staticmethod
  def inclusive_comparison(monkeypatch):
    def token_wise(draft_tokens, q, p, accept_uniforms):
      at = lambda law: jnp.take_along_axis(law, draft_tokens[..., None], -1)[..., 0]
      # Uniforms of three values make r = 0 as likely as a coarse generator would.
      coarse = jnp.floor(accept_uniforms * 3) / 3
      accepted = verification.leading_count(coarse * at(q) <= at(p[:, :-1]))
      pick = lambda law: verification.at_position(law, accepted)
      return accepted, verification.residual(pick(p), pick(verification.pad_q(q)))
    monkeypatch.setitem(verification.RULES, 'token_wise', token_wise)

  @staticmethod
  def q_without_transform(monkeypatch):
    def draw(rule, logits, forced, uniforms):
      del forced
      tokens = sampling.sample(rule.distribution(logits), uniforms)
      return tokens, jax.nn.softmax(logits)
    monkeypatch.setattr('speculative_t5x.drafters.model.draw', draw)

  @staticmethod
  def p_without_transform(monkeypatch):
    for name, original in verification.RULES.items():
      monkeypatch.setitem(
          verification.RULES, name,
          lambda tokens, q, p, uniforms, original=original: original(
              tokens, q, jnp.sqrt(p) / jnp.sum(jnp.sqrt(p), -1, keepdims=True), uniforms))

  @staticmethod
  def one_uniform_for_everything(monkeypatch):
    monkeypatch.setattr(
        jax.random, 'uniform', lambda key, shape: jnp.tile(jax.random.bits(key) / 2.0**32, shape))


@pytest.mark.parametrize('mutation', [x for x in dir(Mutations) if not x.startswith('_')])
def test_the_distribution_test_detects(mutation, monkeypatch):
  getattr(Mutations, mutation)(monkeypatch)
  rule = SamplingRule(0.7, topk=2)
  assert p_value(TARGET, DRAFT, gamma=2, rule=rule, verify=TOKEN_WISE) < ERROR_RATE


def test_a_block_accepts_more():
  run = functools.partial(
      decode, TARGET, DRAFT, gamma=4, rule=SamplingRule(1.0), batch=2000, length=40)
  accepted = {}
  for name in verification.RULES:
    s = run(verify=VerificationRule(name)).statistics
    accepted[name] = int(s.emitted.sum()) / int(s.rounds.sum())
  assert accepted['block'] > accepted['token_wise'] + 0.02


@pytest.mark.parametrize(
    'temperature, leniences', [(0.0, (1.0, 0.2, 1e-3)), (1.0, (1.0, 0.5, 0.1))])
def test_lenience_accepts_more(temperature, leniences):
  run = functools.partial(
      decode, TARGET, DRAFT, gamma=3, rule=SamplingRule(temperature), batch=500, length=30)
  rates = []
  for lenience in leniences:
    s = run(verify=VerificationRule('token_wise', lenience)).statistics
    rates.append(int(s.accepted.sum()) / int((s.accepted + s.rejected).sum()))
  assert rates[0] <= rates[1] <= rates[2] and rates[0] < rates[2]


@pytest.mark.parametrize('gamma', [1, 2, 3, 7])
@pytest.mark.parametrize('batch', [1, 5])
def test_greedy_equals_plain(gamma, batch):
  for seed in range(5):
    target, draft = toy.Toy(6, seed, scale=3), toy.Toy(6, seed + 50, scale=3)
    # Half of the draft's table is the target's, so that some drafts are accepted.
    draft.table = np.where(np.random.default_rng(seed).random((6, 6, 1)) < 0.6,
                           target.table, draft.table)
    rng = np.random.default_rng(seed)
    inputs = np.zeros((batch, 12), np.int32)
    inputs[:, 1:4] = np.where(np.arange(3) < rng.integers(0, 4, (batch, 1)),
                              rng.integers(2, 6, (batch, 3)), 0)
    run = functools.partial(decode, target, draft, rule=SamplingRule(), inputs=inputs,
                            rescale_log_probs=False)
    plain, fast = run(gamma=0), run(gamma=gamma)
    np.testing.assert_array_equal(plain.sequences, fast.sequences)
    np.testing.assert_allclose(plain.scores, fast.scores, atol=1e-5)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_a_row_is_what_it_is_alone(temperature):
  inputs = np.zeros((5, 10), np.int32)
  inputs[1, 1:3] = [2, 3]
  run = functools.partial(decode, TARGET, DRAFT, gamma=3, rule=SamplingRule(temperature))
  together = run(inputs=inputs)
  for row in range(5):
    alone = run(inputs=inputs[row : row + 1], example_index=jnp.asarray([row]))
    np.testing.assert_array_equal(together.sequences[row], alone.sequences[0])
    np.testing.assert_allclose(together.scores[row], alone.scores[0], atol=1e-6)
    jax.tree.map(lambda a, b, row=row: np.testing.assert_array_equal(a[row], b[0]),
                 together.statistics, alone.statistics)


@pytest.mark.parametrize('count', range(1, 8))
def test_running_the_leading_tokens_is_running_all(count):
  """What is needed is as in a whole call, and what is not is not relied upon."""
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 4, (3, 7)), jnp.int32)
  positions = jnp.asarray([0, 2, 5])
  logits, cache = jax.jit(functools.partial(step.run_leading, TARGET))(
      tokens, jnp.int32(count), positions, TARGET.cache(3, 16))
  expected, full = TARGET(tokens, positions, TARGET.cache(3, 16))
  np.testing.assert_array_equal(logits[:, :count], expected[:, :count])
  for row, start in enumerate(np.asarray(positions)):
    np.testing.assert_array_equal(cache[row, : start + count], full[row, : start + count])


@pytest.mark.parametrize('count, width', [(1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6), (7, 7)])
def test_no_more_tokens_are_run_than_the_next_quarter(count, width):
  tokens = jnp.ones((1, 7), jnp.int32)
  logits, _ = step.run_leading(
      lambda tokens, positions, cache: (jnp.ones((*tokens.shape, 4)), cache), tokens,
      jnp.int32(count), jnp.zeros(1, jnp.int32), ())
  assert int(logits[0, :, 0].sum()) == width


def test_seeds():
  run = functools.partial(
      decode, TARGET, DRAFT, gamma=3, rule=SamplingRule(1.0), batch=20, length=9)
  np.testing.assert_array_equal(run(seed=1).sequences, run(seed=1).sequences)
  assert (np.asarray(run(seed=1).sequences) != np.asarray(run(seed=2).sequences)).any()


@pytest.mark.parametrize('gamma', [0, 3])
def test_num_decodes_are_independent_and_sorted(gamma):
  result = decode(TARGET, DRAFT, gamma=gamma, rule=SamplingRule(1.0), batch=30_000, length=3,
                  num_decodes=4)
  assert result.sequences.shape == (30_000, 4, 3)
  assert (np.diff(np.asarray(result.scores), axis=1) >= 0).all()
  drawn = np.asarray(result.sequences).reshape(-1, 3)
  statistic, freedom = toy.chi_square(drawn, TARGET.exact(3, SamplingRule(1.0)))
  assert scipy.stats.chi2.sf(statistic, freedom) > ERROR_RATE


@pytest.mark.parametrize('rescale', [True, False])
def test_scores_are_the_targets_log_probabilities(rescale):
  rule = SamplingRule(0.8, topk=3)
  result = decode(TARGET, DRAFT, gamma=2, rule=rule, batch=50, length=6, rescale_log_probs=rescale)
  law = rule if rescale else SamplingRule(1.0)
  exact = TARGET.exact(6, law)
  for sequence, score in zip(np.asarray(result.sequences[:, 0]), result.scores[:, 0], strict=True):
    assert float(score) == pytest.approx(np.log(exact[tuple(int(t) for t in sequence)]), abs=1e-4)


def cycle(vocab_size, eos_at):
  """A model that counts 2, 3, 4, … and ends after the token `eos_at`; EOS never otherwise."""
  table = np.full((vocab_size, vocab_size, vocab_size), -20.0)
  for token in range(vocab_size):
    following = 2 if token < 2 else toy.EOS if token == eos_at else min(token + 1, vocab_size - 1)
    table[:, token, following] = 20.0
  return toy.Toy(vocab_size, 0, table=table)


@pytest.mark.parametrize('gamma', [0, 1, 3, 8])
def test_text_is_cut_at_the_first_eos_of_a_block(gamma):
  target = cycle(10, eos_at=4)
  result = decode(target, target, gamma=gamma, rule=SamplingRule(), length=8)
  np.testing.assert_array_equal(result.sequences[0, 0], [2, 3, 4, 1, 0, 0, 0, 0])
  assert int(result.statistics.emitted[0, 0]) == 4


@pytest.mark.parametrize('gamma', [0, 1, 3, 8])
@pytest.mark.parametrize('steps', [1, 3, 7])
def test_length_caps_count_the_bonus_token(gamma, steps):
  target = cycle(30, eos_at=-1)
  inputs = np.zeros((2, 8), np.int32)
  inputs[1, 1:3] = [5, 6]
  result = decode(target, target, gamma=gamma, rule=SamplingRule(), inputs=inputs,
                  max_decode_steps=steps)
  lengths = np.sum(np.asarray(result.sequences[:, 0]) != 0, axis=1)
  np.testing.assert_array_equal(lengths, [min(steps, 8), min(2 + steps, 8)])
  np.testing.assert_array_equal(result.statistics.emitted[:, 0], [min(steps, 8), min(steps, 6)])


def test_prompts_are_kept_and_an_eos_in_them_does_not_end():
  target = cycle(20, eos_at=9)
  inputs = np.array([[0, 7, 1, 8, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]], np.int32)
  for gamma in (0, 2, 5):
    result = decode(target, target, gamma=gamma, rule=SamplingRule(), inputs=inputs)
    np.testing.assert_array_equal(result.sequences[0, 0], [7, 1, 8, 9, 1, 0, 0, 0])


@pytest.mark.parametrize('gamma', [1, 4])
def test_sampled_continuations_of_a_prompt_follow_the_target(gamma):
  rule = SamplingRule(1.0)
  inputs = np.tile(np.array([[0, 2, 0, 0]], np.int32), (100_000, 1))
  drawn = np.asarray(decode(TARGET, DRAFT, gamma=gamma, rule=rule, inputs=inputs).sequences[:, 0])
  exact = {k: v for k, v in TARGET.exact(4, rule).items() if k[0] == 2}
  total = sum(exact.values())
  statistic, freedom = toy.chi_square(drawn, {k: v / total for k, v in exact.items()})
  assert scipy.stats.chi2.sf(statistic, freedom) > ERROR_RATE


@pytest.mark.parametrize('gamma', [0, 1, 3])
def test_decoding_starts_behind_a_prefilled_prompt(gamma):
  """Caches hold what a prefill put there, and it stays as it is."""
  inputs = np.array([[0, 2, 3, 2, 0, 0, 0, 0], [0, 3, 0, 0, 0, 0, 0, 0]], np.int32)
  initial_index = np.array([3, 1], np.int32)
  slots = decoding.cache_slots(inputs.shape[1], gamma)
  # The models read the last two tokens. A prefill that saw other tokens than the sequence holds
  # (as one under a prefix mask would) shows in the logits of the first new token alone.
  prefilled = TARGET.cache(2, slots).at[0, 2].set(0).at[1, 0].set(2)
  run = lambda drafter: decoding.speculative_decode(
      jnp.asarray(inputs), prefilled, TARGET, toy.EOS, gamma=gamma, drafter=drafter,
      draft_state=prefilled if gamma else None, rule=SamplingRule(),
      initial_index=jnp.asarray(initial_index))
  drafter = ModelDrafter(TARGET, SamplingRule(), jnp.asarray(initial_index)) if gamma else None
  result = run(drafter)
  for row, (before, last) in enumerate([(0, 2), (2, 3)]):
    expected = list(inputs[row, 1 : initial_index[row] + 1])
    while len(expected) < 8 and expected[-1] != toy.EOS:
      before, last = last, int(TARGET.table[before, last].argmax())
      expected.append(last)
    expected += [0] * (8 - len(expected))
    np.testing.assert_array_equal(result.sequences[row, 0], expected)
  # A draft that is the target is always accepted: it read the same prefill.
  assert not np.any(result.statistics.rejected)


def test_a_prompt_that_fills_the_length_is_returned_as_it_is():
  inputs = np.array([[0, 2, 3, 2], [0, 3, 0, 0]], np.int32)
  result = decode(TARGET, DRAFT, gamma=2, rule=SamplingRule(), inputs=inputs,
                  initial_index=np.array([4, 1]))
  np.testing.assert_array_equal(result.sequences[0, 0, :3], [2, 3, 2])
  assert result.statistics.rounds[0, 0] == 0


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_statistics_and_trace_account_for_every_token(temperature):
  gamma, length = 3, 12
  result = decode(TARGET, DRAFT, gamma=gamma, rule=SamplingRule(temperature), batch=200,
                  length=length, trace=True)
  s = jax.tree.map(lambda x: np.asarray(x[:, 0]), result.statistics)
  trace = jax.tree.map(lambda x: np.asarray(x[:, 0]), result.trace)
  np.testing.assert_array_equal((trace.accepted >= 0).sum(1), s.rounds)
  np.testing.assert_array_equal(np.maximum(trace.accepted, 0).sum(1), s.accepted)
  np.testing.assert_array_equal((trace.draft_tokens >= 0).sum((1, 2)), s.drafted)
  np.testing.assert_array_equal(s.accepted + (trace.next_token >= 0).sum(1), s.emitted)
  np.testing.assert_array_equal(s.accepted_at_position.sum(1), s.accepted)
  assert (s.rejected <= s.rounds).all()
  for row in range(200):
    text = []
    for r in range(s.rounds[row]):
      text += list(trace.draft_tokens[row, r, : trace.accepted[row, r]])
      text += [t for t in [trace.next_token[row, r]] if t >= 0]
    assert text == list(np.asarray(result.sequences[row, 0])[: s.emitted[row]])


@pytest.mark.parametrize('gamma', range(1, 11))
def test_tokens_a_round_agree_with_the_formula(gamma):
  rows, length, rule = 400, 300, SamplingRule(1.0)
  slots = decoding.cache_slots(length, gamma)

  @jax.jit
  def statistics(target_table, draft_table):
    target, draft = toy.Toy(4, 0), toy.Toy(4, 0)
    target.table, draft.table = target_table, draft_table
    return decoding.speculative_decode(
        jnp.zeros((rows, length), jnp.int32), target.cache(rows, slots), target, toy.EOS,
        gamma=gamma, drafter=ModelDrafter(draft, rule), draft_state=draft.cache(rows, slots),
        rule=rule, verify=TOKEN_WISE, decode_rng=jax.random.key(gamma)).statistics

  for alpha in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
    # p uniform on two tokens, q on one of them with weight beta apart: min(p, q) sums to alpha at
    # every prefix. Tokens 0 and 1 (EOS) have no mass, so that no text ends early.
    p = np.array([0, 0, 0.5, 0.5])
    q = np.array([0, 0, 1.5 - alpha, alpha - 0.5])
    with np.errstate(divide='ignore'):
      logs = [np.maximum(np.log(x), -1e7).astype(np.float32) for x in (p, q)]
    found = statistics(*(np.broadcast_to(x, (4, 4, 4)) for x in logs))
    s = jax.tree.map(lambda x: np.asarray(x[:, 0]), found)
    achieved = s.emitted.sum() / s.rounds.sum()
    # A round yields 1 … gamma + 1 tokens: its standard deviation is at most gamma / 2. The last
    # round of a row is cut by the length, which shifts the mean by at most one round's tokens.
    tolerance = 4 * (gamma / 2) / np.sqrt(s.rounds.sum()) + (gamma + 1) * rows / s.emitted.sum() * 2
    assert achieved == pytest.approx(analysis.expected_tokens(alpha, gamma), abs=tolerance)
    rate = s.accepted.sum() / (s.accepted.sum() + s.rejected.sum())
    assert rate == pytest.approx(alpha, abs=4 * 0.5 / np.sqrt(s.accepted.sum()))


def test_the_loop_is_one_program_without_host_round_trips():
  target, draft = TARGET, DRAFT
  rule = SamplingRule(1.0)
  run = lambda key: decoding.speculative_decode(
      jnp.zeros((2, 6), jnp.int32), target.cache(2, 10), target, toy.EOS, gamma=3,
      drafter=ModelDrafter(draft, rule), draft_state=draft.cache(2, 10), rule=rule, decode_rng=key)
  jaxpr = jax.make_jaxpr(run)(jax.random.key(0))
  names = list(primitives(jaxpr.jaxpr))
  assert names.count('while') >= 1
  assert not [n for n in names if 'callback' in n or n in ('infeed', 'outfeed', 'device_put_host')]
  # Nothing of the decoding happens outside the one loop: the models' tables are read in it.
  outer = [e.primitive.name for e in jaxpr.jaxpr.eqns]
  assert outer.count('while') == 1


def primitives(jaxpr):
  """Names of all primitives in a jaxpr, nested ones included."""
  for equation in jaxpr.eqns:
    yield equation.primitive.name
    for value in equation.params.values():
      for nested in value if isinstance(value, (tuple, list)) else [value]:
        inner = getattr(nested, 'jaxpr', nested)
        if hasattr(inner, 'eqns'):
          yield from primitives(inner)


def test_full_vocabulary_sorts_only_when_asked_for():
  def names(rule):
    logits = jnp.zeros((2, 3, 50))
    return set(primitives(jax.make_jaxpr(rule.distribution)(logits).jaxpr))
  assert not names(SamplingRule(1.0)) & {'sort', 'top_k', 'cumsum'}
  assert 'sort' in names(SamplingRule(1.0, topp=0.5))


@pytest.mark.parametrize(
    ('arguments', 'named'),
    [({'gamma': -1}, 'gamma'), ({'gamma': 2, 'num_decodes': 0}, 'num_decodes'),
     ({'gamma': 2, 'max_decode_steps': 9}, 'max_decode_steps')])
def test_out_of_range_is_refused(arguments, named):
  with pytest.raises(UserError, match=named):
    decode(TARGET, DRAFT, rule=SamplingRule(), **arguments)
