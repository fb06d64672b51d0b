"""Speed and memory against batch size, length and gamma, on the demo pair's restoration.

    python scripts/benchmark/growth.py scripts/benchmark/results

Held-out sentences; for a length, several joined until they fill it. Greedy; plain and speculative
decoding in turns. A row of a batch waits for the slowest, as it does in a job. Writes
`growth.json` and `growth.png` into the folder.
"""

import argparse
import functools
import json
import pathlib
import statistics

import numpy as np

from speculative_t5x import plots, timing, training
from speculative_t5x.demo import tasks
from speculative_t5x.demo.__main__ import load_demo_pair
from speculative_t5x.measure import report
from speculative_t5x.measure.subject import PairSubject

BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (32, 64, 128, 256, 512)
GAMMAS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
USUAL = {'batch': 1, 'length': 64, 'gamma': 4}
# How many texts each column is measured on.
COUNTS = {'batch': 64, 'length': 4, 'gamma': 16}


def texts_of_length(vocabulary, length, count):
  """Ids of held-out sentences joined as long as they fit, int32 `[count, length]`."""
  spoken = [tasks.spoken(english) for english, _ in tasks.read_pairs(tasks.HELD_OUT)]
  encode = lambda words: [
      *vocabulary.encode(tasks.RESTORE + ' '.join(words)), vocabulary.eos_id]
  found, words, place = [], [], 0
  while len(found) < count:
    sentence = spoken[place % len(spoken)]
    place += 1
    if len(encode([*words, sentence])) <= length:
      words.append(sentence)
    elif words:
      found.append(encode(words))
      words = []
  return training.pad(found, length)


def point(pair, inputs, batch, length, gamma, repeats):
  """Speed over plain decoding, tokens a round, and memory of one setting."""
  batches = [inputs[start : start + batch] for start in range(0, len(inputs), batch)]
  subject = PairSubject(pair, batches, length)
  programs = {way: subject.program(0, way) for way in (0, gamma)}
  seconds, emitted, rounds, different = dict.fromkeys(programs, 0.0), 0, 0, 0
  for index in range(len(batches)):
    results = {}

    def run(way, index=index, results=results):
      results[way] = subject.run(programs[way], index)
      return results[way]

    runs = {way: functools.partial(run, way) for way in programs}
    for way, times in timing.race(runs, repeats).items():
      seconds[way] += statistics.median(times)
    found = results[gamma].statistics
    emitted += int(found['emitted'].sum())
    rounds += int(found['rounds'].sum())
    different += int(np.any(
        np.asarray(results[0].sequences) != np.asarray(results[gamma].sequences), axis=1).sum())
  return {
      'batch': batch, 'length': length, 'gamma': gamma, 'texts': len(inputs),
      'factor': round(seconds[0] / seconds[gamma], 3),
      'plain_seconds': round(seconds[0], 4), 'speculative_seconds': round(seconds[gamma], 4),
      'tokens_a_text': round(emitted / len(inputs), 1),
      'tokens_a_round': round(emitted / rounds, 3), 'different_outputs': different,
      'plain_MiB': round(programs[0].memory_analysis().temp_size_in_bytes / 2**20, 2),
      'speculative_MiB': round(programs[gamma].memory_analysis().temp_size_in_bytes / 2**20, 2),
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--repeats', type=int, default=3)
  args = parser.parse_args()
  pair = load_demo_pair()
  records = []
  for name, values in (('batch', BATCHES), ('length', LENGTHS), ('gamma', GAMMAS)):
    for value in values:
      setting = USUAL | {name: value}
      if name == 'length':
        inputs = texts_of_length(pair.vocabulary, value, COUNTS[name])
      else:
        inputs = training.pad(tasks.held_out_ids(
            pair.vocabulary, 'restoration', setting['length'], COUNTS[name]), setting['length'])
      records.append({'varied': name, **point(pair, inputs, repeats=args.repeats, **setting)})
      print(records[-1], flush=True)
  args.folder.mkdir(parents=True, exist_ok=True)
  (args.folder / 'growth.json').write_text(
      json.dumps({'environment': report.environment(), 'records': records}, indent=1) + '\n')
  draw(records, args.folder / 'growth.png')


def draw(records, path):
  """Three columns, what is varied; speed, tokens a round and memory below each other."""
  from matplotlib import figure

  page = figure.Figure(figsize=(11, 8), layout='constrained')
  panels = page.subplots(3, 3, sharey='row')
  for column, name in enumerate(('batch', 'length', 'gamma')):
    chosen = [record for record in records if record['varied'] == name]
    values = [record[name] for record in chosen]
    speed, tokens, memory = panels[:, column]
    speed.plot(values, [record['factor'] for record in chosen], 'o-')
    speed.axhline(1, color='grey', linewidth=0.8)
    tokens.plot(values, [record['tokens_a_round'] for record in chosen], 'o-')
    for way in ('plain', 'speculative'):
      memory.plot(values, [record[f'{way}_MiB'] for record in chosen], 'o-', label=way)
    memory.set_yscale('log')
    memory.set_xlabel({'batch': 'batch size', 'length': 'output length'}.get(name, name))
    others = ', '.join(f'{key} {value}' for key, value in USUAL.items() if key != name)
    speed.set_title(others, fontsize='medium')
    for panel in panels[:, column]:
      panel.grid(alpha=0.3)
      panel.set_xticks(values)
      if name != 'gamma':
        panel.set_xscale('log', base=2)
        panel.set_xticks(values, [str(value) for value in values])
  for panel, label in zip(
      panels[:, 0], ('speed over plain', 'tokens a round', 'MiB beside the weights'), strict=True):
    panel.set_ylabel(label)
  for panel in panels[:2, 0]:
    panel.set_ylim(0, None)
  panels[2, 0].legend()
  plots.save(panels[0, 0], path)


if __name__ == '__main__':
  main()
