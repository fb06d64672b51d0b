"""Trains the decoder-only pair's target or draft; interrupt and start again at will.

    python scripts/lm_pair/train.py target --dir runs/lm_target
    python scripts/lm_pair/train.py draft --dir runs/lm_draft --teacher runs/lm_target

A text is one sentence of the English side of scripts/demo_pair/data, behind the start token and
with EOS. The draft learns from the target's distributions on the same sentences. Both write
`state.msgpack` (everything a resumed run needs) and `log.jsonl` (step, seconds, losses) into
`--dir`. The networks are those of gin_configs/models/demo_lm.gin.
"""

import argparse
import dataclasses
import pathlib

import gin
import jax
import jax.numpy as jnp
import optax
import sentencepiece

from speculative_t5x import paths, training
from speculative_t5x.demo import tasks
from speculative_t5x.network import DecoderOnly, T5Config

DATA = pathlib.Path(__file__).parents[1] / 'demo_pair' / 'data'


def network_config(model: str, dropout_rate: float = 0.0) -> T5Config:
  """The `T5Config` of 'target' or 'draft' in the pair's gin file."""
  if not gin.config_is_locked():
    gin.add_config_file_search_path(str(paths.PACKAGES))
    gin.parse_config_file('gin_configs/models/demo_lm.gin')
    gin.finalize()
  config = gin.get_configurable(f'{model}/T5Config')()
  return dataclasses.replace(config, dropout_rate=dropout_rate)


def sentences(*files: pathlib.Path) -> list[str]:
  """The different English sentences of the files, in their order."""
  return list(dict.fromkeys(
      english for path in files for english, _ in tasks.read_pairs(path) if english.strip()))


def encode(vocabulary, texts):
  """Examples as `training` takes them: a decoder-only network's inputs are its shifted targets."""
  return [([0, *ids[:-1]], ids) for ids in vocabulary.encode(texts, add_eos=True)]


def rows_of(tokens_per_batch):
  """Rows of a bucket's batch, so that every batch has as many tokens."""
  return lambda bucket: max(1, tokens_per_batch // bucket[1])


def distillation_loss(draft, target):
  """Cross-entropy a token of the draft against the target's distributions (forward KL)."""
  def loss_fn(params, batch, rng, target_params):
    logits = draft.apply(
        {'params': params}, batch.inputs, enable_dropout=True, rngs={'dropout': rng})
    wanted = jax.nn.softmax(target.apply({'params': target_params}, batch.inputs))
    mask = batch.targets > 0
    return jnp.sum(optax.softmax_cross_entropy(logits, wanted) * mask) / jnp.sum(mask)

  return loss_fn


def main():
  """Parses arguments and trains until `--steps`."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('model', choices=('target', 'draft'))
  parser.add_argument('--dir', required=True, type=pathlib.Path)
  parser.add_argument('--teacher', type=pathlib.Path, help='folder of the trained target')
  parser.add_argument('--dropout_rate', type=float, help='default: .1 for the target, else 0')
  parser.add_argument('--steps', type=int, default=4000)
  parser.add_argument('--learning_rate', type=float, default=0.02)
  parser.add_argument('--tokens_per_batch', type=int, default=1024)
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args()
  if (args.model == 'draft') != (args.teacher is not None):
    parser.error('expected --teacher for the draft, and for the draft alone')

  vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(tasks.VOCABULARY))
  train = encode(vocabulary, sentences(*sorted(DATA.glob('train_*.tsv.gz'))))
  held_out = training.batches(encode(vocabulary, sentences(tasks.VALIDATION)), rows_of(512), 0, 0)
  dropout_rate = args.dropout_rate
  if dropout_rate is None:
    dropout_rate = 0.1 if args.model == 'target' else 0.0
  module = DecoderOnly(network_config(args.model, dropout_rate))
  config = training.TrainConfig(
      learning_rate=args.learning_rate, total_steps=args.steps, seed=args.seed)
  state = training.init_state(module, config)
  saved = args.dir / training.STATE
  if saved.exists():
    state = training.load_state(saved, state)
  loss_fn, loss_args = training.reference_loss(module), ()
  if args.teacher:
    target = DecoderOnly(network_config('target'))
    like = training.init_state(target, config)
    loss_fn = distillation_loss(module, target)
    loss_args = (training.load_state(args.teacher / training.STATE, like).params,)
  train_step = training.make_train_step(loss_fn, config)
  count = sum(x.size for x in jax.tree.leaves(state.params))
  print(f'{args.model}: {count:,} parameters, {len(train):,} sentences of '
        f'{sum(len(targets) for _, targets in train):,} tokens', flush=True)

  def evaluate(params):
    return {'validation': training.evaluate(module, params, held_out)}

  training.fit(
      state, args.dir, train_step,
      training.stream(train, rows_of(args.tokens_per_batch), args.seed, int(state.step)),
      *loss_args, total_steps=args.steps, evaluate_params=evaluate)


if __name__ == '__main__':
  main()
