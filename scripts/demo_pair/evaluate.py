"""Measures the demo pair on the 500 held-out sentences; writes JSON.

python scripts/demo_pair/evaluate.py speculative_t5x/demo/evaluation.json

For each task: loss on the validation references; target and draft on their own, greedy, and the
target's beam search of four (restoration: sentences restored exactly, those whose words are right
whatever their case and punctuation, and the character error rate; translation: BLEU and chrF),
whether greedy speculative outputs equal plain ones at every gamma and batch size, and the
acceptance rate and tokens a round at T = 0 and T = 1. The samples are the first ten sentences.
"""

import argparse
import dataclasses
import json
import pathlib

import numpy as np
import sacrebleu
import sentencepiece
import train

from speculative_t5x import training
from speculative_t5x.demo import tasks
from speculative_t5x.demo.__main__ import load_demo_pair
from speculative_t5x.pair import Pair

# Gammas at which every output is compared, and those at which acceptance is measured.
COMPARED = (1, 4, 7)
MEASURED = tuple(range(1, 9))
# Width and brevity penalty of the beam search; the latter is T5X's default.
BEAMS, BEAM_ALPHA = 4, 0.6
# Longest input and output in tokens, in two sizes so that short sentences do not pay for long.
BUCKETS = ((72, 96), (256, 320))


def edit_distance(a: str, b: str) -> int:
  """Levenshtein distance in characters."""
  row = np.arange(len(b) + 1)
  for i, x in enumerate(a, 1):
    different = np.array([x != y for y in b], int)
    best = np.minimum(row[1:] + 1, row[:-1] + different)
    # Insertions: the running minimum of what stands to the left.
    row = np.concatenate([[i], best])
    row = np.minimum.accumulate(row - np.arange(len(row))) + np.arange(len(row))
  return int(row[-1])


def decode(pair, encoded, batch_size, **settings):
  """Outputs and statistics of all sentences, in order; of several decodes the last, the best."""
  sequences = [None] * len(encoded)
  totals = dict.fromkeys(('accepted', 'rejected', 'emitted', 'rounds'), 0)
  for shortest, (inputs, outputs) in zip((0, BUCKETS[0][0] + 1), BUCKETS, strict=True):
    chosen = [i for i, ids in enumerate(encoded) if shortest <= len(ids) <= inputs]
    for start in range(0, len(chosen), batch_size):
      rows = chosen[start : start + batch_size]
      batch = training.pad([encoded[i] for i in rows] + [[1]] * (batch_size - len(rows)), inputs)
      index = np.array(rows + [0] * (batch_size - len(rows)))
      result = pair.predict(batch, max_length=outputs, example_index=index, **settings)
      for j, i in enumerate(rows):
        sequences[i] = np.trim_zeros(np.asarray(result.sequences[j, -1]), 'b').tolist()
      for name in totals:
        totals[name] += int(np.sum(getattr(result.statistics, name)[: len(rows)]))
  return sequences, totals


def quality(task, outputs, references):
  """Scores of a model's outputs."""
  if task == 'translation':
    return {'bleu': round(sacrebleu.corpus_bleu(outputs, [references]).score, 2),
            'chrf': round(sacrebleu.corpus_chrf(outputs, [references]).score, 2)}
  errors = sum(edit_distance(a, b) for a, b in zip(outputs, references, strict=True))
  agree = lambda form: sum(form(a) == form(b) for a, b in zip(outputs, references, strict=True))
  return {'exact': agree(str), 'right_words': agree(tasks.spoken),
          'character_error_rate': round(errors / sum(map(len, references)), 4)}


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('output', type=pathlib.Path)
  parser.add_argument('--num_sentences', type=int, default=500)
  parser.add_argument('--batch_sizes', type=int, nargs='+', default=[16, 1])
  args = parser.parse_args()
  pair = load_demo_pair()
  draft = Pair(target=pair.draft, draft=None, vocabulary=pair.vocabulary, gamma=0)
  beams = dataclasses.replace(pair, gamma=0, num_decodes=BEAMS, beam_alpha=BEAM_ALPHA)
  vocabulary = pair.vocabulary
  pieces = sentencepiece.SentencePieceProcessor(model_file=str(tasks.VOCABULARY))
  report = {}
  for task in tasks.PREFIXES:
    examples = tasks.examples(tasks.read_pairs(tasks.HELD_OUT), task)[: args.num_sentences]
    references = [target for _, target in examples]
    encoded = [[*vocabulary.encode(text), vocabulary.eos_id] for text, _ in examples]
    validation = train.validation_batches(pieces, task)
    found = report[task] = {
        'sentences': len(examples), 'identical': {}, 'acceptance': {},
        'validation': {name: training.evaluate(model.module, model.params, validation)
                       for name, model in (('target', pair.target), ('draft', pair.draft))}}
    for batch_size in args.batch_sizes:
      plain, _ = decode(pair, encoded, batch_size, gamma=0, temperature=0.0)
      if batch_size == args.batch_sizes[0]:
        texts = lambda outputs: [vocabulary.decode(ids) for ids in outputs]
        found['target'] = quality(task, texts(plain), references)
        alone, _ = decode(draft, encoded, batch_size, gamma=0, temperature=0.0)
        found['draft'] = quality(task, texts(alone), references)
        searched, _ = decode(beams, encoded, batch_size)
        found[f'target, beam {BEAMS}'] = quality(task, texts(searched), references)
        found['examples'] = [
            {'inputs': source, 'output': output, 'reference': reference}
            for (source, reference), output in zip(examples[:10], texts(plain), strict=False)]
      is_first = batch_size == args.batch_sizes[0]
      for gamma in MEASURED if is_first else COMPARED:
        outputs, totals = decode(pair, encoded, batch_size, gamma=gamma, temperature=0.0)
        same = sum(a == b for a, b in zip(plain, outputs, strict=True))
        found['identical'][f'batch {batch_size}, gamma {gamma}'] = same
        if is_first:
          found['acceptance'][f'T=0, gamma {gamma}'] = rates(totals)
        print(task, batch_size, gamma, same, rates(totals), flush=True)
    for gamma in MEASURED:
      _, totals = decode(pair, encoded, args.batch_sizes[0], gamma=gamma, temperature=1.0)
      found['acceptance'][f'T=1, gamma {gamma}'] = rates(totals)
    text = json.dumps(report, indent=1, ensure_ascii=False) + '\n'
    args.output.write_text(text, encoding='utf-8')


def rates(totals):
  """Acceptance rate and tokens a round of summed statistics."""
  return {'alpha': round(totals['accepted'] / (totals['accepted'] + totals['rejected']), 4),
          'tokens_a_round': round(totals['emitted'] / totals['rounds'], 3)}


if __name__ == '__main__':
  main()
