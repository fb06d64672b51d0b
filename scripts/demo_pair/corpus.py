"""Writes the demo's training texts as JSONL, `inputs` and `targets` in each line.

    python scripts/demo_pair/corpus.py train.jsonl [--inputs 12000]
    python scripts/demo_pair/corpus.py validation.jsonl --inputs 64 --validation

Inputs are of both tasks, each of them once, in an order that a fixed seed gives. Those for
validation are evenly spread over the validation sentences, the tasks one after the other.
"""

import argparse
import json
import pathlib
import random

import train

from speculative_t5x.demo import tasks


def choose(count=None):
  """`(inputs, targets)` of `count` inputs of each task, or of all of them."""
  by_input = dict(reversed(train.corpus_texts()))
  chosen = []
  for prefix in tasks.PREFIXES.values():
    of_task = sorted(text for text in by_input if text.startswith(prefix))
    chosen += random.Random(0).sample(of_task, min(count or len(of_task), len(of_task)))
  random.Random(1).shuffle(chosen)
  return [(text, by_input[text]) for text in chosen]


def spread(path, count):
  """`(inputs, targets)` of `count` inputs of each task, evenly spread over a file of pairs."""
  pairs = tasks.read_pairs(path)
  return [text for task in tasks.PREFIXES
          for text in tasks.spread(tasks.examples(pairs, task), count)]


def write(path, texts):
  """Writes `(inputs, targets)` as JSONL."""
  path.parent.mkdir(parents=True, exist_ok=True)
  lines = [json.dumps({'inputs': inputs, 'targets': targets}, ensure_ascii=False) + '\n'
           for inputs, targets in texts]
  path.write_text(''.join(lines), encoding='utf-8')


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('output', type=pathlib.Path)
  parser.add_argument('--inputs', type=int, help='of each task; default: all')
  parser.add_argument('--validation', action='store_true', help='inputs that are not trained on')
  args = parser.parse_args()
  if args.validation and args.inputs is None:
    parser.error('expected --inputs with --validation')
  texts = spread(tasks.VALIDATION, args.inputs) if args.validation else choose(args.inputs)
  write(args.output, texts)


if __name__ == '__main__':
  main()
