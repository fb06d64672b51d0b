"""Every drafter: exact under every rule, and each one's own ways."""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import toy
from speculative_t5x import decoding, ngram, verification, vocabularies
from speculative_t5x.drafters import (
    CascadeDrafter,
    CopyingDrafter,
    DrafterConfig,
    MixedDrafter,
    ModelDrafter,
    NgramDrafter,
)
from speculative_t5x.drafters.ngram import law
from speculative_t5x.errors import UserError
from speculative_t5x.sampling import SamplingRule
from speculative_t5x.verification import VerificationRule

# Each distribution test rejects a correct program with this probability.
ERROR_RATE = 1e-4
VERIFICATIONS = [pytest.param(VerificationRule(name), id=name) for name in verification.RULES]


def copied(inputs, output, gamma, **settings):
  """What is copied for one row whose output is `output`, and the match's length."""
  inputs = np.asarray([inputs], np.int32).reshape(1, -1)
  sequences = np.zeros((1, len(output) + 6), np.int32)
  sequences[0, 1 : len(output) + 1] = output
  # What lies behind the row's end must not matter.
  sequences[0, len(output) + 1 :] = 7
  tokens, length = CopyingDrafter(**settings).copy(
      jnp.asarray(inputs), jnp.asarray(sequences), jnp.asarray([len(output)]), gamma)
  return tokens[0].tolist(), int(length[0])


def test_the_longest_match_wins_then_the_latest():
  # 5 6 is matched by two tokens in the input, 6 alone in the output.
  assert copied([5, 6, 8, 9], [6, 3, 5, 6], 2) == ([8, 9], 2)
  assert copied([2, 6, 4, 3, 6, 5], [9, 6], 1) == ([5], 1)
  # Of the input and the output the later one.
  assert copied([6, 4], [6, 3, 6], 1) == ([3], 1)


def test_no_match_proposes_padding():
  assert copied([2, 3], [4], 3) == ([0, 0, 0], 0)
  assert copied([], [], 2) == ([0, 0], 0)
  assert copied([2, 6, 4], [6], 2, min_ngram=2) == ([0, 0], 0)


def test_a_match_at_the_end_of_the_row_goes_round():
  assert copied([], [4, 5, 4, 5], 5) == ([4, 5, 4, 5, 4], 2)
  assert copied([], [3, 3], 3) == ([3, 3, 3], 1)


def by_hand(inputs, output, gamma, max_ngram):
  """The same by loops over lists."""
  context = [*inputs, 0, *output]
  end = len(context) - 1
  best, start = 0, None
  for place in range(end):
    length = 0
    while (length < max_ngram and place - length >= 0 and context[place - length]
           and context[place - length] == context[end - length]):
      length += 1
    if length and length >= best:
      best, start = length, place
  if not best:
    return [0] * gamma, 0
  return [context[start + 1 + i % (end - start)] for i in range(gamma)], best


@hypothesis.given(
    st.lists(st.integers(1, 4), max_size=8), st.lists(st.integers(1, 4), max_size=8),
    st.integers(1, 4))
@hypothesis.settings(max_examples=60, deadline=None)
def test_copying_is_what_loops_over_lists_give(inputs, output, max_ngram):
  assert copied(inputs, output, 4, max_ngram=max_ngram) == by_hand(inputs, output, 4, max_ngram)


# Every drafter, by name: (vocabulary size, rule) to the drafter, the seed of its model, and what it
# keeps beside the model's cache.
COPYING = CopyingDrafter(min_ngram=1)
SOME_TEXTS = np.random.default_rng(0).integers(1, 4, (50, 4)).tolist()


def table_of(vocab_size, order):
  return jax.tree.map(jnp.asarray, ngram.build(SOME_TEXTS, vocab_size, order))


class Made(NamedTuple):
  """A drafter of toy models.

  Attributes:
    drafter: the drafter.
    state: what it starts from, of rows whose contexts are `inputs`: `(slots, inputs) -> state`.
  """

  drafter: Any
  state: Any


