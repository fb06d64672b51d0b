"""Speed and memory against batch size, output length and gamma, on the demo pair.

    python scripts/benchmark/growth.py scripts/benchmark/results

Outputs run to their full length, EOS or not, so that every row costs the same. Greedy; plain and
speculative decoding in turns. Writes `growth.json` and `growth.png` into the folder.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics

from speculative_t5x import plots, timing, training
from speculative_t5x.demo import tasks
from speculative_t5x.demo.__main__ import load_demo_pair
from speculative_t5x.measure import report
from speculative_t5x.measure.subject import PairSubject

INPUT_LENGTH = 64
BATCHES, LENGTHS, GAMMAS = (1, 2, 4, 8, 16, 32, 64), (32, 64, 128, 256, 512), (1, 2, 4, 8, 12, 16)
USUAL = {'batch': 1, 'length': 64, 'gamma': 4}


class Endless:
  """The pair's vocabulary without an id that ends a text."""

  def __init__(self, vocabulary):
    self.size, self.eos_id = vocabulary.size, -1


def point(pair, inputs, batch, length, gamma, repeats):
  """Speed over plain decoding, tokens a round, and memory of one setting."""
  subject = PairSubject(pair, [inputs[:batch]], length)
  programs = {way: subject.program(0, way) for way in (0, gamma)}
  runs = {way: (lambda program=program: subject.run(program, 0))
          for way, program in programs.items()}
  seconds = {way: statistics.median(times) for way, times in timing.race(runs, repeats).items()}
  found = runs[gamma]().statistics
  return {
      'batch': batch, 'length': length, 'gamma': gamma,
      'factor': round(seconds[0] / seconds[gamma], 3),
      'plain_seconds': round(seconds[0], 4), 'speculative_seconds': round(seconds[gamma], 4),
      'tokens_a_round': round(float(found['emitted'].sum() / found['rounds'].sum()), 3),
      'plain_MiB': round(programs[0].memory_analysis().temp_size_in_bytes / 2**20, 2),
      'speculative_MiB': round(programs[gamma].memory_analysis().temp_size_in_bytes / 2**20, 2),
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--repeats', type=int, default=3)
  args = parser.parse_args()
  pair = load_demo_pair()
  ids = tasks.held_out_ids(pair.vocabulary, 'restoration', INPUT_LENGTH, max(BATCHES))
  inputs = training.pad(ids, INPUT_LENGTH)
  endless = dataclasses.replace(pair, vocabulary=Endless(pair.vocabulary))
  records = []
  for name, values in (('batch', BATCHES), ('length', LENGTHS), ('gamma', GAMMAS)):
    for value in values:
      records.append({'varied': name, **point(
          endless, inputs, repeats=args.repeats, **USUAL | {name: value})})
      print(records[-1], flush=True)
  args.folder.mkdir(parents=True, exist_ok=True)
  (args.folder / 'growth.json').write_text(
      json.dumps({'environment': report.environment(), 'records': records}, indent=1) + '\n')
  draw(records, args.folder / 'growth.png')


def draw(records, path):
  """Three columns, what is varied; above the speed, below the memory."""
  from matplotlib import figure

  page = figure.Figure(figsize=(11, 6), layout='constrained')
  panels = page.subplots(2, 3)
  for column, name in enumerate(('batch', 'length', 'gamma')):
    chosen = [record for record in records if record['varied'] == name]
    values = [record[name] for record in chosen]
    speed, memory = panels[0][column], panels[1][column]
    speed.plot(values, [record['factor'] for record in chosen], 'o-')
    speed.axhline(1, color='grey', linewidth=0.8)
    speed.set(ylabel='speed over plain' if not column else '', ylim=(0, None))
    for way in ('plain', 'speculative'):
      memory.plot(values, [record[f'{way}_MiB'] for record in chosen], 'o-', label=way)
    memory.set(xlabel={'batch': 'batch size', 'length': 'output length'}.get(name, name),
               ylabel='MiB beside the weights' if not column else '')
    memory.legend()
    for panel in (speed, memory):
      panel.grid(alpha=0.3)
      panel.set_xticks(values)
      if name != 'gamma':
        panel.set_xscale('log', base=2)
        panel.set_xticks(values, [str(value) for value in values])
  plots.save(panels[0][0], path)


if __name__ == '__main__':
  main()
