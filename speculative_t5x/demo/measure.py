"""Runs the pair on sentences: rounds for the eye, times for the table. Batch size 1 throughout."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from speculative_t5x import timing
from speculative_t5x.demo.results import Sentence, StepTimes, TaskResult, rounds_of_row
from speculative_t5x.errors import UserError
from speculative_t5x.measure import run, subject
from speculative_t5x.pair import Model, Pair
from speculative_t5x.sampling import SamplingRule

# Longest input and longest output, in tokens. A text takes the first row it fits into, so that
# short texts do not pay for a long encoder and few programs are compiled.
LENGTHS = ((32, 64), (64, 128), (256, 256), (1024, 1024))

# Runs of a sentence and way of decoding; the median counts.
REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Example:
  """One encoded sentence.

  Attributes:
    inputs: text with prefix.
    reference: text, or None.
    tokens: int32 `[1, S]`, EOS behind the text, padded with 0.
    max_length: `L`.
  """

  inputs: str
  reference: str | None
  tokens: np.ndarray
  max_length: int


def encode(pair: Pair, inputs: str, reference: str | None) -> Example:
  """Encodes a text and chooses its lengths.

  Args:
    pair: for its vocabulary.
    inputs: text with prefix.
    reference: kept as it is.

  Returns:
    The example.

  Raises:
    UserError: the text is longer than the longest of `LENGTHS`.
  """
  ids = [*pair.vocabulary.encode(inputs), pair.vocabulary.eos_id]
  for input_length, max_length in LENGTHS:
    if len(ids) <= input_length:
      tokens = np.zeros((1, input_length), np.int32)
      tokens[0, : len(ids)] = ids
      return Example(inputs, reference, tokens, max_length)
  raise UserError(f'input: expected at most {LENGTHS[-1][0]} tokens, found {len(ids)}')


def trace_sentence(
    pair: Pair, example: Example, *, gamma: int, temperature: float, seed: int = 0
) -> Sentence:
  """Decodes one example and records its rounds.

  Args:
    pair: target and draft.
    example: what to decode.
    gamma: drafts a round, at least 1.
    temperature: 0 is greedy.
    seed: of the sampling.

  Returns:
    The sentence.
  """
  result = pair.predict(
      example.tokens, max_length=example.max_length, seed=seed, gamma=gamma,
      temperature=temperature, trace=True,
  )
  row = jax.tree.map(lambda x: np.asarray(x[0, 0]), result)
  rounds = rounds_of_row(
      row.trace.draft_tokens, row.trace.accepted, row.trace.next_token, pair.vocabulary.pieces()
  )
  text = pair.vocabulary.decode(output_ids(row.sequences, pair.vocabulary.eos_id))
  return Sentence(example.inputs, text, example.reference, rounds)


def output_ids(sequence: np.ndarray, eos_id: int) -> list[int]:
  """The ids of one row `[L]` before EOS and padding."""
  ends = np.flatnonzero((sequence == eos_id) | (sequence == 0))
  return sequence[: ends[0] if ends.size else None].tolist()


def measure_task(
    pair: Pair, task: str, examples: Sequence[Example], sentences: Sequence[Sentence],
    steps: StepTimes, *, gamma: int, temperature: float, seed: int = 0, repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
    on_sentence: Callable[[], None] = lambda: None,
) -> TaskResult:
  """Decodes examples plainly and speculatively, in turns, and sums up.

  Both ways are run once before their time is taken. Then every sentence is decoded `repeats` times
  each way, first the one, then the other, the order changing each time; its times are the medians.

  Args:
    pair: target and draft.
    task: name for the result.
    examples: what to decode.
    sentences: goes into the result.
    steps: goes into the result.
    gamma: drafts a round, at least 1.
    temperature: of both ways; 0 is greedy.
    seed: of the sampling.
    repeats: timed runs of a sentence each way.
    clock: seconds.
    on_sentence: called after each sentence.

  Returns:
    The task's figures.
  """
  run = lambda example, gamma: jax.block_until_ready(pair.predict(
      example.tokens, max_length=example.max_length, seed=seed, gamma=gamma,
      temperature=temperature,
  ))
  seconds = {0: 0.0, gamma: 0.0}
  emitted = {0: 0, gamma: 0}
  totals = {'rounds': 0, 'accepted': 0, 'rejected': 0}
  identical = 0
  for example in examples:
    results = {way: run(example, way) for way in seconds}
    times = {way: [] for way in seconds}
    for repeat in range(repeats):
      for way in (0, gamma) if repeat % 2 else (gamma, 0):
        start = clock()
        run(example, way)
        times[way].append(clock() - start)
    for way, result in results.items():
      seconds[way] += statistics.median(times[way])
      emitted[way] += int(result.statistics.emitted[0, 0])
    for name in totals:
      totals[name] += int(getattr(results[gamma].statistics, name)[0, 0])
    identical += np.array_equal(results[0].sequences, results[gamma].sequences)
    on_sentence()
  return TaskResult(
      task=task, gamma=gamma, temperature=temperature, sentences=sentences,
      num_measured=len(examples), emitted=emitted[gamma],
      identical=identical if SamplingRule(temperature).is_greedy else None,
      plain_rate=emitted[0] / seconds[0],
      speculative_rate=emitted[gamma] / seconds[gamma], steps=steps, **totals,
  )


def measure_steps(pair: Pair, gamma: int, example: Example, *, repeats: int = 30) -> StepTimes:
  """Times decode steps alone, and a round of the decoding loop.

  The target's step on 1 and on gamma + 1 tokens and the draft's on 1 are taken in the middle of the
  output; the round is the mean over a greedy decoding of `example`, encoders left out. The four are
  timed in turns.

  Args:
    pair: target and draft.
    gamma: drafts a round, at least 1.
    example: what to decode for the round; its lengths are those of the steps.
    repeats: timings of each; the median counts.

  Returns:
    Seconds a step and a round.
  """
  sizes = (example.tokens.shape[1], example.max_length, pair.vocabulary.size)
  loop, rounds = _loop(pair, gamma, example)
  times = timing.race({
      'target': _steps(pair.target, 1, gamma, *sizes),
      'target_verify': _steps(pair.target, gamma + 1, gamma, *sizes),
      'draft': _steps(pair.draft, 1, gamma, *sizes), 'round': loop,
  }, repeats)
  return StepTimes(gamma=gamma, **{
      name: statistics.median(taken) / (rounds if name == 'round' else run.STEPS_A_TIMING)
      for name, taken in times.items()
  })


def typical(examples: Mapping[str, Sequence[Example]]) -> Example:
  """Of the examples of all tasks the longest that is no longer than most texts.

  Its many rounds make the start of the program, which a round's time contains a share of, small.
  """
  every = [example for chosen in examples.values() for example in chosen]
  usual = [example for example in every if example.max_length <= LENGTHS[1][1]]
  return max(usual or every, key=lambda example: np.count_nonzero(example.tokens))


def _steps(
    model: Model, num_tokens: int, gamma: int, input_length: int, max_length: int, vocab_size: int
) -> Callable[[], jax.Array]:
  """A function that runs several decode steps on one row; see `measure.run.steps`."""
  inputs = jnp.ones((1, input_length), jnp.int32)
  found = subject.model_steps(model, inputs, max_length + gamma + 1, vocab_size)
  return run.steps(found, num_tokens, 1, max_length // 2)


def _loop(pair: Pair, gamma: int, example: Example) -> tuple[Callable[[], jax.Array], int]:
  """A function that decodes `example` greedily from encoded inputs, and the rounds it takes."""
  start = functools.partial(pair.start, max_length=example.max_length, gamma=gamma)
  caches = jax.jit(start)(pair.params, jnp.asarray(example.tokens))
  decoder_inputs = jnp.zeros((1, example.max_length), jnp.int32)
  decode = jax.jit(functools.partial(pair.decode_from, gamma=gamma, rule=SamplingRule(0.0)))
  run = lambda: decode(caches, pair.params, decoder_inputs)
  return run, int(run().statistics.rounds[0, 0])
