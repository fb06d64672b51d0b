"""A measurement as JSON, Markdown and plots."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
from typing import Any

import jax

from speculative_t5x import plots
from speculative_t5x.measure.run import Measurement

# How far prediction and achievement may be apart before the report looks for the cause.
AGREEMENT = 0.1


def environment() -> dict[str, Any]:
  """Where figures were taken."""
  device = jax.devices()[0]
  return {
      'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
      'platform': platform.platform(), 'processor': _processor(), 'cores': os.cpu_count(),
      'device': device.device_kind, 'num_devices': jax.device_count(),
      'versions': {
          name: importlib.metadata.version(name) for name in ('jax', 'jaxlib', 'flax', 'numpy')
      } | {'python': platform.python_version()},
  }


def _processor() -> str:
  """The CPU's name, where the system tells."""
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines()
  except OSError:
    return platform.processor()
  return next((x.split(':', 1)[1].strip() for x in lines if x.startswith('model name')), '')


def write(measurement: Measurement, folder: pathlib.Path) -> list[pathlib.Path]:
  """Writes `report.json`, `report.md` and the plots.

  Args:
    measurement: what to report.
    folder: where to.

  Returns:
    The files.
  """
  folder.mkdir(parents=True, exist_ok=True)
  where = environment()
  content = {'environment': where, **dataclasses.asdict(measurement)}
  files = [folder / 'report.json', folder / 'report.md']
  files[0].write_text(json.dumps(content, indent=1) + '\n', encoding='utf-8')
  files[1].write_text(markdown(measurement, where), encoding='utf-8')
  return files + draw(measurement, folder)


def draw(measurement: Measurement, folder: pathlib.Path) -> list[pathlib.Path]:
  """Draws speed and tokens a round against gamma, acceptance by position, and the calls' trace."""
  found = measurement.gammas
  by = lambda name: {
      at.gamma: getattr(at, name) for at in found if getattr(at, name) is not None}
  drawn = [
      plots.against_gamma(
          {'achieved': by('factor'), 'predicted': by('predicted_factor'),
           'formula, from alpha alone': by('formula_factor')},
          'Speed over plain decoding', 'factor', folder / 'speed.png'),
      plots.against_gamma(
          {'achieved': by('tokens_a_round'), 'predicted': by('predicted_tokens_a_round')},
          'Tokens a round', 'tokens', folder / 'tokens_a_round.png'),
  ]
  longest = found[-1].accepted_at_position
  positions = {'whole rounds': dict(enumerate(longest, 1))}
  if measurement.accepted_by_depth:
    positions['along plain texts'] = dict(enumerate(measurement.accepted_by_depth, 1))
  drawn.append(plots.by_position(positions, folder / 'acceptance.png'))
  if measurement.costs is not None:
    drawn.append(plots.trace(_courses(measurement), folder / 'trace.png'))
  return drawn


def _courses(measurement):
  """The largest gamma, the best one and plain decoding, on one number of tokens."""
  costs = measurement.costs
  courses = []
  gammas = {at.gamma: at for at in measurement.gammas}
  tokens = 8 * max(at.tokens_a_round for at in measurement.gammas)
  for gamma in sorted({max(gammas), measurement.best.gamma, 0}, reverse=True):
    rounds = round(tokens / gammas[gamma].tokens_a_round)
    encoders = costs.target_encode + (costs.draft_encode if gamma else 0)
    courses.append(plots.Course(
        f'gamma {gamma}' if gamma else 'plain', gamma, [1] * rounds, costs.c,
        costs.v(gamma) if gamma else 1.0, encoders / costs.target[1]))
  return courses


def gin_lines(measurement: Measurement) -> list[str]:
  """What to put on the command line."""
  lines = [f'--gin.GAMMA={measurement.best.gamma}']
  if measurement.best_draft_temperature is not None:
    lines.append(f'--gin.DRAFT_TEMPERATURE={measurement.best_draft_temperature:g}')
  return lines


