"""How often bfloat16 changes a greedy token of speculative decoding, and by how near a tie.

    python scripts/demo_pair/bfloat16.py scripts/demo_pair/results/bfloat16.json

Several tokens in one call and one at a time round differently in bfloat16, so that speculative and
plain greedy decoding may part where two tokens are nearly tied. Every difference is looked at: the
margin is what the two tokens' logits differ by, in float32, on the text before them. One at or
above `BOUND` is no tie, and the command fails.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from speculative_t5x import training
from speculative_t5x.demo import tasks
from speculative_t5x.demo.__main__ import load_demo_pair
from speculative_t5x.measure import report
from speculative_t5x.network import Transformer
from speculative_t5x.pair import Model

LENGTH = 96
# What rounding the activations to eight bits may move the difference of two logits by: logits
# between -20 and 20, a few roundings of 2^-9 of them each.
BOUND = 0.1


def in_bfloat16(model):
  """The model with weights and activations in bfloat16."""
  config = dataclasses.replace(model.module.config, dtype='bfloat16')
  return Model(
      Transformer(config), jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params))


def margins(pair, inputs, plain, fast):
  """Of each row that parts: the place, and the margin between the two tokens there."""
  logits = jax.jit(pair.target.module.apply)(
      {'params': pair.target.params}, inputs, np.pad(plain[:, :-1], ((0, 0), (1, 0))))
  logits = np.asarray(logits, np.float32)
  found = []
  for row, (one, other) in enumerate(zip(plain, fast, strict=True)):
    differs = np.flatnonzero(one != other)
    if differs.size:
      place = int(differs[0])
      at = logits[row, place]
      found.append((place, float(at[one[place]] - at[other[place]])))
  return found


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('output', type=pathlib.Path)
  parser.add_argument('--num_sentences', type=int, default=500)
  parser.add_argument('--gamma', type=int, default=7)
  args = parser.parse_args()
  pair = load_demo_pair()
  low = dataclasses.replace(pair, target=in_bfloat16(pair.target), draft=in_bfloat16(pair.draft))
  records = []
  for task in tasks.PREFIXES:
    texts = [text for text, _ in tasks.spread(
        tasks.examples(tasks.read_pairs(tasks.HELD_OUT), task), args.num_sentences)]
    ids = [[*pair.vocabulary.encode(text), pair.vocabulary.eos_id] for text in texts]
    ids = [row for row in ids if len(row) <= LENGTH]
    found, tokens, sentences, differs_from_float32 = [], 0, 0, 0
    for start in range(0, len(ids) - 15, 16):
      inputs = training.pad(ids[start : start + 16], LENGTH)
      decode = lambda pair, gamma, inputs=inputs: np.asarray(
          pair.predict(inputs, max_length=LENGTH, gamma=gamma).sequences[:, 0])
      plain, fast = decode(low, 0), decode(low, args.gamma)
      # Margins in float32, on the weights that bfloat16 decoding has.
      exact = dataclasses.replace(low, target=Model(
          pair.target.module,
          jax.tree.map(lambda x: x.astype(jnp.float32), low.target.params)))
      found += margins(exact, inputs, plain, fast)
      tokens += int(np.count_nonzero(plain))
      sentences += len(plain)
      differs_from_float32 += int(np.any(plain != decode(pair, 0), axis=1).sum())
    records.append({
        'task': task, 'gamma': args.gamma, 'sentences': sentences, 'tokens': tokens,
        'different_sentences': len(found),
        'largest_margin': max((abs(margin) for _, margin in found), default=0.0),
        'margins': [round(margin, 4) for _, margin in found],
        'plain_differs_from_float32': differs_from_float32,
    })
    print(records[-1], flush=True)
  args.output.write_text(json.dumps(
      {'environment': report.environment(), 'bound': BOUND, 'records': records}, indent=1) + '\n')
  largest = max(record['largest_margin'] for record in records)
  if largest >= BOUND:
    print(f'error: margin: expected less than {BOUND}, found {largest}', file=sys.stderr)
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main())
