"""Measures the decoder-only pair on held-out sentences; writes JSON.

python scripts/lm_pair/evaluate.py speculative_t5x/demo/lm/evaluation.json

Loss and perplexity of target and draft on the English side of the 500 test sentences, and the
decoding of continuations: the input is the first three words of each test sentence of at least six
whose first three are of letters alone, without EOS. Whether greedy speculative outputs equal plain
ones, the acceptance rate and tokens a round at T = 0 and T = 1 for every gamma from 1 to 8, and as
samples the first ten inputs, each with the greedy continuation and one at T = 1, seed 0.
"""

import argparse
import json
import math
import pathlib

import numpy as np
import sentencepiece
import train

from speculative_t5x import gin_command, infer, training
from speculative_t5x.demo import tasks
from speculative_t5x.pair import Pair, load_pair

GAMMAS = range(1, 9)
INPUT_LENGTH, OUTPUT_LENGTH = 32, 64
BATCH_SIZE = 20


def load_lm_pair() -> Pair:
  """The pair of gin_configs/models/demo_lm.gin."""
  gin_command.configure(infer.parse([
      '--gin_file=gin_configs/models/demo_lm.gin',
      '--gin_file=gin_configs/models/pair_standalone.gin']))
  return load_pair()


def beginnings(sentences: list[str], count: int) -> list[str]:
  """The first three words, of letters alone, of each sentence that has six; each once."""
  words = [sentence.split() for sentence in sentences]
  chosen = (row[:3] for row in words if len(row) >= 6 and ''.join(row[:3]).isalpha())
  return [*dict.fromkeys(map(' '.join, chosen))][:count]


def perplexity(processor, model, sentences):
  """Loss a token and what follows from it."""
  batches = training.batches(
      train.encode(processor, sentences), train.rows_of(512), 0, 0)
  found = training.evaluate(model.module, model.params, batches)
  return found | {'perplexity': round(math.exp(found['loss']), 2)}


def decode(pair, encoded, **settings):
  """Outputs and summed statistics of all inputs, in order."""
  sequences, totals = [], dict.fromkeys(('accepted', 'rejected', 'emitted', 'rounds'), 0)
  for start in range(0, len(encoded), BATCH_SIZE):
    rows = encoded[start : start + BATCH_SIZE]
    inputs = training.pad([*rows, *rows[:1] * (BATCH_SIZE - len(rows))], INPUT_LENGTH)
    index = np.array([*range(start, start + len(rows)), *[start] * (BATCH_SIZE - len(rows))])
    result = pair.predict(inputs, max_length=OUTPUT_LENGTH, example_index=index, **settings)
    for row in range(len(rows)):
      sequences.append(np.trim_zeros(np.asarray(result.sequences[row, 0]), 'b').tolist())
    for name in totals:
      totals[name] += int(np.sum(getattr(result.statistics, name)[: len(rows)]))
  return sequences, totals


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('output', type=pathlib.Path)
  parser.add_argument('--num_inputs', type=int, default=200)
  args = parser.parse_args()
  pair = load_lm_pair()
  vocabulary = pair.vocabulary
  processor = sentencepiece.SentencePieceProcessor(model_file=str(tasks.VOCABULARY))
  sentences = train.sentences(tasks.HELD_OUT)
  texts = beginnings(sentences, args.num_inputs)
  encoded = [vocabulary.encode(text) for text in texts]
  report = {'sentences': len(sentences), 'inputs': len(texts), 'identical': {}, 'acceptance': {}}
  for name in ('target', 'draft'):
    model = getattr(pair, name)
    report[name] = {
        'parameters': int(model.num_parameters),
        **perplexity(processor, model, sentences)}
  plain, _ = decode(pair, encoded, gamma=0, temperature=0.0)
  for gamma in GAMMAS:
    for temperature in (0, 1):
      outputs, totals = decode(pair, encoded, gamma=gamma, temperature=float(temperature))
      report['acceptance'][f'T={temperature}, gamma {gamma}'] = {
          'alpha': round(totals['accepted'] / (totals['accepted'] + totals['rejected']), 4),
          'tokens_a_round': round(totals['emitted'] / totals['rounds'], 3)}
      if not temperature:
        report['identical'][f'gamma {gamma}'] = sum(
            a == b for a, b in zip(plain, outputs, strict=True))
    print(gamma, report['identical'][f'gamma {gamma}'],
          report['acceptance'][f'T=0, gamma {gamma}'],
          report['acceptance'][f'T=1, gamma {gamma}'], flush=True)
  sampled, _ = decode(pair, encoded[:10], gamma=4, temperature=1.0)
  report['examples'] = [
      {'inputs': text, 'greedy': vocabulary.decode(greedy), 'sampled': vocabulary.decode(sample)}
      for text, greedy, sample in zip(texts[:10], plain, sampled, strict=False)]
  args.output.parent.mkdir(parents=True, exist_ok=True)
  args.output.write_text(
      json.dumps(report, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')


if __name__ == '__main__':
  main()
