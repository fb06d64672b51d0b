r"""Trains a draft on a target's own outputs and distributions, so that more of its drafts are kept.

    python -m speculative_t5x.distil --gin_file=gin_configs/examples/demo_distil.gin \
        --input=train.jsonl --output_dir=distilled

Writes T5X checkpoints of the draft and `log.jsonl`, with alpha on held-out inputs as it goes, into
the folder. Interrupt it at will: the same command goes on.
"""

import argparse
import sys
from collections.abc import Sequence

from speculative_t5x import gin_command
from speculative_t5x.distil.run import distil


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  """Reads the command line; see `gin_command.parse`."""
  parser = argparse.ArgumentParser(
      prog='python -m speculative_t5x.distil', description=__doc__.splitlines()[0],
      allow_abbrev=False)
  parser.add_argument(
      '--input', help="text file, or .jsonl file with 'inputs' and, for references, 'targets'")
  parser.add_argument(
      '--held_out', help='file of inputs to measure alpha on; default: the last of the inputs')
  parser.add_argument('--output_dir', help='same as --gin.MODEL_DIR')
  args = gin_command.parse(parser, arguments)
  if args.output_dir is not None:
    args.bindings.append(f'MODEL_DIR = {args.output_dir!r}')
  return args


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code."""
  def command():
    args = parse(arguments)
    gin_command.configure(args)
    checkpoint = distil(args.input, args.held_out)
    print(f'DRAFT_CHECKPOINT_PATH = {str(checkpoint)!r}')
    return 0

  return gin_command.run(command)


if __name__ == '__main__':
  sys.exit(main())