def markdown(measurement: Measurement, where: dict[str, Any]) -> str:
  """The report as Markdown; `where` is from `environment`."""
  best = measurement.best
  lines = [
      '# Measurement', '',
      f'{measurement.num_inputs} inputs, batches of {measurement.batch_size}, temperature '
      f'{measurement.temperature:g}. Times are medians of {measurement.repeats} runs behind one '
      'that is not counted, all ways in turns; in brackets the lowest and highest of the repeats. '
      f'{where["processor"]}, {where["cores"]} cores, {where["device"]} x {where["num_devices"]}, '
      f'jax {where["versions"]["jax"]}, {where["date"]}.', '',
      f'Best: gamma {best.gamma}, {best.factor:.2f}x the speed of plain decoding. Use it with',
      '', *(f'    {line}' for line in gin_lines(measurement)), '',
  ]
  if measurement.costs is not None:
    v = ', '.join(f'v({gamma}) {value:.2f}' for gamma, value in measurement.v.items())
    lines += [
        f'alpha {measurement.alpha:.3f} (mean of sum min(p, q) along the texts of the target), '
        f'c {measurement.c:.3f} (a draft step in target steps), {v} (the target on gamma + 1 '
        'tokens in steps on one).', '',
    ]
  head = ['gamma', 'speed', 'predicted', 'formula', 'tokens a round', 'predicted', 'ms a round',
          'predicted', 'identical', 'MiB']
  lines += ['| ' + ' | '.join(head) + ' |', '| ' + '---: | ' * len(head)]
  for at in measurement.gammas:
    lines.append('| ' + ' | '.join(_row(at)) + ' |')
  lines += [
      '', 'predicted: from the chance that each token of plain decoding would have been accepted, '
      'and the times of the parts. formula: that of the paper, from alpha, c and v alone, as if '
      'drafts were accepted independently. identical: outputs equal to those of plain decoding. '
      'MiB: caches and intermediate values of the compiled program.', '',
  ]
  if measurement.alpha_by_draft_temperature:
    tried = ', '.join(
        f'{t:g}: {alpha:.3f}' for t, alpha in measurement.alpha_by_draft_temperature.items())
    lines += [f'alpha if the draft sampled at another temperature: {tried}.', '']
  lines += [f'- {remark}' for remark in remarks(measurement)]
  return '\n'.join(lines).rstrip() + '\n'


def _row(at):
  """The table's row of one gamma."""
  number = lambda value, digits=2: '' if value is None else f'{value:.{digits}f}'
  milliseconds = lambda value: number(value if value is None else 1000 * value)
  return [
      str(at.gamma), f'{at.factor:.2f} ({at.factor_low:.2f} to {at.factor_high:.2f})',
      number(at.predicted_factor), number(at.formula_factor), number(at.tokens_a_round),
      number(at.predicted_tokens_a_round), milliseconds(at.round_seconds),
      milliseconds(at.predicted_round_seconds), '' if at.identical is None else str(at.identical),
      '' if at.temporary_bytes is None else f'{at.temporary_bytes / 2**20:.1f}',
  ]


def remarks(measurement: Measurement) -> list[str]:
  """Where prediction and achievement are apart by more than `AGREEMENT`, and which part is off."""
  found = []
  for at in measurement.gammas[1:]:
    if at.predicted_factor is None or abs(at.factor / at.predicted_factor - 1) <= AGREEMENT:
      continue
    tokens = at.tokens_a_round / at.predicted_tokens_a_round
    seconds = at.round_seconds / at.predicted_round_seconds
    plain = measurement.gammas[0].round_seconds / measurement.gammas[0].predicted_round_seconds
    parts = {
        f'tokens a round are {tokens:.2f} of what was predicted': abs(tokens - 1),
        f'a round takes {seconds:.2f} of its parts': abs(seconds - 1),
        f'a step of plain decoding takes {plain:.2f} of the single step': abs(plain - 1),
    }
    found.append(f'gamma {at.gamma}: achieved {at.factor:.2f}, predicted '
                 f'{at.predicted_factor:.2f}; mostly because {max(parts, key=parts.get)}.')
  return found
