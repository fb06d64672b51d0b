"""Speculative beam search against a plain one: found sequences, scores, pace, counts, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy
from speculative_t5x import beams, decoding
from speculative_t5x.beams import BeamModel
from speculative_t5x.errors import UserError

NEG_INF = np.float32(-1e7)

# Nearly all the time of these tests is compilation.
jit = functools.partial(jax.jit, compiler_options={
    'xla_backend_optimization_level': 0, 'xla_cpu_use_fusion_emitters': False})


class Toys:
  """A toy model of its own for each example of a batch."""

  def __init__(self, vocab_size, seeds, scale=1.5, tables=None):
    if tables is None:
      tables = [toy.Toy(vocab_size, seed, scale).table for seed in seeds]
    self.tables = np.stack(tables)
    self.vocab_size = vocab_size

  def cache(self, rows, slots, prompts=None):
    """Caches of `rows` rows an example, filled with what must never be read, or with prompts."""
    batch = len(self.tables)
    tokens = np.full((batch, slots), self.vocab_size - 1, np.int32)
    if prompts is not None:
      tokens[:, : prompts.shape[1]] = prompts
    return {'tokens': jnp.asarray(tokens.repeat(rows, 0)),
            'example': jnp.arange(batch).repeat(rows)}

  def __call__(self, tokens, positions, cache):
    """The decode step."""
    return toy.step_of_each(self.tables, tokens, positions, cache)

  def mixed_with(self, other, share):
    """Toys that are in part like `other`."""
    return Toys(self.vocab_size, None,
                tables=(1 - share) * self.tables + share * other.tables)


def plain(table, prompt, width, *, length=None, alpha=0.6, max_decode_step=-1,
          min_log_prob=NEG_INF, initial_index=None):
  """T5X's beam search of one example, hypothesis by hypothesis.

  Returns:
    Sequences `[W, L]` and scores `[W]`.
  """
  length = len(prompt) if length is None else length
  # Next to NEG_INF the rounding of float32 decides.
  penalty = lambda n: np.float32(((5 + n) / 6) ** alpha)
  best_of = lambda hypotheses: sorted(hypotheses, key=lambda x: -x[0])[:width]
  first = 0 if initial_index is None else initial_index
  known = [0, *map(int, prompt[1:])][: first + 1]
  forced = [0] * len(prompt) if initial_index is not None else [0, *map(int, prompt[1:])]
  limit = length - first
  if max_decode_step > 0:
    limit = min(limit, max_decode_step)
  live = [(np.float32(0.0), known)] + [(NEG_INF, known)] * (width - 1)
  nothing = [0] if initial_index is None else known
  finished = [(NEG_INF, nothing, False)] * width
  steps = 0
  while steps < limit:
    best = max(score for score, _ in live) / penalty(length + 1)
    if all(is_real and score > best for score, _, is_real in finished):
      break
    if steps and best < min_log_prob / penalty(length + 1):
      break
    candidates = []
    for score, tokens in live:
      logits = table[tokens[-2] if len(tokens) > 1 else 0, tokens[-1]]
      log_probs = logits - np.log(np.sum(np.exp(logits)))
      candidates += [(score + lp, [*tokens, token]) for token, lp in enumerate(log_probs)]
    candidates = sorted(candidates, key=lambda x: -x[0])[: 2 * width]
    token = forced[min(steps + 1, len(forced) - 1)]
    if token:
      candidates = [(NEG_INF if i else np.float32(0.0), [*tokens[:-1], token])
                    for i, (_, tokens) in enumerate(candidates)]
    steps += 1
    has_ended = lambda tokens: tokens[-1] == toy.EOS
    live = best_of([(score + NEG_INF * has_ended(tokens), tokens) for score, tokens in candidates])
    finished = best_of(finished + [
        (score / penalty(first + steps) + NEG_INF * (not has_ended(tokens)), tokens,
         has_ended(tokens)) for score, tokens in candidates])
  found = finished if any(is_real for *_, is_real in finished) else live
  sequences = np.zeros((width, length), int)
  for row, (_, tokens, *_) in zip(sequences, found[::-1], strict=True):
    tokens = tokens[1 : length + 1]
    row[: len(tokens)] = tokens
  return sequences, np.array([score for score, *_ in found[::-1]])


def search(target, draft, inputs, width, *, gamma, draft_width=None, target_rows=None, **kwargs):
  """Runs the loop on toys."""
  rows = beams.rows_of_calls(width, gamma, draft_width, target_rows)
  inputs = np.asarray(inputs, np.int32)
  slots = decoding.cache_slots(inputs.shape[1], gamma)
  prompts = None if kwargs.get('initial_index') is None else inputs
  model = lambda toys, rows: BeamModel(toys, toys.cache(rows, slots, prompts))
  return jit(lambda: beams.speculative_beam_search(
      jnp.asarray(inputs), model(target, rows.target), toy.EOS, gamma=gamma,
      draft=model(draft, rows.draft) if gamma else None, num_decodes=width,
      draft_width=draft_width, target_rows=target_rows, **kwargs))()


def assert_plain(result, target, inputs, width, **kwargs):
  """Holds what was found to the plain search, example by example."""
  first = kwargs.pop('initial_index', None)
  for example, table in enumerate(target.tables):
    sequences, scores = plain(
        table, inputs[example], width,
        initial_index=None if first is None else int(first[example]), **kwargs)
    np.testing.assert_array_equal(result.sequences[example], sequences)
    np.testing.assert_allclose(result.scores[example], scores, atol=1e-4, rtol=1e-6)


def no_prompts(batch, length):
  return np.zeros((batch, length), np.int32)


BATCH = 12
# Vocabulary, width, draft width, gamma, length.
SIZES = [
    (3, 1, 1, 1, 5), (3, 2, 4, 2, 9), (4, 2, 2, 3, 8), (4, 4, 9, 2, 10), (6, 3, 6, 4, 12),
    (9, 4, 8, 3, 12), (9, 5, 12, 1, 3), (20, 2, 7, 6, 14), (30, 4, 8, 2, 10),
]


@pytest.mark.parametrize('vocab_size, width, draft_width, gamma, length', SIZES)
def test_finds_what_a_plain_search_finds(vocab_size, width, draft_width, gamma, length):
  target = Toys(vocab_size, range(BATCH))
  # From a draft that knows nothing to one that is the target.
  shares = np.linspace(0, 1, BATCH)[:, None, None, None]
  draft = Toys(vocab_size, range(100, 100 + BATCH)).mixed_with(target, shares)
  inputs = no_prompts(BATCH, length)
  result = search(target, draft, inputs, width, gamma=gamma, draft_width=draft_width)
  assert_plain(result, target, inputs, width)
  assert np.isfinite(result.scores).all()


@pytest.fixture(scope='module')
def pair():
  """A target with an end that comes sooner in some examples than in others, and a fair draft."""
  target = Toys(8, range(BATCH), scale=2.0)
  target.tables[..., toy.EOS] += np.linspace(-3, 3, BATCH)[:, None, None]
  return target, Toys(8, range(50, 50 + BATCH), scale=2.0).mixed_with(target, 0.8)


@pytest.fixture(scope='module')
def found(pair):
  """What the pair finds in 16 tokens with 3 beams."""
  return search(*pair, no_prompts(BATCH, 16), 3, gamma=3, draft_width=8)


def test_examples_go_at_their_own_pace(pair, found):
  assert_plain(found, pair[0], no_prompts(BATCH, 16), 3)
  emitted = np.asarray(found.statistics.emitted[:, 0])
  rounds = np.asarray(found.statistics.rounds[:, 0])
  assert len({*emitted}) > 3 and len({*rounds}) > 3
  per_call = emitted / rounds
  assert per_call.max() > 1.2 * per_call.min() and per_call.mean() > 1.5


def test_an_example_alone_is_found_likewise(pair, found):
  target, draft = pair
  for example in (0, 7):
    one = lambda toys, i=example: Toys(8, None, tables=toys.tables[i : i + 1])
    alone = search(one(target), one(draft), no_prompts(1, 16), 3, gamma=3, draft_width=8)
    np.testing.assert_array_equal(alone.sequences[0], found.sequences[example])
    np.testing.assert_allclose(alone.scores[0], found.scores[example], atol=1e-5)
    jax.tree.map(lambda x, y, i=example: np.testing.assert_array_equal(x[0], y[i]),
                 alone.statistics, found.statistics)


@pytest.mark.parametrize('target_rows', [3, 5, 8, 40])
def test_fewer_rows_of_the_target_accept_less_and_find_the_same(pair, found, target_rows):
  result = search(*pair, no_prompts(BATCH, 16), 3, gamma=3, draft_width=8,
                  target_rows=target_rows)
  np.testing.assert_array_equal(result.sequences, found.sequences)
  np.testing.assert_allclose(result.scores, found.scores, atol=1e-5)
  accepted = lambda result: int(np.sum(result.statistics.accepted))
  if target_rows < 9:
    assert accepted(result) < accepted(found)
  else:
    assert accepted(found) <= accepted(result) <= 1.2 * accepted(found)


@pytest.mark.parametrize('options', [
    {'alpha': 0.0}, {'alpha': 1.0}, {'alpha': 3.0}, {'max_decode_len': 5},
    {'max_decode_step': 4}, {'min_log_prob': -4.0}, {'alpha': 0.3, 'min_log_prob': -9.0},
], ids=str)
def test_rules_of_the_search(pair, options):
  target, draft = pair
  result = search(target, draft, no_prompts(BATCH, 12), 3, gamma=2, **options)
  names = {'max_decode_len': 'length'}
  assert_plain(result, target, no_prompts(BATCH, 12), 3,
               **{names.get(name, name): value for name, value in options.items()})


def prompts_of(length, *, gap=False):
  """Prompts of 0, 1, 2, … tokens."""
  prompts = np.random.default_rng(0).integers(2, 8, (BATCH, length)).astype(np.int32)
  prompts *= np.arange(length) <= np.arange(BATCH)[:, None] % (length // 2)
  prompts[:, 0] = 0
  if gap:
    prompts[:, length // 2 + 1] = 5
  return prompts


@pytest.mark.parametrize('gap', [False, True])
@pytest.mark.parametrize('gamma', [0, 1, 4])
def test_prompts_are_kept(pair, gamma, gap):
  target, draft = pair
  inputs = prompts_of(12, gap=gap)
  result = search(target, draft, inputs, 3, gamma=gamma)
  assert_plain(result, target, inputs, 3)


def test_a_prompt_up_to_the_end_or_with_an_end(pair):
  target, draft = pair
  inputs = prompts_of(10)
  inputs[0, 1:], inputs[5, 2], inputs[11, 5] = 4, toy.EOS, toy.EOS
  result = search(target, draft, inputs, 3, gamma=3)
  assert_plain(result, target, inputs, 3)


@pytest.mark.parametrize('gamma', [0, 3])
def test_prompts_that_the_caches_hold(pair, gamma):
  target, draft = pair
  inputs = prompts_of(12)
  first = np.sum(inputs != 0, axis=1)
  assert first.min() == 0 and first.max() == 5
  result = search(target, draft, inputs, 3, gamma=gamma, initial_index=first)
  assert_plain(result, target, inputs, 3, initial_index=first)
  # Forced one by one they lead to the same, as their length counts either way.
  forced = search(target, draft, inputs, 3, gamma=gamma)
  is_real = np.asarray(result.scores) > -1e6
  assert is_real.mean() > 0.9
  np.testing.assert_array_equal(result.sequences[is_real], forced.sequences[is_real])


def test_no_length_is_exceeded(pair):
  target, draft = pair
  for length in (1, 3):
    inputs = no_prompts(BATCH, length)
    result = search(target, draft, inputs, 2, gamma=5)
    assert result.sequences.shape == (BATCH, 2, length)
    assert (np.asarray(result.statistics.emitted) <= length).all()
    assert_plain(result, target, inputs, 2)


def test_a_draft_wide_enough_is_never_refused(pair):
  target, draft = pair
  # Every continuation of every beam is a node.
  for width, gamma in ((2, 1), (1, 2)):
    result = search(target, draft, no_prompts(BATCH, 9), width, gamma=gamma,
                    draft_width=width * 8**gamma, target_rows=width * 8**gamma * (gamma + 1))
    statistics = jax.tree.map(np.asarray, result.statistics)
    assert not statistics.rejected.any()
    np.testing.assert_array_equal(statistics.rounds, -(-statistics.emitted // (gamma + 1)))
    assert_plain(result, target, no_prompts(BATCH, 9), width)


def test_the_target_as_its_own_draft_is_seldom_refused(pair):
  target, _ = pair
  result = search(target, target, no_prompts(BATCH, 16), 3, gamma=4, draft_width=6,
                  target_rows=99)
  statistics = jax.tree.map(np.asarray, result.statistics)
  # The draft never stops for hypotheses that ended.
  assert not statistics.rejected.any()


def test_the_draft_itself_is_always_refused_when_it_is_opposed(pair):
  target, _ = pair
  opposed = Toys(8, None, tables=-10 * target.tables)
  result = search(target, opposed, no_prompts(BATCH, 8), 3, gamma=2, draft_width=3)
  statistics = jax.tree.map(np.asarray, result.statistics)
  assert statistics.accepted.sum() < 0.1 * statistics.emitted.sum()
  assert_plain(result, target, no_prompts(BATCH, 8), 3)


def test_statistics(pair, found):
  statistics = jax.tree.map(np.asarray, found.statistics)
  assert statistics.rounds.shape == (BATCH, 3)
  assert statistics.accepted_at_position.shape == (BATCH, 3, 3)
  for values in (statistics.rounds, statistics.drafted, statistics.accepted, statistics.emitted):
    np.testing.assert_array_equal(values, values[:, :1].repeat(3, 1))
  np.testing.assert_array_equal(statistics.accepted_at_position.sum(-1), statistics.accepted)
  # A round takes one step more than were accepted, unless the search ends with an accepted one.
  behind = statistics.rounds + statistics.accepted - statistics.emitted
  assert ((behind == 0) | (behind == 1)).all() and (statistics.drafted >= statistics.accepted).all()
  none = search(*pair, no_prompts(BATCH, 16), 3, gamma=0).statistics
  np.testing.assert_array_equal(none.rounds, none.emitted)
  np.testing.assert_array_equal(none.emitted, statistics.emitted)
  assert none.accepted_at_position.shape == (BATCH, 3, 0)
  prompted = search(*pair, prompts_of(16), 3, gamma=3).statistics
  lengths = np.sum(prompts_of(16) != 0, axis=1)
  assert (np.asarray(prompted.emitted[:, 0]) <= 16 - lengths).all()


class Mutations:
  """Faults of the loop. Each must lead to other sequences."""

  @staticmethod
  def accepts_beams_that_are_no_nodes(monkeypatch):
    monkeypatch.setattr(beams, 'are_nodes', lambda is_node: jnp.ones(len(is_node), bool))

  @staticmethod
  def accepts_if_one_beam_is_a_node(monkeypatch):
    monkeypatch.setattr(beams, 'are_nodes', lambda is_node: jnp.any(is_node, axis=1))

  @staticmethod
  def leaves_rows_where_they_are(monkeypatch):
    monkeypatch.setitem(globals(), 'BeamModel', functools.partial(
        BeamModel, gather_rows=lambda cache, rows: cache))


@pytest.mark.parametrize('mutation', [name for name in vars(Mutations) if name[0] != '_'])
def test_faults_show(pair, found, monkeypatch, mutation):
  getattr(Mutations, mutation)(monkeypatch)
  result = search(*pair, no_prompts(BATCH, 16), 3, gamma=3, draft_width=8)
  differs = (np.asarray(result.sequences) != found.sequences).any(axis=(1, 2))
  assert differs.any()


@pytest.mark.parametrize('options, message', [
    ({'gamma': -1}, 'gamma: expected at least 0, found -1'),
    ({'draft': None}, 'draft: expected one for gamma 2, found None'),
    ({'draft_width': 2}, 'draft_width: expected at least num_decodes 3, found 2'),
    ({'target_rows': 2}, 'target_rows: expected at least num_decodes 3, found 2'),
    ({'num_decodes': 0}, 'num_decodes: expected at least 1, found 0'),
    ({'num_decodes': 9}, 'num_decodes: expected at most 8 (the vocabulary), found 9'),
    ({'max_decode_len': 0}, 'max_decode_len: expected 1 to 6 (the length), found 0'),
    ({'max_decode_len': 7}, 'max_decode_len: expected 1 to 6 (the length), found 7'),
], ids=str)
def test_bad_values(pair, options, message):
  target, draft = pair
  options = {'gamma': 2, 'num_decodes': 3, **options}
  model = lambda toys, rows: BeamModel(toys, toys.cache(rows, 20))
  if 'draft' not in options:
    options['draft'] = model(draft, options.get('draft_width') or 2 * options['num_decodes'])
  # Rows of the default.
  rows = 3 * options['num_decodes']
  with pytest.raises(UserError) as error:
    beams.speculative_beam_search(
        no_prompts(BATCH, 6), model(target, rows), toy.EOS, **options)
  assert str(error.value) == message


def test_vocabularies_of_different_sizes(pair):
  target = pair[0]
  other = Toys(7, range(BATCH))
  with pytest.raises(UserError) as error:
    search(target, other, no_prompts(BATCH, 6), 3, gamma=2)
  assert str(error.value) == "draft vocabulary: expected the target's 8 tokens, found 7"
  one = Toys(1, range(BATCH))
  with pytest.raises(UserError) as error:
    search(one, one, no_prompts(BATCH, 6), 1, gamma=0)
  assert str(error.value) == 'vocabulary: expected at least 2 tokens, found 1'
