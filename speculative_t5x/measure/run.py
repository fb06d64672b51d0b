"""Measures a pair: acceptance, the cost of each part, and what every gamma achieves.

Times are medians of runs in turns, see `timing.race`; B is the batch, M the tokens of a call.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from speculative_t5x import analysis, timing
from speculative_t5x.decoding import cache_slots
from speculative_t5x.errors import UserError
from speculative_t5x.measure import acceptance
from speculative_t5x.measure.subject import ModelSteps, Subject

# Steps are timed many at a time inside one program: its start, and reading the weights back into
# the processor's cache, are nothing that a step of the decoding loop pays.
STEPS_A_TIMING = 64

# Temperatures that the draft is tried with when the target samples, in units of the target's.
DRAFT_TEMPERATURES = (0.0, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25)


@dataclasses.dataclass(frozen=True)
class Costs:
  """Seconds of each part, batch as measured.

  Attributes:
    target: of the target's step on M tokens, by M.
    draft: of the draft's step on M tokens, by M.
    target_encode: of what comes before the target's first step.
    draft_encode: likewise of the draft's.
  """

  target: dict[int, float]
  draft: dict[int, float]
  target_encode: float
  draft_encode: float

  @property
  def c(self) -> float:
    """Time of a draft step / of a target step on one token."""
    return self.draft[1] / self.target[1]

  def v(self, gamma: int) -> float:
    """Time of the target on gamma + 1 tokens / on one."""
    return self.target[gamma + 1] / self.target[1]

  def round(self, gamma: int) -> float:
    """Seconds of one round: the draft's first call reads two tokens, the others one."""
    if not gamma:
      return self.target[1]
    return self.draft[2] + (gamma - 1) * self.draft[1] + self.target[gamma + 1]


@dataclasses.dataclass(frozen=True)
class AtGamma:
  """One gamma on all inputs.

  Attributes:
    gamma: drafts a round; 0 is plain decoding.
    tokens_a_round: emitted tokens / target runs.
    predicted_tokens_a_round: the same from the acceptance along plain texts; None without a model.
    round_seconds: time of a round in the whole program, without the encoders.
    predicted_round_seconds: the sum of its parts; None without a model.
    factor: speed over plain decoding, tokens a second.
    factor_low: the lowest of the repeats.
    factor_high: the highest of the repeats.
    predicted_factor: from the acceptance along plain texts and the parts' costs.
    formula_factor: what the paper's formula gives from alpha, c and v alone.
    accepted_at_position: share of rounds in which the draft at each place was accepted.
    identical: outputs equal to plain decoding's; None when it samples.
    argument_bytes: of the compiled program: parameters and inputs.
    temporary_bytes: of the compiled program: caches and intermediate values.
  """

  gamma: int
  tokens_a_round: float
  predicted_tokens_a_round: float | None
  round_seconds: float
  predicted_round_seconds: float | None
  factor: float
  factor_low: float
  factor_high: float
  predicted_factor: float | None
  formula_factor: float | None
  accepted_at_position: list[float]
  identical: int | None
  argument_bytes: int | None
  temporary_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Measurement:
  """What was found.

  Attributes:
    num_inputs: texts decoded.
    batch_size: texts in one program run.
    repeats: timed runs of each program.
    temperature: of the target.
    alpha: mean of sum min(p, q) along the target's own texts; None without a model.
    accepted_by_depth: chance that the first 1, 2, … drafts are all accepted.
    c: time of a draft step / of a target step.
    v: time of the target on gamma + 1 tokens / on one, by gamma.
    costs: seconds of every part; None without a model.
    gammas: figures by gamma, plain decoding first.
    alpha_by_draft_temperature: alpha if the draft sampled at other temperatures; empty when greedy.
  """

  num_inputs: int
  batch_size: int
  repeats: int
  temperature: float
  alpha: float | None
  accepted_by_depth: list[float]
  c: float | None
  v: dict[int, float]
  costs: Costs | None
  gammas: list[AtGamma]
  alpha_by_draft_temperature: dict[float, float]

  @property
  def best(self) -> AtGamma:
    """The gamma that was fastest."""
    return max(self.gammas, key=lambda found: found.factor)

  @property
  def best_draft_temperature(self) -> float | None:
    """The draft temperature of the highest alpha, if it beats the target's own by .005."""
    tried = self.alpha_by_draft_temperature
    if not tried or self.alpha is None:
      return None
    found = max(tried, key=tried.get)
    return found if tried[found] > self.alpha + 0.005 else None