def made(name, vocab_size, rule):
  """The drafter `name`; the draft model differs from the target."""
  model = toy.Toy(vocab_size, 2)
  drafts = lambda **settings: ModelDrafter(model, rule, **settings)
  cache = lambda slots, inputs: model.cache(len(inputs), slots)
  small = toy.Toy(vocab_size, 7)
  both = lambda slots, inputs: (cache(slots, inputs), inputs)
  return {
      'model': lambda: Made(drafts(), cache),
      'adaptive': lambda: Made(drafts(min_confidence=0.5), cache),
      'hardly confident': lambda: Made(drafts(min_confidence=0.95), cache),
      'copying': lambda: Made(COPYING, lambda slots, inputs: inputs),
      'unigram': lambda: Made(NgramDrafter(table_of(vocab_size, 1), rule), lambda *_: None),
      'bigram': lambda: Made(NgramDrafter(table_of(vocab_size, 2), rule), lambda *_: None),
      'trigram': lambda: Made(NgramDrafter(table_of(vocab_size, 3), rule), lambda *_: None),
      'mixed': lambda: Made(MixedDrafter(COPYING, drafts()), both),
      'adaptive mixed': lambda: Made(
          MixedDrafter(CopyingDrafter(min_ngram=2), drafts(min_confidence=0.5)), both),
      'copying cascade': lambda: Made(CascadeDrafter(model, rule, COPYING, 2), both),
      'bigram cascade': lambda: Made(
          CascadeDrafter(model, rule, NgramDrafter(table_of(vocab_size, 2), rule), 1),
          lambda slots, inputs: (cache(slots, inputs), None)),
      'model cascade': lambda: Made(
          CascadeDrafter(model, rule, ModelDrafter(small, rule), 3),
          lambda slots, inputs: (cache(slots, inputs), small.cache(len(inputs), slots))),
      'adaptive cascade': lambda: Made(
          CascadeDrafter(model, rule, ModelDrafter(small, rule, min_confidence=0.6), 3),
          lambda slots, inputs: (cache(slots, inputs), small.cache(len(inputs), slots))),
  }[name]()


NAMES = ['model', 'adaptive', 'hardly confident', 'copying', 'unigram', 'bigram', 'trigram',
         'mixed', 'adaptive mixed', 'copying cascade', 'bigram cascade', 'model cascade',
         'adaptive cascade']
# One of each kind.
KINDS = ['model', 'adaptive', 'copying', 'bigram', 'adaptive mixed', 'model cascade']


def run(name, target, *, gamma, rule, context, length, inputs=None, draft_rule=None, key=1,
        **options):
  """Decodes with a drafter, or plainly when `name` is None.

  Args:
    name: of the drafter.
    target: the toy.
    gamma: drafts a round.
    rule: the target's.
    context: int32 `[B, S]`, what copies may be taken from.
    length: of the outputs.
    inputs: prompts, or None.
    draft_rule: the drafter's, or None for the target's.
    key: seed.
    **options: of `speculative_decode`.
  """
  batch = len(context)
  slots = decoding.cache_slots(length, gamma) + 3
  prompts = jnp.zeros((batch, length), jnp.int32) if inputs is None else jnp.asarray(inputs)
  num_decodes = options.get('num_decodes', 1)
  context = jnp.repeat(jnp.asarray(context, jnp.int32), num_decodes, axis=0)
  drafter, state = None, None
  if name:
    drafter, state = made(name, target.vocab_size, draft_rule or rule)
    state = state(slots, context)
  decode = functools.partial(
      decoding.speculative_decode, prompts, target.cache(len(context), slots), target, toy.EOS,
      gamma=gamma, drafter=drafter, draft_state=state, rule=rule, decode_rng=jax.random.key(key),
      **options)
  return jax.jit(decode)()


def contexts(batch, seed=0, width=6):
  """Inputs that differ by row, some without any match."""
  return np.random.default_rng(seed).integers(0, 4, (batch, width)).astype(np.int32)


