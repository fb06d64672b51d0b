"""Which shape of draft makes the demo's target fastest: trains several alike, and times them.

    python scripts/demo_pair/shapes.py --dir runs/shapes --target runs/export/target/checkpoint_N

Every shape is drawn from one seed and trained by `python -m speculative_t5x.distil` for as many
steps on the texts of the corpus, with the target's distributions. Then plain decoding and every
shape at every gamma decode the same validation sentences of both tasks in turns, greedily, one by
one.

Selection: the shape with the largest geometric mean of its speed factors over plain decoding on
the two tasks, each at the gamma that is best there. Test sentences choose nothing.

Writes `results/shapes.json` beside this script, or into `--results`. Start it again to go on with
training; `--train_only NAME …` trains those and times nothing. Leave the machine alone while it
times.
"""

import argparse
import dataclasses
import json
import math
import pathlib

import adaptive
import corpus
import jax
import train

from speculative_t5x.demo import measure, tasks
from speculative_t5x.demo.__main__ import load_demo_pair
from speculative_t5x.distil import __main__ as command
from speculative_t5x.pair import Model, load_model

HERE = pathlib.Path(__file__).parent

# What differs from the draft of gin_configs/models/demo.gin; `head_dim` is 32 throughout.
SHAPES = {
    '128 wide, 2 + 1 layers': {'emb_dim': 128, 'mlp_dim': 256, 'num_encoder_layers': 2,
                               'num_decoder_layers': 1},
    '128 wide, 4 + 1 layers': {'emb_dim': 128, 'mlp_dim': 256, 'num_encoder_layers': 4,
                               'num_decoder_layers': 1},
    '128 wide, 2 + 2 layers': {'emb_dim': 128, 'mlp_dim': 256, 'num_encoder_layers': 2,
                               'num_decoder_layers': 2},
    '192 wide, 2 + 1 layers': {'emb_dim': 192, 'mlp_dim': 256, 'num_encoder_layers': 2,
                               'num_decoder_layers': 1},
}


def folder_of(args, name):
  """Where a shape is trained."""
  return args.dir / name.replace(',', '').replace(' + ', '_').replace(' ', '_')


def fit(args, name):
  """Trains a shape, or goes on with it."""
  settings = {
      'CHECKPOINT_PATH': str(args.target), 'DRAFT_CHECKPOINT_PATH': None, 'EXAMPLES': 'references',
      'TRAIN_STEPS': args.steps, 'SAVE_PERIOD': args.steps, 'NUM_HELD_OUT': 128,
      'WARMUP_STEPS': min(100, args.steps // 10),
      **{f'draft/speculative_t5x.T5Config.{key}': value for key, value in SHAPES[name].items()},
  }
  print(f'== {name}', flush=True)
  if command.main([
      '--gin_file=gin_configs/examples/demo_distil.gin', f'--input={args.dir / "train.jsonl"}',
      f'--held_out={args.dir / "validation.jsonl"}', f'--output_dir={folder_of(args, name)}',
      *(f'--gin.{key}={value!r}' for key, value in settings.items())]):
    raise SystemExit(f'{name}: failed')


def pairs_of(args):
  """The target with each shape."""
  packaged = load_demo_pair()
  target = Model(packaged.target.module, load_model(str(args.target)).params)
  found = {}
  for name, shape in SHAPES.items():
    config = dataclasses.replace(train.network_config('draft'), **shape)
    draft = load_model(str(folder_of(args, name) / f'checkpoint_{args.steps}'), config)
    found[name] = dataclasses.replace(packaged, target=target, draft=draft)
  return found


def best_of(factors):
  """The entry with the highest factor."""
  return max(factors, key=lambda entry: entry['factor'])


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--dir', required=True, type=pathlib.Path, help='of the runs')
  parser.add_argument('--target', required=True, type=pathlib.Path, help='its checkpoint')
  parser.add_argument('--results', type=pathlib.Path, default=HERE / 'results')
  parser.add_argument('--steps', type=int, default=2500)
  parser.add_argument('--train_only', nargs='+', choices=SHAPES, metavar='NAME', help='times none')
  parser.add_argument('--gammas', type=int, nargs='+', default=[2, 3, 5, 7])
  parser.add_argument('--num_sentences', type=int, default=16, help='of each task to time')
  parser.add_argument('--repeats', type=int, default=3)
  args = parser.parse_args()
  args.dir.mkdir(parents=True, exist_ok=True)
  corpus.write(args.dir / 'train.jsonl', corpus.choose())
  corpus.write(args.dir / 'validation.jsonl', corpus.spread(tasks.VALIDATION, 64))
  for name in args.train_only or SHAPES:
    fit(args, name)
  if args.train_only:
    return

  pairs = pairs_of(args)
  ways = {'plain': (next(iter(pairs.values())), 0)}
  ways |= {(name, gamma): (pair, gamma) for name, pair in pairs.items() for gamma in args.gammas}
  report = {
      'settings': {
          'steps': args.steps, 'sentences': args.num_sentences, 'repeats': args.repeats,
          'backend': jax.default_backend()},
      'shapes': {
          name: {'parameters': pair.draft.num_parameters, 'tasks': {}}
          for name, pair in pairs.items()},
  }
  for task in tasks.PREFIXES:
    sentences = tasks.examples(tasks.read_pairs(tasks.VALIDATION), task)
    examples = [measure.encode(ways['plain'][0], *text)
                for text in tasks.spread(sentences, args.num_sentences)]
    found = adaptive.compare(ways, examples, 0.0, args.repeats)
    for name in pairs:
      report['shapes'][name]['tasks'][task] = [
          {'gamma': gamma, **found[name, gamma]} for gamma in args.gammas]
      print(task, name, report['shapes'][name]['tasks'][task], flush=True)
  for name, record in report['shapes'].items():
    log = (folder_of(args, name) / 'log.jsonl').read_text(encoding='utf-8').splitlines()
    record['alpha'] = [x for x in map(json.loads, log) if 'alpha' in x][-1]['alpha']
    record['factor'] = round(math.prod(
        best_of(factors)['factor'] for factors in record['tasks'].values()
    ) ** (1 / len(record['tasks'])), 3)
  report['selected'] = max(pairs, key=lambda name: report['shapes'][name]['factor'])
  args.results.mkdir(parents=True, exist_ok=True)
  (args.results / 'shapes.json').write_text(json.dumps(report, indent=1) + '\n', encoding='utf-8')
  print(report['selected'])


if __name__ == '__main__':
  main()
