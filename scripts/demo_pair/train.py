"""Trains the demo's target or draft; interrupt and start again at will.

    python scripts/demo_pair/train.py target --dir runs/target
    python scripts/demo_pair/train.py draft --dir runs/draft --teacher runs/target

The draft learns from the target's distributions on the same sentences. Both write `state.msgpack`
(everything a resumed run needs) and `log.jsonl` (step, seconds, losses) into `--dir`.
"""

import argparse
import json
import pathlib
import time

import jax
import numpy as np
import sentencepiece

from speculative_t5x import training
from speculative_t5x.demo import tasks
from speculative_t5x.network import T5Config, Transformer

DATA = pathlib.Path(__file__).parent / 'data'

CONFIGS = {
    'target': T5Config(
        vocab_size=4096, emb_dim=256, num_heads=4, head_dim=64, num_encoder_layers=2,
        num_decoder_layers=6, mlp_dim=512, mlp_activations=('gelu', 'linear'),
        logits_via_embedding=True,
    ),
    'draft': T5Config(
        vocab_size=4096, emb_dim=128, num_heads=4, head_dim=32, num_encoder_layers=2,
        num_decoder_layers=1, mlp_dim=256, mlp_activations=('gelu', 'linear'),
        logits_via_embedding=True,
    ),
}


def corpus(vocabulary, paths, repeat_restoration=1):
  """Token ids `(inputs, targets)` of both tasks."""
  pairs = [pair for path in paths for pair in tasks.read_pairs(path)]
  texts = tasks.examples(pairs, 'restoration') * repeat_restoration
  texts += tasks.examples(pairs, 'translation')
  encode = lambda side: vocabulary.encode([text[side] for text in texts], add_eos=True)
  return list(zip(encode(0), encode(1), strict=True))


def main():
  """Parses arguments and trains until `--steps`."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('model', choices=CONFIGS)
  parser.add_argument('--dir', required=True, type=pathlib.Path)
  parser.add_argument('--teacher', type=pathlib.Path, help='folder of the trained target')
  parser.add_argument('--steps', type=int, default=4000)
  parser.add_argument('--learning_rate', type=float, default=0.02)
  parser.add_argument('--tokens_per_batch', type=int, default=1024)
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args()

  vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(tasks.VOCABULARY))
  train = corpus(vocabulary, sorted(DATA.glob('train_*.tsv.gz')))
  held_out = {
      task: training.batches(
          [tuple(vocabulary.encode(list(pair), add_eos=True))
           for pair in tasks.examples(
               tasks.read_pairs(tasks.ASSETS / 'data' / 'validation_libreoffice.tsv.gz'), task)],
          512, 0, 0)
      for task in tasks.PREFIXES
  }
  module = Transformer(CONFIGS[args.model])
  config = training.TrainConfig(
      learning_rate=args.learning_rate, total_steps=args.steps,
      tokens_per_batch=args.tokens_per_batch, seed=args.seed,
  )
  state = training.init_state(module, config)
  saved = args.dir / 'state.msgpack'
  if saved.exists():
    state = training.load_state(saved, state)
  teacher, teacher_params = None, None
  if args.teacher:
    target = Transformer(CONFIGS['target'])
    teacher = lambda params, *tokens: target.apply({'params': params}, *tokens)
    teacher_params = training.load_state(
        args.teacher / 'state.msgpack', training.init_state(target, config)).params
  train_step = training.make_train_step(module, config, teacher)
  count = sum(x.size for x in jax.tree.leaves(state.params))
  print(f'{args.model}: {count:,} parameters, {len(train):,} examples', flush=True)
  args.dir.mkdir(parents=True, exist_ok=True)
  started, losses = time.time(), []
  stream = training.stream(train, config, int(state.step))
  for step in range(int(state.step) + 1, args.steps + 1):
    state, loss = train_step(state, next(stream), teacher_params)
    losses.append(loss)
    if step % 100 == 0 or step == args.steps:
      record = {'step': step, 'seconds': round(time.time() - started, 1),
                'train_loss': round(float(np.mean(losses)), 4)}
      losses = []
      if step % 500 == 0 or step == args.steps:
        training.save_state(saved, state)
        for task, found in held_out.items():
          loss, accuracy = training.evaluate(module, state.params, found)
          record[task] = {'loss': round(loss, 4), 'accuracy': round(accuracy, 4)}
      with (args.dir / 'log.jsonl').open('a') as log:
        log.write(json.dumps(record) + '\n')
      print(record, flush=True)


if __name__ == '__main__':
  main()