def p_value(name, rule, gamma, **options):
  """Chi-square of sampled outputs against the target's exact law."""
  target, batch, length = toy.Toy(4, 1), 80_000, 3
  result = run(name, target, gamma=gamma, rule=rule, context=contexts(batch), length=length,
               **options)
  assert np.any(result.statistics.accepted) and np.any(result.statistics.rejected)
  statistic, freedom = toy.chi_square(
      np.asarray(result.sequences[:, 0]), target.exact(length, rule))
  return scipy.stats.chi2.sf(statistic, freedom)


@pytest.mark.parametrize('verify', VERIFICATIONS)
@pytest.mark.parametrize('name', NAMES)
def test_samples_follow_the_target(name, verify):
  assert p_value(name, SamplingRule(1.0), 3, verify=verify) > ERROR_RATE


@pytest.mark.parametrize('rule', [SamplingRule(0.7, topk=3), SamplingRule(1.2, topp=0.8)], ids=str)
@pytest.mark.parametrize('name', KINDS)
def test_samples_under_other_rules_follow_the_target(name, rule):
  assert p_value(name, rule, 2) > ERROR_RATE


@pytest.mark.parametrize('draft_rule', [
    SamplingRule(0.0), SamplingRule(0.5), SamplingRule(1.5, topk=2), SamplingRule(1.0, topp=0.6),
], ids=str)
@pytest.mark.parametrize('name', ['adaptive', 'bigram', 'mixed', 'model cascade'])
def test_samples_follow_the_target_whatever_the_drafts_rule(name, draft_rule):
  assert p_value(name, SamplingRule(1.0), 2, draft_rule=draft_rule) > ERROR_RATE


def test_a_choice_of_drafts_by_their_own_value_is_detected(monkeypatch):
  """What `Proposal.lengths` forbids: a draft withdrawn for what it is."""
  propose = ModelDrafter.propose

  def withdraw(self, *args):
    proposal = propose(self, *args)
    return proposal._replace(lengths=jnp.where(proposal.tokens[:, 0] == 2, 0, 3))

  monkeypatch.setattr(ModelDrafter, 'propose', withdraw)
  assert p_value('model', SamplingRule(1.0), 3) < 1e-12


def test_a_cascade_judged_by_the_wrong_law_is_detected(monkeypatch):
  """The law of a cascade's drafts is its model's; that of the inner drafter would not do."""
  propose = CascadeDrafter.propose

  def wrong(self, *args):
    proposal = propose(self, *args)
    return proposal._replace(probabilities=jnp.full_like(proposal.probabilities, 0.25))

  monkeypatch.setattr(CascadeDrafter, 'propose', wrong)
  assert p_value('copying cascade', SamplingRule(1.0), 3) < 1e-12


@pytest.mark.parametrize('gamma', [1, 4])
@pytest.mark.parametrize('name', NAMES)
def test_greedy_outputs_equal_plain_ones(name, gamma):
  """Behind prompts of several lengths, in a ragged batch, and row by row."""
  target = toy.Toy(6, 3, scale=3)
  rng = np.random.default_rng(0)
  inputs = np.zeros((20, 24), np.int32)
  for row, length in enumerate(rng.integers(0, 8, 20)):
    inputs[row, 1 : length + 1] = rng.integers(2, 6, length)
  given = {'rule': SamplingRule(), 'length': 24, 'rescale_log_probs': False}
  plain = run(None, target, gamma=0, context=contexts(20), inputs=inputs, **given)
  fast = run(name, target, gamma=gamma, context=contexts(20), inputs=inputs, **given)
  np.testing.assert_array_equal(plain.sequences, fast.sequences)
  np.testing.assert_allclose(plain.scores, fast.scores, atol=1e-4)
  statistics = fast.statistics
  if name != 'unigram':
    assert np.sum(statistics.accepted) > 0
  np.testing.assert_array_equal(statistics.emitted, plain.statistics.emitted)
  # A round emits its accepted drafts and one token, unless it is cut.
  assert np.all(statistics.emitted <= statistics.accepted + statistics.rounds)
  assert np.all(statistics.drafted <= gamma * statistics.rounds)
  if 'adaptive' not in name and name != 'hardly confident':
    # The whole batch decides how long to draft; nothing else depends on it.
    alone = run(name, target, gamma=gamma, context=contexts(20)[3:4], inputs=inputs[3:4], **given)
    np.testing.assert_array_equal(
        alone.statistics.accepted_at_position[0], statistics.accepted_at_position[3])


