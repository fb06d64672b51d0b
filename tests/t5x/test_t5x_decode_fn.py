"""The decode function held to T5X's `temperature_sample`, case by case and in distribution.

Skipped where T5X is not installed.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import seqio
from jax.experimental import io_callback

import toy
from speculative_t5x import decoding as core_decoding
from speculative_t5x import verification
from speculative_t5x.drafters import DrafterConfig
from speculative_t5x.errors import UserError

# Submodules: this folder itself would pass for a package `t5x` without T5X.
REASON = 'needs T5X, which is not on PyPI'
models = pytest.importorskip('t5x.models', reason=REASON)
t5x_decoding = pytest.importorskip('t5x.decoding', reason=REASON)
t5_network = pytest.importorskip('t5x.examples.t5.network', reason=REASON)
scalable_network = pytest.importorskip('t5x.examples.scalable_t5.network', reason=REASON)

from speculative_t5x.t5x_integration.adapters import DecodingModel  # noqa: E402 - imports T5X
from speculative_t5x.t5x_integration.decoding import speculative_decode  # noqa: E402 - likewise
from speculative_t5x.t5x_integration.drafts import Draft  # noqa: E402 - likewise
from speculative_t5x.t5x_integration.model import SpeculativeModel  # noqa: E402 - likewise

EOS = 1
NEVER = -1e7  # A logit whose probability is exactly 0.
GAMMAS = pytest.mark.parametrize('gamma', [0, 1, 4])

# Each distribution test rejects a correct program with this probability.
ERROR_RATE = 1e-4

# Nearly all the time of these tests is compilation.
jit = functools.partial(jax.jit, compiler_options={
    'xla_backend_optimization_level': 0, 'xla_cpu_use_fusion_emitters': False})


def scripted(logits):
  """A decode step with logits `[B, V]`, or `[B, L, V]` by place, whatever it is given."""
  logits = np.asarray(logits, np.float32)

  def step(tokens, positions, cache):
    places = positions[:, None] + jnp.arange(tokens.shape[1])
    if logits.ndim == 2:
      return jnp.broadcast_to(logits[:, None], (*places.shape, logits.shape[-1])), cache
    rows = jnp.arange(len(logits))[:, None]
    return jnp.asarray(logits)[rows, jnp.minimum(places, logits.shape[1] - 1)], cache

  return step


def distracted(step):
  """A draft that is right at some places and wrong at others, with certainty."""
  def draft(tokens, positions, cache):
    logits, cache = step(tokens, positions, cache)
    places = positions[:, None] + jnp.arange(tokens.shape[1])
    wrong = (places % 3 == 1)[..., None]
    return jnp.where(wrong, jnp.roll(logits, 1, axis=-1), logits), cache

  return draft


def model_draft(step, cache):
  """What drafts with a model of this step."""
  return Draft(DrafterConfig(), jnp.zeros((1, 0), jnp.int32), DecodingModel(step, cache))


def decode(step, inputs, *, gamma, draft=None, cache=None, **kwargs):
  """`speculative_decode` with a draft that differs from the target, unless one is given."""
  cache = {} if cache is None else cache
  model = model_draft(draft or distracted(step), cache) if gamma else None
  return speculative_decode(
      jnp.asarray(inputs), cache, step, EOS, draft=model, gamma=gamma, **kwargs)


def ours(*args, **kwargs):
  """`decode` as one program."""
  return jit(lambda: decode(*args, **kwargs))()


def theirs(step, inputs, cache=None, **kwargs):
  """`temperature_sample` on the same step, one token a call."""
  def tokens_to_logits(state):
    logits, cache = step(state.cur_token, state.cur_index, state.cache)
    return logits[:, 0], cache

  kwargs = {'topk': 0, **kwargs}
  return jit(lambda: t5x_decoding.temperature_sample(
      jnp.asarray(inputs), {} if cache is None else cache, tokens_to_logits, EOS, **kwargs))()


def certain(*favourites, size=10):
  """Logits `[B, V]` under which each row has one token with certainty."""
  return np.where(np.arange(size) == np.array(favourites)[:, None], 0.0, NEVER)


@dataclasses.dataclass(frozen=True)
class Case:
  """Something whose outcome is certain.

  Attributes:
    inputs: prompts `[batch, L]`.
    logits: the target's, see `scripted`.
    sequences: what comes out, `[batch, L]` or `[batch, N, L]`.
    scores: `[batch]` or `[batch, N]`; None is 0.
    options: of both decode functions.
  """

  inputs: Any
  logits: Any
  sequences: Any
  scores: Any = None
  options: Any = dataclasses.field(default_factory=dict)


STEPS = [[0, 2, 0, 0, 0, 0, 0, 0], [0, 2, 2, 0, 0, 0, 0, 0]]
FOUR_MORE = [[2, 3, 3, 3, 3, 0, 0, 0], [2, 2, 3, 3, 3, 3, 0, 0]]
# Probabilities .3, 0, .1 and .6.
UNEVEN = [-1.2, NEVER, -2.3, -0.51]


def with_favourite(token, log_prob, size=10):
  """Logits `[V]` of a token with this log-probability; the others share the rest."""
  rest = np.log((1 - np.exp(log_prob)) / (size - 1))
  return np.where(np.arange(size) == token, log_prob, rest)


# A row for each of three decodes of two examples; scores are not in their order.
DECODES = np.array([
    with_favourite(4, -1.15), with_favourite(5, -0.65), with_favourite(3, -1.8),
    with_favourite(5, -0.5), with_favourite(3, -2.0), with_favourite(4, -1.9),
])


def places(*rows, size=10):
  """Certain logits `[B, L, V]`, token by token."""
  return np.stack([certain(*row, size=size) for row in rows])


CASES = {
    'uneven prefix': Case(
        [[0, 5, 7, 1, 0, 0], [0, 6, 1, 0, 0, 0]], certain(2, 3),
        [[5, 7, 1, 2, 2, 2], [6, 1, 3, 3, 3, 3]], options={'initial_index': [3, 2]}),
    'no prefix': Case(np.zeros((2, 3)), certain(2, 3), [[2, 2, 2], [3, 3, 3]]),
    'prefix': Case(
        [[0, 5, 6, 7, 0], [0, 8, 9, 0, 0]], certain(2, 3), [[5, 6, 7, 2, 2], [8, 9, 3, 3, 3]]),
    'prefix that ends with EOS': Case(
        [[0, 5, 6, 1, 0], [0, 8, 1, 0, 0]], certain(2, 3), [[5, 6, 1, 2, 2], [8, 1, 3, 3, 3]],
        options={'topk': 1}),
    'prefix that ends with EOS, early stop': Case(
        [[0, 5, 1, 0, 0, 0, 0], [0, 8, 0, 0, 0, 0, 0]],
        places([2, 2, 2, 2, 1, 2, 2], [3, 3, 3, 1, 3, 3, 3]),
        [[5, 1, 2, 2, 1, 0, 0], [8, 3, 3, 1, 0, 0, 0]]),
    'zero temperature with near ties': Case(
        np.zeros((2, 3)), [[1700.47, 1700.48, 1700.51, 1700.45], [3.2, 4.8, -5.3, 5.6]],
        [[2, 2, 2], [3, 3, 3]], options={'temperature': 0.0, 'topk': 4}),
    'max_decode_steps': Case(
        STEPS, certain(3, 3), FOUR_MORE, options={'topk': 4, 'max_decode_steps': 4}),
    'max_decode_steps behind prefilled prompts': Case(
        STEPS, certain(3, 3), FOUR_MORE,
        options={'topk': 4, 'max_decode_steps': 4, 'initial_index': [1, 2]}),
    'max_decode_steps in the midst of a prompt': Case(
        STEPS, certain(3, 3), FOUR_MORE,
        options={'topk': 4, 'max_decode_steps': 4, 'initial_index': [1, 1]}),
    'max_decode_steps and the longest length': Case(
        [STEPS[0], [0, 2, 2, 2, 2, 2, 2, 0], [0, 2, 2, 2, 0, 0, 0, 0]], certain(3, 3, 3),
        [FOUR_MORE[0], [2, 2, 2, 2, 2, 2, 3, 3], [2, 2, 2, 3, 3, 3, 3, 0]],
        options={'topk': 4, 'max_decode_steps': 4, 'initial_index': [1, 6, 0]}),
    'max_decode_steps, the fourth example of the docstring': Case(
        [[0, 2, 0, 0, 0, 0, 0, 0], [0, 3, 4, 0, 0, 0, 0, 0]], certain(2, 3),
        [[2, 2, 2, 0, 0, 0, 0, 0], [3, 4, 3, 3, 0, 0, 0, 0]],
        options={'topk': 4, 'max_decode_steps': 2, 'initial_index': [1, 2]}),
    'max_decode_steps_hard_limit': Case(
        STEPS, certain(3, 3), FOUR_MORE,
        options={'topk': 4, 'max_decode_steps': 10, 'max_decode_steps_hard_limit': 4}),
    'max_decode_steps_hard_limit of 0, which is none': Case(
        STEPS, certain(3, 3), FOUR_MORE,
        options={'topk': 4, 'max_decode_steps': 4, 'max_decode_steps_hard_limit': 0}),
    'topp': Case(np.zeros((1, 20)), [UNEVEN], [[3] * 20], options={'topp': 0.55}),
    'topp after the temperature': Case(
        np.zeros((1, 20)), [UNEVEN], [[3] * 20], options={'temperature': 0.8, 'topp': 0.63}),
    'a temperature for each example': Case(
        np.zeros((4, 20)),
        np.repeat([UNEVEN, np.roll(UNEVEN, 1), [-1.2, NEVER, -0.51, -2.3],
                   [-1.2, -0.51, NEVER, -2.3]], 2, axis=0),
        np.repeat([[[3] * 20], [[0] * 20], [[2] * 20], [[1] + [0] * 19]], 2, axis=1),
        np.zeros((4, 2)),
        {'temperature': np.float32([0.5, 0, 0.3, 0.2]), 'topp': 0.63, 'num_decodes': 2}),
    'greedy log-probabilities, rescaled': Case(
        [[0, 2, 2, 2, 0]], [[NEVER, NEVER, np.log(0.6), np.log(0.4)]], [[2, 2, 2, 2, 2]],
        options={'topk': 1, 'rescale_log_probs': True}),
    'greedy log-probabilities': Case(
        [[0, 2, 2, 3, 0]], [[NEVER, NEVER, np.log(0.6), np.log(0.4)]], [[2, 2, 3, 2, 2]],
        [2 * np.log(0.6)], options={'topk': 1, 'rescale_log_probs': False}),
    'greedy log-probabilities at temperature 0': Case(
        [[0, 2, 2, 3, 0]], [[NEVER, NEVER, np.log(0.6), np.log(0.4)]], [[2, 2, 3, 2, 2]],
        [2 * np.log(0.6)], options={'temperature': 0.0, 'rescale_log_probs': False}),
    'decodes in the order of their scores': Case(
        [[0, 5, 1, 0, 0], [0, 8, 7, 0, 0]], DECODES,
        [[[5, 1, 3, 3, 3], [5, 1, 4, 4, 4], [5, 1, 5, 5, 5]],
         [[8, 7, 3, 3, 3], [8, 7, 4, 4, 4], [8, 7, 5, 5, 5]]],
        3 * np.array([[-1.8, -1.15, -0.65], [-2.0, -1.9, -0.5]]),
        {'num_decodes': 3, 'temperature': 0.0, 'rescale_log_probs': False}),
    'decodes behind prefilled prompts': Case(
        [[0, 5, 1, 0, 0], [0, 8, 7, 0, 0]], DECODES,
        [[[5, 1, 3, 3, 3], [5, 1, 4, 4, 4], [5, 1, 5, 5, 5]],
         [[8, 7, 3, 3, 3], [8, 7, 4, 4, 4], [8, 7, 5, 5, 5]]],
        3 * np.array([[-1.8, -1.15, -0.65], [-2.0, -1.9, -0.5]]),
        {'num_decodes': 3, 'temperature': 0.0, 'rescale_log_probs': False,
         'initial_index': [1, 2]}),
}


def arguments(case):
  """Inputs and options as arrays."""
  options = dict(case.options)
  if 'initial_index' in options:
    options['initial_index'] = np.array(options['initial_index'], np.int32)
  return np.array(case.inputs, np.int32), options


@functools.cache
def case_by_t5x(name):
  inputs, options = arguments(CASES[name])
  return theirs(scripted(CASES[name].logits), inputs, **options)


@GAMMAS
@pytest.mark.parametrize('name', CASES)
def test_what_is_certain_is_as_in_t5x(name, gamma):
  case = CASES[name]
  inputs, options = arguments(case)
  result = ours(scripted(case.logits), inputs, gamma=gamma, **options)
  expected = np.array(case.sequences)
  if expected.ndim == 2:
    expected = expected[:, None]
  scores = np.zeros(expected.shape[:2]) if case.scores is None else np.array(case.scores)
  for sequences, found_scores in (case_by_t5x(name), (result.sequences, result.scores)):
    np.testing.assert_array_equal(sequences, expected)
    np.testing.assert_allclose(found_scores, scores.reshape(expected.shape[:2]), atol=1e-5, rtol=0)
  if gamma == 4 and 'temperature for each' not in name:
    # The draft was judged both ways, unless there are too few places for it.
    assert np.sum(result.statistics.rejected) > 0 or expected.shape[-1] < 6


@GAMMAS
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_prompt_tokens_beyond_the_logits_are_kept(temperature, gamma):
  """As in T5X, where nothing is looked up for a token of a prompt."""
  inputs = np.array([[0, 5, 6, 7, 0], [0, 8, 9, 0, 0]], np.int32)
  step = scripted(certain(2, 3, size=4))
  expected, _ = theirs(step, inputs, temperature=temperature)
  result = ours(step, inputs, gamma=gamma, temperature=temperature)
  np.testing.assert_array_equal(result.sequences, expected)
  np.testing.assert_array_equal(expected[:, 0], [[5, 6, 7, 2, 2], [8, 9, 3, 3, 3]])


# Greedy decoding of models with a cache.


def toy_step(model):
  """A toy model's decode step, its cache as T5X's decode functions take them."""
  def step(tokens, positions, cache):
    logits, tokens_seen = model(tokens, positions, cache['tokens'])
    return logits, {'tokens': tokens_seen}

  return step


SIZE = 8
TARGET = toy.Toy(SIZE, 1, scale=3)
# Rows of the table are the target's or not, so that drafts are judged both ways.
DRAFT = toy.Toy(SIZE, 2, table=np.where(
    np.random.default_rng(0).random((SIZE, SIZE, 1)) < 0.6, TARGET.table,
    toy.Toy(SIZE, 3, scale=3).table))


def toy_cache(batch, length, seen=None):
  """A cache, filled with tokens `seen` `[batch, P]` by a prefill."""
  cache = TARGET.cache(batch, core_decoding.cache_slots(length, 4))
  if seen is not None:
    cache = cache.at[:, : seen.shape[1]].set(seen)
  return {'tokens': cache}


GREEDY = {'temperature': 0.0, 'rescale_log_probs': False}
PROMPTS = np.array([[0, 2, 3, 2, 0, 0, 0, 0, 0], [0, 3, 0, 0, 0, 0, 0, 0, 0],
                    [0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 4, 1, 5, 2, 0, 0, 0, 0]], np.int32)


def assert_same(result, expected):
  """A result is what T5X has decoded."""
  np.testing.assert_array_equal(result.sequences, expected[0])
  np.testing.assert_allclose(result.scores, expected[1], atol=1e-4, rtol=0)


@GAMMAS
@pytest.mark.parametrize('options', [
    {}, {'num_decodes': 2}, {'max_decode_steps': 3}, {'max_decode_steps': 1, 'num_decodes': 2},
    {'initial_index': np.array([3, 1, 0, 2])},
    {'initial_index': np.array([2, 1, 0, 4]), 'num_decodes': 2, 'max_decode_steps': 4},
], ids=lambda options: ', '.join(options) or 'nothing')
def test_greedy_decoding_of_a_model_with_a_cache_is_t5xs(options, gamma):
  cache = toy_cache(4, 9, seen=PROMPTS if 'initial_index' in options else None)
  options = {**GREEDY, **options}
  expected = theirs(toy_step(TARGET), PROMPTS, cache, **options)
  result = ours(toy_step(TARGET), PROMPTS, gamma=gamma, cache=cache, draft=toy_step(DRAFT),
                **options)
  assert_same(result, expected)
  if gamma == 4 and 'max_decode_steps' not in options:
    assert np.sum(result.statistics.rejected) > 0 and np.sum(result.statistics.accepted) > 0


@pytest.mark.parametrize('rescale', [True, False])
def test_scores_of_sampled_text_are_its_log_probabilities(rescale):
  options = {'temperature': 0.8, 'topk': 3, 'rescale_log_probs': rescale, 'num_decodes': 5,
             'decode_rng': jax.random.PRNGKey(3)}
  inputs = np.tile(np.array([[0, 3, 1, 0, 0, 0, 0], [0, 2, 0, 0, 0, 0, 0]], np.int32), (2, 1))
  # The same for all decodes of an example, which come out sorted.
  logits = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32).repeat(5, 0)
  law = logits
  if rescale:
    law = np.where(logits < np.sort(logits)[:, 1:2], -np.inf, logits) / 0.8
  law = np.asarray(jax.nn.log_softmax(law)).reshape(4, 5, 4)
  is_prompt = np.pad(inputs, ((0, 0), (0, 1)))[:, None, 1:] != 0
  result = ours(scripted(logits), inputs, gamma=3, **options)
  for sequences, scores in ((result.sequences, result.scores),
                            theirs(scripted(logits), inputs, **options)):
    sequences = np.asarray(sequences)
    ends = (sequences == EOS) & ~is_prompt
    is_behind = np.cumsum(ends, axis=2) > ends
    log_probs = np.take_along_axis(law, sequences, axis=2)
    by_hand = np.where(is_behind | is_prompt, 0.0, log_probs).sum(axis=2)
    np.testing.assert_allclose(scores, by_hand, atol=1e-5, rtol=0)
    assert (np.diff(scores, axis=1) >= 0).all() and np.ptp(scores) > 0.5


# Callbacks.


def end_behind_3(state):
  """Puts EOS behind the first 3 of a row, on the host."""
  def on_the_host(index, sequences):
    sequences = np.array(sequences)
    for row, place in enumerate(np.asarray(index)):
      if sequences[row, place] == 3:
        sequences[row, place + 1] = EOS
    return sequences

  sequences = io_callback(
      on_the_host, jax.ShapeDtypeStruct(state.sequences.shape, state.sequences.dtype),
      state.cur_index, state.sequences)
  return state.replace(sequences=sequences)


@GAMMAS
def test_a_state_callback_sets_the_next_token(gamma):
  inputs = np.array([[0, 5, 6, 7, 0], [0, 8, 9, 0, 0]], np.int32)
  step, options = scripted(certain(3, 3)), {**GREEDY, 'state_callback_fn': end_behind_3}
  expected = theirs(step, inputs, **options)
  assert_same(ours(step, inputs, gamma=gamma, **options), expected)
  np.testing.assert_array_equal(expected[0][:, 0], [[5, 6, 7, 3, EOS], [8, 9, 3, EOS, 0]])


@GAMMAS
def test_a_state_callback_on_the_host_while_rows_end_apart(gamma):
  """No index that it is shown lies outside of the sequences."""
  inputs = np.array([[0, 5, 6, 7, 2, 2, 2, 4], [0, 8, 0, 0, 0, 0, 0, 0]], np.int32)
  step = scripted(places([2, 2, 2, 2, 2, 2, 2, 2], [4, 5, 6, 7, 8, 3, 4, 5]))
  options = {**GREEDY, 'state_callback_fn': end_behind_3}
  expected = theirs(step, inputs, **options)
  result = ours(step, inputs, gamma=gamma, **options)
  assert_same(result, expected)
  assert np.max(result.statistics.rounds) > 2
  np.testing.assert_array_equal(
      expected[0][:, 0], [[5, 6, 7, 2, 2, 2, 4, 2], [8, 5, 6, 7, 8, 3, EOS, 0]])


@GAMMAS
def test_a_state_callback_on_the_device(gamma):
  def state_callback_fn(state):
    """The token behind each even token but EOS is 7."""
    rows = jnp.arange(len(state.cur_index))
    last = state.sequences[rows, state.cur_index]
    following = state.sequences[rows, state.cur_index + 1]
    is_set = (last % 2 == 0) & (last > 0) & (following == 0)
    return state.replace(sequences=state.sequences.at[rows, state.cur_index + 1].set(
        jnp.where(is_set, 7, following)))

  options = {**GREEDY, 'state_callback_fn': state_callback_fn, 'num_decodes': 2}
  cache = toy_cache(4, 9)
  expected = theirs(toy_step(TARGET), PROMPTS, cache, **options)
  result = ours(toy_step(TARGET), PROMPTS, gamma=gamma, cache=cache, draft=toy_step(DRAFT),
                **options)
  assert 7 in np.asarray(expected[0])
  np.testing.assert_array_equal(result.sequences, expected[0])
  np.testing.assert_allclose(result.scores, expected[1], atol=1e-4, rtol=0)


@GAMMAS
def test_a_logit_callback_replaces_logits(gamma):
  logit_callback_fn = lambda logits, state: logits.at[0, 2].set(0.0).at[1, 3].set(0.0)
  inputs = np.array([[0, 5, 6, 7, 0], [0, 8, 9, 0, 0]], np.int32)
  # Before the callback, all tokens are equally likely.
  step = scripted(np.full((2, 10), NEVER))
  options = {'temperature': 0.0, 'logit_callback_fn': logit_callback_fn}
  expected = theirs(step, inputs, **options)
  assert_same(ours(step, inputs, gamma=gamma, **options), expected)
  np.testing.assert_array_equal(expected[0][:, 0], [[5, 6, 7, 2, 2], [8, 9, 3, 3, 3]])


def no_repetition(logits, state):
  """Forbids the last token, read from the sequences."""
  last = jnp.take_along_axis(state.sequences, state.cur_index[:, None], axis=1)
  return jnp.where(jax.nn.one_hot(last[:, 0], logits.shape[-1]) > 0, NEVER, logits)


def no_return(logits, state):
  """Forbids every token so far, 0 and EOS among them."""
  is_past = jnp.arange(state.sequences.shape[1]) <= state.cur_index[:, None]
  seen = jax.nn.one_hot(jnp.where(is_past, state.sequences, -1), logits.shape[-1]).any(axis=1)
  return jnp.where(seen.at[:, EOS].set(True), NEVER, logits)


def by_current_token(logits, state):
  """What depends on the current token and its place."""
  token = (state.cur_token[:, 0] * 3 + state.cur_index) % logits.shape[-1]
  return logits + 4.0 * jax.nn.one_hot(token, logits.shape[-1])


CALLBACKS = pytest.mark.parametrize(
    'callback', [no_repetition, no_return, by_current_token], ids=lambda x: x.__name__)


class Wide:
  """Greater toys for callbacks that forbid much; they like to repeat themselves."""

  @staticmethod
  def table(seed):
    table = np.random.default_rng(seed).normal(size=(14, 14, 14)) * 3
    return table + 3 * np.eye(14)

  target = toy.Toy(14, 0, table=table(1))
  draft = toy.Toy(14, 0, table=np.where(
      np.random.default_rng(2).random((14, 14, 1)) < 0.6, table(1), table(3)))


def run_with(callback, gamma, draft=Wide.draft, **kwargs):
  """Both decode functions with a callback."""
  options = {**GREEDY, 'logit_callback_fn': callback, **kwargs}
  cache = {'tokens': Wide.target.cache(4, core_decoding.cache_slots(9, 4))}
  if options.get('initial_index') is not None:
    cache['tokens'] = cache['tokens'].at[:, :9].set(PROMPTS)
  return (
      ours(toy_step(Wide.target), PROMPTS, gamma=gamma, cache=cache, draft=toy_step(draft),
           **options),
      theirs(toy_step(Wide.target), PROMPTS, cache, **options))


@CALLBACKS
@pytest.mark.parametrize('gamma', [0, 3])
def test_a_logit_callback_sees_t5xs_state(callback, gamma):
  result, expected = run_with(callback, gamma)
  assert_same(result, expected)
  without, _ = run_with(None, gamma)
  assert (np.asarray(without.sequences) != result.sequences).any(), 'the callback did nothing'
  if callback is no_return:
    for row, prompt in zip(np.asarray(result.sequences)[:, 0], PROMPTS, strict=True):
      behind = [token for token in row if token not in prompt]
      assert len({*behind}) == len(behind) == len(row) - np.sum(prompt != 0)
  if gamma:
    assert np.sum(result.statistics.accepted) > 0 and np.sum(result.statistics.rejected) > 0


def test_a_logit_callback_sees_t5xs_state_behind_prefilled_prompts():
  result, expected = run_with(
      no_return, 3, initial_index=np.array([3, 1, 0, 4]), num_decodes=2)
  assert_same(result, expected)


@CALLBACKS
def test_callbacks_act_on_the_draft_as_well(callback):
  result, expected = run_with(callback, 3, draft=Wide.target)
  assert_same(result, expected)
  # One model twice: a draft without the callback would be refused.
  assert np.sum(result.statistics.rejected) == 0 and np.sum(result.statistics.accepted) > 0


def test_the_state_that_a_callback_is_shown():
  def callback(logits, state):
    assert isinstance(state, t5x_decoding.SamplingLoopState)
    assert state.sequences.shape == (8, 11) and state.cur_token.shape == (8, 1)
    assert state.cur_index.shape == (8,) and logits.shape == (8, 14)
    assert jax.tree.map(jnp.shape, state.cache)['tokens'][0] == 8
    return logits

  run_with(callback, 2, num_decodes=2)


# Values that are known in the running program only, and values out of range.


@GAMMAS
def test_the_temperature_may_be_traced(gamma):
  def run(temperature):
    return decode(toy_step(TARGET), PROMPTS, gamma=gamma, cache=toy_cache(4, 9),
                  draft=toy_step(DRAFT), rescale_log_probs=False, temperature=temperature)

  expected = theirs(toy_step(TARGET), PROMPTS, toy_cache(4, 9), **GREEDY)
  assert_same(jit(run)(jnp.float32(0.0)), expected)


@pytest.mark.parametrize('name', ['topk', 'topp', 'max_decode_steps'])
def test_what_may_not_be_traced_is_refused(name):
  """T5X takes all three; here they are compiled in."""
  def run(value):
    return decode(toy_step(TARGET), PROMPTS, gamma=1, cache=toy_cache(4, 9),
                  draft=toy_step(DRAFT), **{name: value})

  with pytest.raises(UserError, match=f'^{name}: ') as caught:
    jit(run)(1)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize('options, message', [
    ({'gamma': 2, 'draft': None}, 'draft: expected .* for gamma 2, found None'),
    ({'topk': 2, 'topp': 0.5}, 'topk and topp: .* found topk=2 and topp=0.5'),
    ({'topk': -1}, 'topk: expected at least 0, found -1'),
    ({'topp': 1.5}, r'topp: expected a number in \[0, 1\], found 1.5'),
    ({'temperature': -1.0}, 'temperature: expected at least 0, found -1.0'),
    ({'max_decode_steps': 10}, r'max_decode_steps: expected 1 to 9 \(the length\), found 10'),
    ({'num_decodes': 0}, 'num_decodes: expected at least 1, found 0'),
], ids=lambda x: ', '.join(x) if isinstance(x, dict) else '')
def test_values_out_of_range_are_refused(options, message):
  with pytest.raises(UserError, match=f'^{message}$'):
    speculative_decode(PROMPTS, toy_cache(4, 9), toy_step(TARGET), EOS, **options)


@pytest.mark.parametrize('gamma', [0, 1])
def test_inputs_may_be_numpy_arrays(gamma):
  draft = model_draft(toy_step(DRAFT), toy_cache(4, 9))
  result = jax.eval_shape(lambda: speculative_decode(
      PROMPTS, toy_cache(4, 9), toy_step(TARGET), EOS, draft=draft, gamma=gamma,
      initial_index=np.array([3, 1, 0, 4])))
  assert result.sequences.shape == (4, 1, 9)


def test_the_key_is_t5xs_default():
  run = functools.partial(
      ours, toy_step(TARGET), PROMPTS, gamma=1, cache=toy_cache(4, 9), draft=toy_step(DRAFT))
  without, zero, one = (run(decode_rng=key) for key in (
      None, jax.random.PRNGKey(0), jax.random.PRNGKey(1)))
  np.testing.assert_array_equal(without.sequences, zero.sequences)
  assert (np.asarray(zero.sequences) != one.sequences).any()


# The law of samples, against T5X's own samples.

VOCABULARY = seqio.PassThroughVocabulary(6, eos_id=EOS)
SAMPLES = 50_000  # Of each of two inputs.


@functools.cache
def tiny_models():
  """A minimal network as target, a scanned one as draft, and their parameters."""
  sizes = {
      'vocab_size': 6, 'emb_dim': 8, 'num_heads': 1, 'head_dim': 4, 'mlp_dim': 8,
      'num_encoder_layers': 1, 'num_decoder_layers': 1, 'dropout_rate': 0.0,
  }
  pair = [
      t5_network.Transformer(t5_network.T5Config(**sizes)),
      scalable_network.Transformer(scalable_network.T5Config(**sizes, remat_policy='none'))]
  pair = [models.EncoderDecoderModel(
      module, VOCABULARY, VOCABULARY, None, decode_fn=t5x_decoding.temperature_sample)
          for module in pair]
  features = ('encoder_input_tokens', 'decoder_input_tokens')
  init = lambda model, key: model.get_initial_variables(
      key, dict.fromkeys(features, (1, 2)), dict.fromkeys(features, jnp.int32))['params']
  params = [jit(functools.partial(init, model))(jax.random.key(seed))
            for seed, model in enumerate(pair)]
  return pair, dict(zip(('target', 'draft'), params, strict=True))


BATCH = {
    'encoder_input_tokens': np.array([[2, 3, 4], [5, 1, 0]], np.int32),
    'decoder_input_tokens': np.zeros((2, 3), np.int32),
}


def samples(model, params, seed, **decoder_params):
  """Sequences `[2, SAMPLES, 3]`, in one program."""
  return np.asarray(jit(lambda params, key: model.predict_batch_with_aux(
      params, BATCH, key, num_decodes=SAMPLES, return_all_decodes=True,
      decoder_params=decoder_params)[0])(params, jax.random.PRNGKey(seed)))


def p_value(first, second):
  """Of the hypothesis that two arrays `[2, n, L]` hold samples of two laws, the same in both.

  Pearson's statistic of two samples of equal size; outcomes seen less than 20 times are pooled.
  """
  statistic, freedom = 0.0, 0
  for sequences in zip(first, second, strict=True):
    numbers = [x @ 6 ** np.arange(x.shape[1]) for x in sequences]
    counts = np.array([np.bincount(x, minlength=6 ** 3) for x in numbers])
    rare = counts.sum(axis=0) < 20
    counts = np.concatenate([counts[:, ~rare], counts[:, rare].sum(axis=1, keepdims=True)], 1)
    counts = counts[:, counts.sum(axis=0) > 0]
    statistic += np.sum((counts[0] - counts[1]) ** 2 / counts.sum(axis=0))
    freedom += counts.shape[1] - 1
  assert freedom > 10
  return scipy.stats.chi2.sf(statistic, freedom)


@functools.cache
def samples_by_t5x(**options):
  (target, _), params = tiny_models()
  return samples(target, params['target'], 100, **{'topk': 0, **options})


def samples_of_pair(**options):
  (target, draft), params = tiny_models()
  pair = SpeculativeModel(target, draft, gamma=3)
  return samples(pair, params, 7, **options)


@pytest.mark.parametrize('options', [
    {'temperature': 1.0}, {'temperature': 0.7, 'topk': 3}, {'temperature': 1.3, 'topp': 0.8},
], ids=str)
def test_samples_follow_the_law_of_t5xs(options):
  assert p_value(samples_of_pair(**options), samples_by_t5x(**options)) > ERROR_RATE


def test_samples_judged_token_by_token_follow_the_law_of_t5xs():
  found = samples_of_pair(verification='token_wise')
  assert p_value(found, samples_by_t5x(temperature=1.0)) > ERROR_RATE


def test_the_comparison_of_samples_detects_a_draft_that_is_followed_too_often(monkeypatch):
  monkeypatch.setattr(verification, 'residual', lambda p, q: p)
  found = samples_of_pair(verification='token_wise')
  assert p_value(found, samples_by_t5x(temperature=1.0)) < ERROR_RATE
