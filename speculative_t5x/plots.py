"""The paper's figures, and the same of a measured pair; needs matplotlib."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from speculative_t5x import analysis

GAMMAS = (1, 3, 5, 7, 10)
COSTS = (0.01, 0.02, 0.05, 0.1)
ENCODER, DRAFT, TARGET = '#7a7a7a', '#e6a23c', '#3b6fb6'


class Course(NamedTuple):
  """One text's decoding, for the trace diagram.

  Attributes:
    label: on the axis.
    gamma: drafts a round; 0 is plain decoding.
    emitted: tokens of each round.
    c: time of a draft step / of a target step on one token.
    v: time of the target on gamma + 1 tokens / on one.
    encoder: time of the encoders / of a target step.
  """

  label: str
  gamma: int
  emitted: Sequence[int]
  c: float
  v: float
  encoder: float


def axes(title: str, xlabel: str, ylabel: str, height: float = 4.0):
  """A new figure's axes; nothing needs a display."""
  # Slow to import, and not needed by what only computes.
  from matplotlib import figure

  found = figure.Figure(figsize=(6.4, height), layout='constrained').subplots()
  found.set(title=title, xlabel=xlabel, ylabel=ylabel)
  found.grid(alpha=0.3)
  return found


def save(found, path: pathlib.Path) -> pathlib.Path:
  """Writes the figure of the axes `found` to the PNG file `path`, which is returned."""
  path.parent.mkdir(parents=True, exist_ok=True)
  found.figure.savefig(path, dpi=120)
  return path


def expected_tokens(folder: pathlib.Path) -> pathlib.Path:
  """Expected tokens a round against alpha for several gamma (the paper's figure 2)."""
  alpha = np.linspace(0, 1, 201)
  found = axes('Expected tokens a round', 'alpha', 'tokens')
  for gamma in GAMMAS:
    found.plot(alpha, analysis.expected_tokens(alpha, gamma), label=f'gamma {gamma}')
  with np.errstate(divide='ignore'):
    found.plot(alpha, 1 / (1 - alpha), 'k--', label='any gamma')
  found.set_ylim(0.5, max(GAMMAS) + 1.5)
  found.legend()
  return save(found, folder / 'expected_tokens.png')


def best_gamma(folder: pathlib.Path) -> pathlib.Path:
  """The best gamma against alpha for several c (figure 3)."""
  alpha = np.linspace(0.3, 0.95, 66)
  found = axes('Best gamma', 'alpha', 'gamma')
  for c in COSTS:
    found.step(alpha, [analysis.best_gamma(float(a), c) for a in alpha], label=f'c {c}')
  found.legend()
  return save(found, folder / 'best_gamma.png')


def speed_and_operations(folder: pathlib.Path) -> pathlib.Path:
  """Speed and operations against alpha for several gamma at c = c_hat = 0 (figure 4)."""
  alpha = np.linspace(0.3, 0.99, 200)
  found = axes('Speed (solid) and operations (dashed), free drafts', 'alpha', 'factor')
  for gamma in GAMMAS:
    line, = found.plot(alpha, analysis.walltime_improvement(alpha, gamma, 0.0),
                       label=f'gamma {gamma}')
    found.plot(alpha, analysis.operations_factor(alpha, gamma, 0.0), '--', color=line.get_color())
  found.set_ylim(0.8, 8)
  found.legend()
  return save(found, folder / 'speed_and_operations.png')


def trace(courses: Sequence[Course], path: pathlib.Path) -> pathlib.Path:
  """Calls of encoders, draft and target along time, one line each way of decoding (figure 5).

  Args:
    courses: what to draw, from above.
    path: the PNG file.

  Returns:
    `path`.
  """
  found = axes('Calls along time', 'time, in target steps', '', 0.8 + 0.7 * len(courses))
  for row, course in enumerate(courses):
    bars = [(0.0, course.encoder, ENCODER)]
    for _ in course.emitted:
      for length, colour in [(course.c, DRAFT)] * course.gamma + [(course.v, TARGET)]:
        bars.append((bars[-1][0] + bars[-1][1], length, colour))
    found.broken_barh(
        [bar[:2] for bar in bars], (row - 0.35, 0.7), facecolors=[bar[2] for bar in bars],
        edgecolors='white', linewidth=0.15)
  found.set_yticks(range(len(courses)), [course.label for course in courses])
  found.invert_yaxis()
  found.grid(visible=False)
  from matplotlib import patches

  found.legend(
      handles=[patches.Patch(color=colour, label=name) for colour, name in (
          (ENCODER, 'encoders'), (DRAFT, 'draft'), (TARGET, 'target'))],
      loc='upper right', fontsize='small')
  return save(found, path)


def example_trace(folder: pathlib.Path) -> pathlib.Path:
  """The trace diagram of a text of 24 tokens at alpha .8, c .05 for gamma 7, 3 and plain."""
  courses = []
  for gamma in (7, 3, 0):
    tokens = float(analysis.expected_tokens(0.8, gamma))
    rounds = round(24 / tokens)
    courses.append(Course(
        f'gamma {gamma}' if gamma else 'plain', gamma, [1] * rounds, 0.05, 1.0, 1.0))
  return trace(courses, folder / 'trace.png')


def draw_all(folder: pathlib.Path) -> list[pathlib.Path]:
  """Draws the figures 2 to 5 of the paper from its formulas.

  Args:
    folder: where the PNG files go.

  Returns:
    The files.
  """
  return [draw(folder) for draw in (
      expected_tokens, best_gamma, speed_and_operations, example_trace)]


def against_gamma(
    curves: Mapping[str, Mapping[int, float]], title: str, ylabel: str, path: pathlib.Path
) -> pathlib.Path:
  """Draws values against gamma.

  Args:
    curves: values by gamma, by label.
    title: of the figure.
    ylabel: of the values.
    path: the PNG file.

  Returns:
    `path`.
  """
  found = _with_curves(axes(title, 'gamma', ylabel), curves)
  found.set_xticks(sorted({gamma for values in curves.values() for gamma in values}))
  found.set_ylim(bottom=0)
  return save(found, path)


def by_position(
    curves: Mapping[str, Mapping[int, float]], path: pathlib.Path
) -> pathlib.Path:
  """Draws how often the drafts up to each position are accepted.

  Args:
    curves: shares by position from 1 on, by label.
    path: the PNG file.

  Returns:
    `path`.
  """
  found = _with_curves(
      axes('Drafts accepted up to a position', 'position in the round', 'share'), curves)
  found.set_ylim(0, 1.02)
  return save(found, path)


def _with_curves(found, curves):
  """Draws values by place, by label, and the legend; returns the axes."""
  for label, values in curves.items():
    found.plot(list(values), list(values.values()), 'o-', label=label)
  found.legend()
  return found