def measure(
    subject: Subject, gammas: Sequence[int], repeats: int,
    on_progress: Callable[[str], None] = lambda message: None,
) -> Measurement:
  """Measures a pair on its inputs.

  Args:
    subject: the pair and the inputs.
    gammas: values of gamma to try, each at least 1; plain decoding is always measured.
    repeats: timed runs of each program.
    on_progress: told what is going on.

  Returns:
    The figures.

  Raises:
    UserError: a gamma or the number of repeats is out of range, or nothing was decoded.
  """
  if not gammas or min(gammas) < 1:
    raise UserError(f'gammas: expected numbers from 1 on, found {list(gammas)}')
  if repeats < 1:
    raise UserError(f'repeats: expected at least 1, found {repeats}')
  ways = [0, *sorted(set(gammas))]
  paths = []
  plain, results, seconds = [], {gamma: [] for gamma in ways}, {gamma: [] for gamma in ways}
  tempered: dict[float, list[acceptance.Path]] = {}
  num_batches = len(subject.shapes)
  parts = parts_of(subject, _usual_batch(subject), ways)
  alone = {part: [] for part in parts}
  for batch in range(num_batches):
    on_progress(f'batch {batch + 1} of {num_batches}')
    programs = {gamma: subject.program(batch, gamma) for gamma in ways}
    runs = {
        gamma: (lambda program=program, batch=batch: subject.run(program, batch))
        for gamma, program in programs.items()
    }
    for gamma, times in timing.race(runs, repeats).items():
      seconds[gamma].append(times)
      results[gamma].append(jax.tree.map(np.asarray, runs[gamma]()))
    # Spread over the batches: a machine that is faster for a while is faster for both.
    due = lambda batch: batch * max(repeats, 10) // num_batches
    if due(batch + 1) > due(batch):
      for part, times in timing.race(parts, due(batch + 1) - due(batch)).items():
        alone[part] += times
    plain.append(results[0][-1].sequences)
    found = _paths(subject, batch, plain[-1])
    paths.append(found.pop(None, []))
    for temperature, tried in found.items():
      tempered.setdefault(temperature, []).extend(tried)
  if not any(np.any(sequences) for sequences in plain):
    raise UserError('inputs: expected some that the target answers, found none')
  costs = costs_of(alone) if parts else None
  every = [path for found in paths for path in found]
  alpha = acceptance.alpha(every) if every else None
  summed = [
      _at_gamma(subject, gamma, seconds, results, paths, costs, alpha) for gamma in ways
  ]
  return Measurement(
      num_inputs=sum(rows for rows, _ in subject.shapes),
      batch_size=max(rows for rows, _ in subject.shapes), repeats=repeats,
      temperature=float(subject.rule.temperature), alpha=alpha,
      accepted_by_depth=acceptance.accepted_by_depth(every, ways[-1]).tolist() if every else [],
      c=costs and costs.c, v={gamma: costs.v(gamma) for gamma in ways[1:]} if costs else {},
      costs=costs, gammas=summed,
      alpha_by_draft_temperature={t: acceptance.alpha(tried) for t, tried in tempered.items()},
  )


def _paths(subject, batch, sequences):
  """Paths of a batch's texts by draft temperature; None is the draft's own rule."""
  models = subject.models(batch, cache_slots(sequences.shape[1], 0))
  if 'draft' not in models:
    return {}
  logits = acceptance.logits_along(models['target'], models['draft'], sequences)
  rules = {None: subject.draft_rule}
  if not subject.rule.is_greedy:
    rules |= {
        factor * subject.rule.temperature: subject.draft_rule.override(
            temperature=factor * subject.rule.temperature)
        for factor in DRAFT_TEMPERATURES
    }
  return {
      temperature: acceptance.paths_of(*logits, sequences, subject.rule, rule)
      for temperature, rule in rules.items()
  }


def _usual_batch(subject: Subject) -> int:
  """The batch whose shape is the most frequent."""
  return subject.shapes.index(statistics.mode(subject.shapes))


