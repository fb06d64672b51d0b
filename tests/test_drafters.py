"""Drafters beyond a second model."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import toy
from speculative_t5x import decoding, ngram, vocabularies
from speculative_t5x.drafters import CopyingDrafter, ModelDrafter, NgramDrafter, check_drafter
from speculative_t5x.drafters.ngram import law
from speculative_t5x.errors import UserError
from speculative_t5x.sampling import SamplingRule

# Each distribution test rejects a correct program with this probability.
ERROR_RATE = 1e-4


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


def decode(target, *, gamma, rule, batch, length, inputs=None, drafter=None, state=None):
  slots = decoding.cache_slots(length, gamma)
  prompts = jnp.zeros((batch, length), jnp.int32) if inputs is None else jnp.asarray(inputs)
  run = functools.partial(
      decoding.speculative_decode, prompts, target.cache(batch, slots), target, toy.EOS,
      gamma=gamma, drafter=drafter, draft_state=state, rule=rule, decode_rng=jax.random.key(1))
  return jax.jit(run)()


@pytest.mark.parametrize('gamma', [1, 3])
@pytest.mark.parametrize('rule', [SamplingRule(1.0), SamplingRule(0.8, topk=3)], ids=str)
def test_copied_samples_follow_the_target(gamma, rule):
  target, batch = toy.Toy(4, 1), 120_000
  # Inputs that differ by row, some without any match.
  context = np.random.default_rng(0).integers(0, 4, (batch, 6)).astype(np.int32)
  result = decode(target, gamma=gamma, rule=rule, batch=batch, length=3,
                  drafter=CopyingDrafter(), state=jnp.asarray(context))
  statistic, freedom = toy.chi_square(
      np.asarray(result.sequences[:, 0]), target.exact(3, rule))
  assert scipy.stats.chi2.sf(statistic, freedom) > ERROR_RATE
  assert np.any(result.statistics.accepted) and np.any(result.statistics.rejected)


@pytest.mark.parametrize('gamma', [1, 4])
def test_copied_greedy_outputs_equal_plain_ones(gamma):
  target = toy.Toy(6, 3, scale=3)
  rng = np.random.default_rng(0)
  inputs = np.zeros((20, 24), np.int32)
  inputs[:, 1:4] = rng.integers(2, 6, (20, 3))
  context = jnp.asarray(rng.integers(0, 6, (20, 5)), jnp.int32)
  run = functools.partial(decode, target, rule=SamplingRule(), batch=20, length=24, inputs=inputs)
  plain = run(gamma=0)
  fast = run(gamma=gamma, drafter=CopyingDrafter(), state=context)
  np.testing.assert_array_equal(plain.sequences, fast.sequences)
  assert np.sum(fast.statistics.accepted) > 0
  # A ragged batch: every row copies as it does alone.
  alone = decode(target, gamma=gamma, rule=SamplingRule(), batch=1, length=24, inputs=inputs[3:4],
                 drafter=CopyingDrafter(), state=context[3:4])
  np.testing.assert_array_equal(
      alone.statistics.accepted_at_position[0], fast.statistics.accepted_at_position[3])


def test_drafters_are_interchangeable_at_the_same_randomness():
  """Which drafter guesses does not change greedy outputs."""
  target, draft = toy.Toy(6, 3, scale=3), toy.Toy(6, 4, scale=3)
  copying = decode(target, gamma=3, rule=SamplingRule(), batch=2, length=12,
                   drafter=CopyingDrafter(), state=jnp.zeros((2, 0), jnp.int32))
  model = decode(target, gamma=3, rule=SamplingRule(), batch=2, length=12,
                 drafter=ModelDrafter(draft, SamplingRule()), state=draft.cache(2, 16))
  np.testing.assert_array_equal(copying.sequences, model.sequences)


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


@pytest.mark.parametrize('order', [1, 2, 3])
@pytest.mark.parametrize('rule', [SamplingRule(1.0), SamplingRule(0.7, topk=2)], ids=str)
def test_ngram_samples_follow_the_target(order, rule):
  target, batch = toy.Toy(4, 1), 120_000
  texts = np.random.default_rng(0).integers(1, 4, (50, 4)).tolist()
  table = jax.tree.map(jnp.asarray, ngram.build(texts, 4, order))
  result = decode(target, gamma=2, rule=rule, batch=batch, length=3,
                  drafter=NgramDrafter(table, rule))
  statistic, freedom = toy.chi_square(np.asarray(result.sequences[:, 0]), target.exact(3, rule))
  assert scipy.stats.chi2.sf(statistic, freedom) > ERROR_RATE


def test_ngram_drafts_of_a_deterministic_text_are_all_accepted():
  # The target counts 2, 3, 4, …; a bigram table of such a text knows as much.
  vocab = 12
  logits = np.full((vocab, vocab, vocab), -20.0)
  for token in range(vocab):
    logits[:, token, token + 1 if 1 < token < vocab - 1 else (2 if token == 0 else 1)] = 0
  target = toy.Toy(vocab, 0, table=logits)
  table = ngram.build([[*range(2, vocab), 1]], vocab, 2)
  result = decode(target, gamma=4, rule=SamplingRule(), batch=1, length=vocab,
                  drafter=NgramDrafter(jax.tree.map(jnp.asarray, table), SamplingRule()))
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


def test_unknown_drafters_are_named():
  with pytest.raises(UserError, match='expected one of model, copying, ngram, found guess'):
    check_drafter('guess')