@pytest.mark.parametrize('name', KINDS)
def test_sampled_outputs_with_prompts_and_several_decodes(name):
  """Prompts are kept, and what follows them has the target's law."""
  target, rule, batch = toy.Toy(4, 1), SamplingRule(1.0), 30_000
  inputs = np.tile(np.array([[0, 2, 0, 0], [0, 3, 2, 0]], np.int32), (batch, 1))
  result = run(name, target, gamma=3, rule=rule, context=contexts(2 * batch), length=4,
               inputs=inputs, num_decodes=2)
  sequences = np.asarray(result.sequences)
  for row, prompt in enumerate([(2,), (3, 2)]):
    exact = {outcome: p for outcome, p in target.exact(4, rule).items()
             if outcome[: len(prompt)] == prompt}
    total = sum(exact.values())
    exact = {outcome: p / total for outcome, p in exact.items()}
    statistic, freedom = toy.chi_square(sequences[row::2].reshape(-1, 4), exact)
    assert scipy.stats.chi2.sf(statistic, freedom) > ERROR_RATE


def test_a_model_drafts_less_the_more_it_is_asked_to_be_sure():
  target = toy.Toy(6, 3, scale=3)
  found = [
      run(name, target, gamma=5, rule=SamplingRule(), context=contexts(20), length=24).statistics
      for name in ('model', 'adaptive', 'hardly confident')
  ]
  drafted = [float(np.sum(x.drafted) / np.sum(x.rounds)) for x in found]
  assert drafted[0] > drafted[1] > drafted[2] >= 1


def test_rows_that_have_ended_do_not_decide_how_long_to_draft():
  """A row of high confidence that is over must not keep the others drafting."""
  model = toy.Toy(5, 3)
  drafter = ModelDrafter(model, SamplingRule(), min_confidence=0.5)
  sure = jnp.full((1, 5), -20.0).at[0, 2].set(0)
  unsure = jnp.zeros((1, 5))
  drafter = dataclasses.replace(drafter, tokens_to_logits=lambda tokens, positions, cache: (
      jnp.repeat(jnp.concatenate([sure, unsure])[:, None], tokens.shape[1], 1), cache))
  lengths = lambda active: drafter.propose(
      None, jnp.zeros((2, 12), jnp.int32), jnp.zeros(2, jnp.int32), jnp.zeros((2, 4), jnp.int32),
      jnp.zeros((2, 4)), jnp.asarray(active)).lengths.tolist()
  assert lengths([True, False]) == [4, 4]
  assert lengths([False, True]) == [1, 1]
  # (1 + .2) / 2, then (1 + .04) / 2, and so on above .5.
  assert lengths([True, True]) == [4, 4]


def test_the_model_of_a_mixed_drafter_reads_what_was_copied():
  """With the target as the draft model, whatever is refused must have been copied."""
  table = toy.Toy(6, 3, scale=3).table
  # No text ends, and each comes back to what it said before.
  table[..., toy.EOS] = -20
  target, rows, length = toy.Toy(6, 3, table=table), 40, 40
  rng = np.random.default_rng(0)
  context = rng.integers(2, 6, (rows, 20)).astype(np.int32)
  prompts = np.zeros((rows, length), np.int32)
  prompts[:, 1:3] = rng.integers(2, 6, (rows, 2))
  slots = decoding.cache_slots(length, 4)
  drafter = MixedDrafter(CopyingDrafter(min_ngram=2), ModelDrafter(target, SamplingRule()))
  result = jax.jit(functools.partial(
      decoding.speculative_decode, jnp.asarray(prompts), target.cache(rows, slots), target,
      toy.EOS, gamma=4, drafter=drafter, rule=SamplingRule(), trace=True,
      draft_state=(target.cache(rows, slots), jnp.asarray(context))))()
  sequences, trace = np.asarray(result.sequences), jax.tree.map(np.asarray, result.trace)
  copies_accepted, copies_refused, models_accepted = 0, 0, 0
  for row in range(rows):
    place = 0
    for accepted, following in zip(trace.accepted[row, 0], trace.next_token[row, 0], strict=True):
      if accepted < 0 or following < 0:
        break
      is_copy = place and copied(context[row], [*sequences[row, 0, :place]], 4, min_ngram=2)[1] > 0
      assert is_copy or accepted == 4
      copies_accepted += bool(is_copy and accepted == 4)
      copies_refused += bool(is_copy and accepted < 4)
      models_accepted += bool(place and not is_copy)
      place += accepted + 1
  # A model round behind copies: it has read them.
  assert copies_accepted and copies_refused and models_accepted


