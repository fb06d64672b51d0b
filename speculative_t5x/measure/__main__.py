"""Measures what a pair gains on given inputs: which gamma to use, and why.

    python -m speculative_t5x.measure --gin_file=gin_configs/examples/demo.gin \
        --input=sentences.txt --output_dir=measured --gammas 1 2 4 7

Writes `report.md`, `report.json` and plots into the folder, and prints the gin lines to use.
"""

import argparse
import itertools
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from speculative_t5x import gin_command
from speculative_t5x import inputs as inputs_lib
from speculative_t5x.errors import UserError
from speculative_t5x.measure import report
from speculative_t5x.measure.run import Measurement, measure
from speculative_t5x.measure.subject import PairSubject, Subject
from speculative_t5x.pair import Pair, load_pair


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what both doors' commands share."""
  parser.add_argument('--output_dir', required=True, type=pathlib.Path, help='of the report')
  parser.add_argument('--gammas', type=int, nargs='+', default=[1, 2, 3, 4, 5, 7],
                      help='values to try; default: 1 2 3 4 5 7')
  parser.add_argument('--repeats', type=int, default=5, help='timed runs of each; default: 5')
  parser.add_argument('--num_inputs', type=int, default=20, help='of the first ones; default: 20')
  parser.add_argument('--batch_size', type=int, default=1, help='default: 1')


def configure(args: argparse.Namespace) -> None:
  """Checks the numbers and reads the gin files.

  Raises:
    UserError: a number is out of range, or gin refuses something.
  """
  for name in ('repeats', 'num_inputs', 'batch_size'):
    if getattr(args, name) < 1:
      raise UserError(f'--{name}: expected at least 1, found {getattr(args, name)}')
  if min(args.gammas) < 1:
    raise UserError(f'--gammas: expected numbers from 1 on, found {args.gammas}')
  # Files for inference ask for it.
  args.bindings.append(f'INFER_OUTPUT_DIR = {str(args.output_dir)!r}')
  gin_command.configure(args)


def finish(subject: Subject, args: argparse.Namespace) -> Measurement:
  """Measures, writes the report and prints it."""
  tell = lambda message: print(message, file=sys.stderr, flush=True)
  found = measure(subject, args.gammas, args.repeats, tell)
  files = report.write(found, args.output_dir)
  print(files[1].read_text(encoding='utf-8'))
  for path in files:
    print(path)
  return found


def batches_of(
    pair: Pair, texts: Sequence[str], length: int, batch_size: int, add_eos: bool = True
) -> list[np.ndarray]:
  """Token ids of `texts`, int32 `[batch_size, length]` each; the last texts may be left over."""
  rows, end = [], [pair.vocabulary.eos_id] if add_eos else []
  for text in texts:
    ids = [*pair.vocabulary.encode(text)[: length - len(end)], *end]
    rows.append(np.pad(np.array(ids, np.int32), (0, length - len(ids))))
  return [
      np.stack(rows[start : start + batch_size])
      for start in range(0, len(rows) - batch_size + 1, batch_size)
  ]


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code."""
  # Files for inference bind it. T5X's have another of that name, in its own command.
  import speculative_t5x.infer  # noqa: F401

  def command():
    parser = argparse.ArgumentParser(
        prog='python -m speculative_t5x.measure', description=__doc__.splitlines()[0],
        allow_abbrev=False)
    parser.add_argument('--input', required=True, help='text file or .jsonl file')
    add_arguments(parser)
    args = gin_command.parse(parser, arguments)
    configure(args)
    examples, _ = inputs_lib.read_file(args.input)
    texts = [gin_command.macro('PREFIX') + example.inputs for example in itertools.islice(
        (example for example in examples if example.inputs), args.num_inputs)]
    if len(texts) < args.batch_size:
      raise UserError(
          f'--input: expected at least --batch_size {args.batch_size} texts, found {len(texts)}')
    lengths, add_eos = map(gin_command.macro, ('TASK_FEATURE_LENGTHS', 'ADD_EOS'))
    pair = load_pair()
    finish(PairSubject(
        pair, batches_of(pair, texts, lengths['inputs'], args.batch_size, add_eos),
        lengths['targets'],
    ), args)
    return 0

  return gin_command.run(command)


if __name__ == '__main__':
  sys.exit(main())
