"""Shows what speculative decoding does and gains, on sentences the demo pair has not seen.

    python -m speculative_t5x.demo
    python -m speculative_t5x.demo --input "open the file and click ok" --html page.html

Sentences are the first ones of the held-out test file, in its order. Every figure is measured in
this process.
"""

import argparse
import importlib.metadata
import os
import pathlib
import sys

import jax
from rich.console import Console
from rich.progress import Progress

from speculative_t5x import gin_command, infer
from speculative_t5x.demo import measure, render, report, tasks
from speculative_t5x.errors import UserError
from speculative_t5x.pair import Pair, load_pair
from speculative_t5x.sampling import SamplingRule


def parse(arguments: list[str] | None) -> argparse.Namespace:
  """Reads the command line; `None` is the process's own."""
  parser = argparse.ArgumentParser(
      prog='python -m speculative_t5x.demo', description=__doc__.splitlines()[0]
  )
  parser.add_argument('--input', help='your own text instead of held-out sentences')
  parser.add_argument(
      '--task', choices=tasks.PREFIXES,
      help='only this task; default: both, or restoration for your own text',
  )
  parser.add_argument(
      '--num_sentences', type=int, default=20,
      help='held-out sentences to measure, spread over the file; default: 20 of each task',
  )
  parser.add_argument(
      '--num_shown', type=int, default=4,
      help='of these, the first to show round by round; default: 4',
  )
  parser.add_argument('--gamma', type=int, help="drafts a round; default: the pair's")
  parser.add_argument(
      '--temperature', type=float, default=0.0, help='0 is greedy, the default; 1 samples'
  )
  parser.add_argument('--seed', type=int, default=0, help='of the sampling; default: 0')
  parser.add_argument(
      '--html', type=pathlib.Path, metavar='FILE', help='write the same as a page, too'
  )
  args = parser.parse_args(arguments)
  for name, least in (('gamma', 1), ('num_sentences', 1), ('num_shown', 0)):
    value = getattr(args, name)
    if value is not None and value < least:
      raise UserError(f'--{name}: expected at least {least}, found {value}')
  SamplingRule(args.temperature)
  if args.html is not None and not args.html.resolve().parent.is_dir():
    raise UserError(f'--html: expected a file in a folder that exists, found {args.html}')
  return args


def load_demo_pair() -> Pair:
  """Loads the pair that gin_configs/models/demo.gin describes.

  Raises:
    UserError: an asset is missing or damaged.
  """
  gin_command.configure(infer.parse([
      '--gin_file=gin_configs/models/demo.gin',
      '--gin_file=gin_configs/models/pair_standalone.gin',
  ]))
  return load_pair()


def texts_of(args: argparse.Namespace) -> dict[str, list[tuple[str, str | None]]]:
  """The `(inputs, reference)` texts to run, by task.

  Raises:
    UserError: the user's text has no word.
  """
  if args.input is None:
    pairs = tasks.read_pairs(tasks.HELD_OUT)
    chosen = [args.task] if args.task else tasks.PREFIXES
    return {
        task: tasks.spread(tasks.examples(pairs, task), args.num_sentences) for task in chosen
    }
  task = args.task or 'restoration'
  # The target was trained on spoken form; written text would be a task it has not seen.
  text = tasks.spoken(args.input) if task == 'restoration' else ' '.join(args.input.split())
  if not text:
    raise UserError(f'--input: expected a text with at least one word, found {args.input!r}')
  return {task: [(tasks.PREFIXES[task] + text, None)]}


def setting(pair: Pair) -> str:
  """A line on the pair and the machine."""
  device = jax.devices()[0]
  size = lambda model: f'{model.num_parameters / 1e6:.1f} M'
  return (
      f'target {size(pair.target)} parameters, draft {size(pair.draft)}, '
      f'{pair.target.module.config.dtype}; {device.device_kind}, {os.cpu_count()} CPU cores, '
      f'jax {importlib.metadata.version("jax")}'
  )


def run(args: argparse.Namespace, pair: Pair, console: Console) -> None:
  """Shows, measures and reports.

  Args:
    args: from `parse`.
    pair: target and draft.
    console: where to print.

  Raises:
    UserError: a text is too long, or the page cannot be written.
  """
  gamma = pair.gamma if args.gamma is None else args.gamma
  if gamma < 1:
    raise UserError(f'gamma: expected at least 1 for a demo of drafting, found {gamma}')
  examples = {
      task: [measure.encode(pair, *text) for text in texts]
      for task, texts in texts_of(args).items()
  }
  how = {'gamma': gamma, 'temperature': args.temperature, 'seed': args.seed}
  console.print(setting(pair), highlight=False)
  render.show_legend(console)
  shown = {}
  for task, chosen in examples.items():
    shown[task] = [measure.trace_sentence(pair, x, **how) for x in chosen[: args.num_shown]]
    render.show_sentences(console, task, shown[task])

  with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
    total = sum(map(len, examples.values()))
    bar = progress.add_task('measuring', total=total)
    steps = measure.measure_steps(pair, gamma, measure.typical(examples))
    results = [
        measure.measure_task(
            pair, task, chosen, shown[task], steps, **how,
            on_sentence=lambda: progress.advance(bar),
        )
        for task, chosen in examples.items()
    ]
  for result in results:
    render.show_table(console, result)
  if args.html is not None:
    try:
      report.write(args.html, results, setting(pair))
    except OSError as error:
      raise UserError(f'--html: expected to write {args.html}, found {error.strerror}') from error
    console.print(f'page written to {args.html}', highlight=False, markup=False, soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  # A terminal that cannot show a character shows a question mark instead of a traceback.
  sys.stdout.reconfigure(errors='replace')
  try:
    args = parse(arguments)
    run(args, load_demo_pair(), Console(highlight=False))
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  return 0


if __name__ == '__main__':
  sys.exit(main())