TEXTS = [[2, 3, 4, 1], [2, 3, 5, 1], [2, 3, 4, 1], [4, 4, 4, 1], [3, 1]]


@pytest.mark.parametrize('order', [1, 2, 3, 4])
def test_ngram_laws_are_the_smoothed_counts(order):
  """Every context's law against counting by hand."""
  table = ngram.build(TEXTS, 6, order, min_count=2, discount=0.5)
  counts = np.ones(6)
  for text in TEXTS:
    np.add.at(counts, text, 1)

  def expected(context):
    q = counts / counts.sum()
    for size in range(1, order):
      suffix = context[len(context) - size :]
      if min(suffix) < 0:
        continue
      following = np.zeros(6)
      for text in TEXTS:
        padded = [-1] * (order - 1) + [0, *text]
        for place in range(order, len(padded)):
          if padded[place - size : place] == list(suffix):
            following[padded[place]] += 1
      total = following.sum()
      if total >= (2 if size > 1 else 1):
        share = np.maximum(following - 0.5, 0) / total
        q = share + (1 - share.sum()) * q
    return q

  length = order - 1
  for context in itertools.product(range(-1, 6), repeat=length):
    found = law(table, jnp.asarray([context], jnp.int32).reshape(1, length))
    np.testing.assert_allclose(found[0], expected(context), atol=1e-6)
    assert float(found.sum()) == pytest.approx(1, abs=1e-6)


def test_only_the_most_frequent_successors_are_kept():
  texts = [[2, 3, 1]] * 3 + [[2, 4, 1]] * 2 + [[2, 5, 1]]
  table = ngram.build(texts, 6, 2, successors=1, discount=0.5)
  found = np.asarray(law(table, jnp.asarray([[2]]))[0])
  assert found[3] > 2.5 / 6 and found.sum() == pytest.approx(1, abs=1e-6)
  # What was cut is spread by the unigrams.
  assert found[4] == pytest.approx((1 - 2.5 / 6) * float(table.unigram[4]), abs=1e-6)


def test_ngram_drafts_of_a_deterministic_text_are_all_accepted():
  # The target counts 2, 3, 4, …; a bigram table of such a text knows as much.
  vocab = 12
  logits = np.full((vocab, vocab, vocab), -20.0)
  for token in range(vocab):
    logits[:, token, token + 1 if 1 < token < vocab - 1 else (2 if token == 0 else 1)] = 0
  target = toy.Toy(vocab, 0, table=logits)
  table = ngram.build([[*range(2, vocab), 1]], vocab, 2)
  drafter = NgramDrafter(jax.tree.map(jnp.asarray, table), SamplingRule())
  result = decoding.speculative_decode(
      jnp.zeros((1, vocab), jnp.int32), target.cache(1, vocab + 5), target, toy.EOS, gamma=4,
      drafter=drafter)
  assert result.sequences[0, 0, :11].tolist() == [*range(2, vocab), 1]
  assert not np.any(result.statistics.rejected)


