"""Every drafter under every rule on the demo's target: a table of acceptance and speed.

    python scripts/demo_pair/drafters.py scripts/demo_pair/results

The n-gram tables are counted on the training texts of both tasks. Batch 1; plain and speculative
decoding in turns. Writes `drafters.json` and `drafters.md` into the folder.
"""

import argparse
import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import train

from speculative_t5x import ngram
from speculative_t5x.demo import measure, tasks
from speculative_t5x.demo.__main__ import load_demo_pair
from speculative_t5x.demo.results import StepTimes
from speculative_t5x.drafters import DrafterConfig
from speculative_t5x.verification import VerificationRule

# Appendix of the paper, table 3: alpha at T = 0 and T = 1 on EnDe.
PAPER = {'unigram': '.08 / .07', 'bigram': '.20 / .19'}


def ngram_tables(vocabulary):
  """Tables of one to three tokens, of the outputs of both tasks."""
  ids = [[*vocabulary.encode(target), vocabulary.eos_id] for _, target in train.corpus_texts()]
  return {
      name: jax.tree.map(jnp.asarray, ngram.build(ids, vocabulary.size, order))
      for order, name in enumerate(('unigram', 'bigram', 'trigram'), 1)
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--num_sentences', type=int, default=6)
  parser.add_argument('--gammas', type=int, nargs='+', default=[4])
  parser.add_argument('--repeats', type=int, default=5)
  args = parser.parse_args()
  pair = load_demo_pair()
  drafters = {
      'model': {}, 'confident model': {'drafter': DrafterConfig(min_confidence=0.2)},
      'copying': {'drafter': DrafterConfig('copying')},
      'mixed': {'drafter': DrafterConfig('mixed')},
      'cascade': {'drafter': DrafterConfig('cascade')},
  }
  tables = ngram_tables(pair.vocabulary)
  for name, table in tables.items():
    drafters[name] = {'drafter': DrafterConfig('ngram'), 'ngram_table': table}
  drafters['bigram cascade'] = {
      'drafter': DrafterConfig('cascade', cascade='ngram'), 'ngram_table': tables['bigram']}
  settings = [(0.0, None), (1.0, 'token_wise'), (1.0, 'block')]
  examples = {
      task: [measure.encode(pair, *text) for text in tasks.spread(tasks.examples(
          tasks.read_pairs(tasks.HELD_OUT), task), args.num_sentences)]
      for task in tasks.PREFIXES
  }
  records = []
  for name, choice in drafters.items():
    for temperature, rule in settings:
      chosen = dataclasses.replace(pair, verification=VerificationRule(rule), **choice)
      for gamma in args.gammas:
        for task, texts in examples.items():
          found = measure.measure_task(
              chosen, task, texts, [], StepTimes(1, 1, 1, 1, gamma), gamma=gamma,
              temperature=temperature, repeats=args.repeats)
          records.append({
              'drafter': name, 'temperature': temperature, 'verification': rule or 'greedy',
              'gamma': gamma, 'task': task, 'alpha': round(found.alpha, 3),
              'tokens_a_round': round(found.tokens_per_round, 2), 'factor': round(found.factor, 2),
          })
          print(records[-1], flush=True)
  args.folder.mkdir(parents=True, exist_ok=True)
  (args.folder / 'drafters.json').write_text(json.dumps(records, indent=1) + '\n')
  (args.folder / 'drafters.md').write_text(markdown(records, len(examples['restoration'])))


def markdown(records, sentences):
  """The records as a Markdown table."""
  columns = ('drafter', 'temperature', 'verification', 'gamma', 'task', 'alpha', 'tokens_a_round',
             'factor')
  lines = [
      f'{sentences} sentences of each task, batch 1. alpha: accepted / judged drafts. factor: '
      'speed over plain decoding. The last column is alpha in the paper, EnDe at T = 0 and 1.', '',
      '| ' + ' | '.join((*columns, 'paper')) + ' |',
      '| ' + '--- | ' * (len(columns) + 1),
  ]
  for record in records:
    paper = PAPER.get(record['drafter'], '') if record['task'] == 'translation' else ''
    lines.append('| ' + ' | '.join(str(record[name]) for name in columns) + f' | {paper} |')
  return '\n'.join(lines) + '\n'


if __name__ == '__main__':
  main()
