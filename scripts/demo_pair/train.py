"""Trains the demo's target on references; interrupt and start again at will.

    python scripts/demo_pair/train.py --dir runs/target

Writes `state.msgpack` (everything a resumed run needs), the last few states as `state_N.msgpack`
and `log.jsonl` (step, seconds, losses) into `--dir`. The network is that of
gin_configs/models/demo.gin. The draft learns from the target: see make.sh.
"""

import argparse
import dataclasses
import pathlib

import gin
import jax
import sentencepiece

from speculative_t5x import paths, training
from speculative_t5x.demo import tasks
from speculative_t5x.network import T5Config, Transformer

DATA = pathlib.Path(__file__).parent / 'data'


def network_config(model: str, dropout_rate: float = 0.0) -> T5Config:
  """The `T5Config` of 'target' or 'draft' in the demo's gin file."""
  if not gin.config_is_locked():
    gin.add_config_file_search_path(str(paths.PACKAGES))
    gin.parse_config_file('gin_configs/models/demo.gin')
    gin.finalize()
  config = gin.get_configurable(f'{model}/T5Config')()
  return dataclasses.replace(config, dropout_rate=dropout_rate)


def corpus_texts():
  """`(inputs, targets)` texts of both tasks."""
  pairs = [pair for path in sorted(DATA.glob('train_*.tsv.gz')) for pair in tasks.read_pairs(path)]
  return [text for task in tasks.PREFIXES for text in tasks.examples(pairs, task)]


def encode(vocabulary, texts):
  """Token ids of `(inputs, targets)` texts."""
  side = lambda index: vocabulary.encode([text[index] for text in texts], add_eos=True)
  return list(zip(side(0), side(1), strict=True))


def validation_batches(vocabulary, task):
  """The validation sentences of a task, as `training.evaluate` takes them."""
  pairs = tasks.read_pairs(tasks.VALIDATION)
  return training.batches(encode(vocabulary, tasks.examples(pairs, task)), rows_of(512), 0, 0)


def rows_of(tokens_per_batch):
  """Rows of a bucket's batch, so that a side has as many tokens in every bucket."""
  return lambda bucket: max(1, tokens_per_batch // max(bucket))


def main():
  """Parses arguments and trains until `--steps`."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--dir', required=True, type=pathlib.Path)
  parser.add_argument('--dropout_rate', type=float, default=0.0)
  parser.add_argument('--steps', type=int, default=4000)
  parser.add_argument('--learning_rate', type=float, default=0.02)
  parser.add_argument('--tokens_per_batch', type=int, default=1024)
  parser.add_argument('--keep', type=int, default=3, help='states to average; default: 3')
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args()

  vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(tasks.VOCABULARY))
  train = encode(vocabulary, corpus_texts())
  held_out = {task: validation_batches(vocabulary, task) for task in tasks.PREFIXES}
  module = Transformer(network_config('target', args.dropout_rate))
  config = training.TrainConfig(
      learning_rate=args.learning_rate, total_steps=args.steps, seed=args.seed)
  state = training.init_state(module, config)
  saved = args.dir / training.STATE
  if saved.exists():
    state = training.load_state(saved, state)
  train_step = training.make_train_step(training.reference_loss(module), config)
  count = sum(x.size for x in jax.tree.leaves(state.params))
  print(f'{count:,} parameters, {len(train):,} examples', flush=True)

  def evaluate(params):
    return {task: training.evaluate(module, params, found) for task, found in held_out.items()}

  training.fit(
      state, args.dir, train_step,
      training.stream(train, rows_of(args.tokens_per_batch), args.seed, int(state.step)),
      total_steps=args.steps, evaluate_params=evaluate, keep=args.keep)


if __name__ == '__main__':
  main()
