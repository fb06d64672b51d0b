"""Drafting by confidence against every fixed gamma, on the demo pair.

    python scripts/demo_pair/adaptive.py scripts/demo_pair/results

Plain decoding, each fixed gamma and each least confidence run in turns on every sentence, batch 1.
Writes `adaptive.json` into the folder.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics

from speculative_t5x import timing
from speculative_t5x.demo import measure, tasks
from speculative_t5x.demo.__main__ import load_demo_pair
from speculative_t5x.drafters import DrafterConfig

# Sampled outputs differ by way and by seed; several are taken together.
SEEDS = 3


def compare(ways, examples, temperature, repeats):
  """Decodes every example every way.

  Args:
    ways: of each name, the pair and gamma.
    examples: what to decode.
    temperature: of the decoding.
    repeats: timed runs of each.

  Returns:
    Of each way a record with its speed over 'plain'.
  """
  totals = {name: {'seconds': 0.0, 'emitted': 0, 'drafted': 0, 'rounds': 0} for name in ways}
  for example in examples:
    for seed in range(SEEDS if temperature else 1):
      runs = {
          name: functools.partial(
              pair.predict, example.tokens, max_length=example.max_length, gamma=gamma,
              temperature=temperature, seed=seed)
          for name, (pair, gamma) in ways.items()
      }
      for name, times in timing.race(runs, repeats).items():
        found = runs[name]().statistics
        totals[name]['seconds'] += statistics.median(times)
        for count in ('emitted', 'drafted', 'rounds'):
          totals[name][count] += int(getattr(found, count)[0, 0])
  rate = {name: total['emitted'] / total['seconds'] for name, total in totals.items()}
  return {
      name: {
          'factor': round(rate[name] / rate['plain'], 3),
          'drafts_a_round': round(total['drafted'] / total['rounds'], 2),
          'tokens_a_round': round(total['emitted'] / total['rounds'], 2),
      }
      for name, total in totals.items()
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--num_sentences', type=int, default=12)
  parser.add_argument('--gammas', type=int, nargs='+', default=[2, 3, 4, 5, 7, 9])
  parser.add_argument('--confidences', type=float, nargs='+', default=[0.1, 0.2, 0.3])
  parser.add_argument('--temperatures', type=float, nargs='+', default=[0.0, 1.0])
  parser.add_argument('--repeats', type=int, default=3)
  args = parser.parse_args()
  pair = load_demo_pair()
  ways = {'plain': (pair, 0)}
  ways |= {f'gamma {gamma}': (pair, gamma) for gamma in args.gammas}
  ways |= {
      f'confidence {value}': (
          dataclasses.replace(pair, drafter=DrafterConfig(min_confidence=value)), max(args.gammas))
      for value in args.confidences
  }
  records = []
  for task in tasks.PREFIXES:
    texts = tasks.spread(tasks.examples(tasks.read_pairs(tasks.HELD_OUT), task), args.num_sentences)
    examples = [measure.encode(pair, *text) for text in texts]
    for temperature in args.temperatures:
      for name, found in compare(ways, examples, temperature, args.repeats).items():
        records.append({'task': task, 'temperature': temperature, 'way': name, **found})
        print(records[-1], flush=True)
  args.folder.mkdir(parents=True, exist_ok=True)
  (args.folder / 'adaptive.json').write_text(json.dumps(records, indent=1) + '\n')


if __name__ == '__main__':
  main()