def test_tables_are_saved_and_refused(tmp_path):
  vocabulary = vocabularies.load_vocabulary('bytes')
  table = ngram.build(TEXTS, vocabulary.size, 3)
  ngram.save(tmp_path / 'table.npz', table, vocabulary)
  loaded = ngram.load(tmp_path / 'table.npz', vocabulary)
  jax.tree.map(np.testing.assert_array_equal, table, loaded)
  other = vocabularies.load_vocabulary('bytes', extra_ids=1)
  with pytest.raises(UserError, match=r'expected the vocabulary of the target.* id 259 differs'):
    ngram.load(tmp_path / 'table.npz', other)
  with pytest.raises(UserError, match='expected a file, found none'):
    ngram.load(tmp_path / 'none.npz', vocabulary)
  (tmp_path / 'broken.npz').write_bytes(b'broken')
  with pytest.raises(UserError, match=r'expected one of speculative_t5x\.ngram'):
    ngram.load(tmp_path / 'broken.npz', vocabulary)


def test_the_command_builds_a_table(tmp_path, capsys):
  (tmp_path / 'corpus.txt').write_text('open the file\nopen the door\n\n', encoding='utf-8')
  build = ['build', f'--corpus={tmp_path / "corpus.txt"}', '--vocabulary=bytes', '--order=3']
  assert ngram.main([*build, f'--output={tmp_path / "table.npz"}']) == 0
  assert 'order 3' in capsys.readouterr().out
  vocabulary = vocabularies.load_vocabulary('bytes')
  table = ngram.load(tmp_path / 'table.npz', vocabulary)
  found = law(table, jnp.asarray([vocabulary.encode('op')]))
  assert int(jnp.argmax(found[0])) == vocabulary.encode('e')[0]

  (tmp_path / 'empty.txt').write_text('\n\n', encoding='utf-8')
  for arguments, named in [
      (['build', f'--corpus={tmp_path / "empty.txt"}', '--vocabulary=bytes',
        f'--output={tmp_path / "x.npz"}'], 'expected at least one text'),
      ([*build[:-1], '--order=0', f'--output={tmp_path / "x.npz"}'], 'order: expected at least 1'),
      ([*build, f'--output={tmp_path / "x.txt"}'], 'ending in .npz'),
      (['build', '--corpus=/none', '--vocabulary=bytes', '--output=x.npz'],
       'input file: expected one at /none, found none'),
  ]:
    assert ngram.main(arguments) == 2
    error = capsys.readouterr().err
    assert named in error and error.count('\n') == 1
  assert not (tmp_path / 'x.npz').exists()
  with pytest.raises(UserError, match='corpus: expected tokens below 5'):
    ngram.build([[7, 1]], 5, 2)


@pytest.mark.parametrize('settings, named', [
    ({'name': 'guess'},
     'drafter: expected one of model, copying, ngram, mixed, cascade, found guess'),
    ({'cascade': 'model'}, 'cascade: expected one of copying, ngram, found model'),
    ({'min_confidence': 1.0}, r'min_confidence: expected a number in \[0, 1\), found 1.0'),
    ({'name': 'copying', 'min_confidence': 0.5},
     r'min_confidence: expected 0 with the drafter copying \(model and mixed take it\), found 0.5'),
    ({'cascade_gamma': 0}, 'cascade_gamma: expected at least 1, found 0'),
])
def test_settings_out_of_range_are_named(settings, named):
  with pytest.raises(UserError, match=named):
    DrafterConfig(**settings)


@pytest.mark.parametrize('config, parts', [
    (DrafterConfig(), (True, False)), (DrafterConfig('copying'), (False, False)),
    (DrafterConfig('ngram'), (False, True)), (DrafterConfig('mixed'), (True, False)),
    (DrafterConfig('cascade'), (True, False)),
    (DrafterConfig('cascade', cascade='ngram'), (True, True)),
])
def test_missing_parts_are_named(config, parts):
  given = [object() if part else None for part in parts]
  config.check_parts(*given)
  for index, name in enumerate(('draft: expected a model', 'ngram_table: expected one')):
    if parts[index]:
      with pytest.raises(UserError, match=f'{name} for the drafter {config.name!r}, found None'):
        config.check_parts(*[None if i == index else part for i, part in enumerate(given)])