def parts_of(
    subject: Subject, batch: int, ways: Sequence[int]
) -> dict[tuple[str, int], Callable[[], jax.Array]]:
  """The models' parts alone, in the middle of a text.

  Args:
    subject: the pair.
    batch: whose inputs.
    ways: values of gamma, 0 included.

  Returns:
    Functions to time, by model and tokens of a step, 0 for what comes before the first one. Empty
    when no model drafts.
  """
  models = subject.models(batch, cache_slots(subject.max_length, max(ways)))
  if 'draft' not in models:
    return {}
  rows, _ = subject.shapes[batch]
  counts = {'target': [gamma + 1 for gamma in ways], 'draft': [1, 2]}
  found = {}
  for name, model in models.items():
    for count in counts[name]:
      found[name, count] = steps(model, count, rows, subject.max_length // 2)
    encode = jax.jit(model.encode)
    found[name, 0] = functools.partial(encode, model.params)
  return found


def costs_of(seconds: Mapping[tuple[str, int], Sequence[float]]) -> Costs:
  """The parts' costs.

  Args:
    seconds: of every run of `parts_of`.

  Returns:
    Medians of a single step.
  """
  found = {
      part: statistics.median(times) / (STEPS_A_TIMING if part[1] else 1)
      for part, times in seconds.items()
  }
  by = lambda name: {part[1]: value for part, value in found.items() if part[0] == name and part[1]}
  return Costs(by('target'), by('draft'), found['target', 0], found['draft', 0])


def steps(
    model: ModelSteps, num_tokens: int, rows: int, position: int
) -> Callable[[], jax.Array]:
  """A function that runs `STEPS_A_TIMING` steps, each on the tokens of the one before.

  Args:
    model: whose steps.
    num_tokens: M.
    rows: B.
    position: where the tokens stand.

  Returns:
    The function.
  """
  cache = jax.jit(model.encode)(model.params)

  @jax.jit
  def program(params, cache):
    def body(_, carry):
      tokens, cache = carry
      logits, cache = model.step(params, tokens, jnp.full(rows, position, jnp.int32), cache)
      return jnp.argmax(logits, -1).astype(jnp.int32), cache

    tokens = jnp.ones((rows, num_tokens), jnp.int32)
    return jax.lax.fori_loop(0, STEPS_A_TIMING, body, (tokens, cache))[0]

  return lambda: program(model.params, cache)


def _at_gamma(subject, gamma, seconds, results, paths, costs, alpha):
  """The figures of one gamma."""
  count = lambda gamma, name: sum(
      np.asarray(result.statistics[name]).sum(axis=0) for result in results[gamma])
  rate = lambda gamma, times: count(gamma, 'emitted') / times
  # By repeat, the seconds of all batches.
  totals = {way: np.sum(seconds[way], axis=0) for way in (0, gamma)}
  medians = {way: sum(map(statistics.median, seconds[way])) for way in (0, gamma)}
  spread = rate(gamma, totals[gamma]) / rate(0, totals[0])
  # A batch takes as many rounds as its slowest row.
  loops = sum(result.statistics['rounds'].max() for result in results[gamma])
  rounds = count(gamma, 'rounds')
  identical = None
  if subject.rule.is_greedy:
    identical = sum(
        int(np.array_equal(*rows)) for pair in zip(results[gamma], results[0], strict=True)
        for rows in zip(pair[0].sequences, pair[1].sequences, strict=True))
  encoders, predicted = 0.0, (None,) * 4
  if costs is not None:
    encoders = costs.target_encode + (costs.draft_encode if gamma else 0.0)
    predicted = _predicted(gamma, paths, costs, alpha)
  memory = subject.program(_usual_batch(subject), gamma).memory_analysis()
  return AtGamma(
      gamma=gamma, tokens_a_round=float(count(gamma, 'emitted') / rounds),
      predicted_tokens_a_round=predicted[0],
      round_seconds=(medians[gamma] - encoders * len(results[gamma])) / int(loops),
      predicted_round_seconds=predicted[1],
      factor=float(rate(gamma, medians[gamma]) / rate(0, medians[0])),
      factor_low=float(spread.min()), factor_high=float(spread.max()),
      predicted_factor=predicted[2], formula_factor=predicted[3],
      accepted_at_position=(count(gamma, 'accepted_at_position') / rounds).tolist(),
      identical=identical, argument_bytes=getattr(memory, 'argument_size_in_bytes', None),
      temporary_bytes=getattr(memory, 'temp_size_in_bytes', None),
  )


def _predicted(gamma, paths, costs, alpha):
  """Tokens a round, seconds a round, factor, and the formula's factor."""
  lengths = [[len(path.accepted) for path in batch] for batch in paths]
  rounds = [[acceptance.expected_rounds(path, gamma) for path in batch] for batch in paths]
  total = lambda gamma, rounds: sum(
      costs.target_encode + (costs.draft_encode if gamma else 0.0)
      + max(batch, default=0) * costs.round(gamma) for batch in rounds)
  tokens = sum(map(sum, lengths)) / sum(map(sum, rounds))
  factor = total(0, lengths) / total(gamma, rounds)
  formula = float(analysis.walltime_improvement(alpha, gamma, costs.c, costs.v(gamma)))
  return float(tokens), costs.round(gamma), float(factor), formula
