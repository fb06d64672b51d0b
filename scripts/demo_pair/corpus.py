"""Writes the demo's training texts as JSONL, `inputs` and `targets` in each line.

    python scripts/demo_pair/corpus.py train.jsonl [--inputs 12000]

Inputs are of both tasks, each of them once, in an order that a fixed seed gives.
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


def write(path, count=None):
  """Writes what `choose` gives, and says how many lines."""
  path.parent.mkdir(parents=True, exist_ok=True)
  lines = [json.dumps({'inputs': inputs, 'targets': targets}, ensure_ascii=False) + '\n'
           for inputs, targets in choose(count)]
  path.write_text(''.join(lines), encoding='utf-8')
  return len(lines)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('output', type=pathlib.Path)
  parser.add_argument('--inputs', type=int, help='of each task; default: all')
  args = parser.parse_args()
  write(args.output, args.inputs)


if __name__ == '__main__':
  main()
