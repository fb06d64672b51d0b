"""What distillation does for the demo's draft: alpha against steps, ten ways of training it.

    python scripts/demo_pair/distil.py --dir runs/distil --steps 3000

The draft is drawn from one seed and trained for as many steps, at one learning rate and batch
size, on references alone, and with each divergence on references, on what the target wrote and on
what the draft itself writes, both at temperature 1. Alpha is measured on inputs of both tasks that
were not trained on, along the target's texts at T = 0 and T = 1.

Selection: of the nine distilled drafts, the one whose mean of both alphas on the validation inputs
is highest at the last step. What it is compared on is the test inputs, which chose nothing.

Writes `results/distil.json` and `results/distil.png` beside this script, or in `--results`. Start
it again to go on.
"""

import argparse
import json
import pathlib

import corpus
import jax
import jax.numpy as jnp

from speculative_t5x import gin_command, plots
from speculative_t5x.demo import tasks
from speculative_t5x.demo.__main__ import load_demo_pair
from speculative_t5x.distil import __main__ as command
from speculative_t5x.distil import evaluation, examples, generation
from speculative_t5x.distil.divergences import DIVERGENCES
from speculative_t5x.distil.recipe import EXAMPLES
from speculative_t5x.pair import load_model
from speculative_t5x.sampling import SamplingRule

HERE = pathlib.Path(__file__).parent
LENGTHS = {'inputs': 128, 'targets': 128}
BUCKETS = examples.buckets_of(LENGTHS)
TEMPERATURES = (0.0, 1.0)
ALONE = 'references alone'
SOURCES = {'validation': tasks.VALIDATION, 'test': tasks.HELD_OUT}


def runs():
  """The gin settings of each run, by name."""
  found = {ALONE: {'EXAMPLES': 'references', 'REFERENCE_WEIGHT': 1.0}}
  for divergence in DIVERGENCES:
    for source in EXAMPLES:
      found[f'{divergence}, {source}'] = {'EXAMPLES': source, 'DIVERGENCE': divergence}
  return found


class Alpha:
  """Alpha of any checkpoint on the inputs of both sources."""

  def __init__(self, pair, folder, count, batch_size):
    """Lets the target write its texts, which `folder` keeps."""
    self._target = pair.target
    self._batches, self._programs = {}, {}
    draft = pair.draft.module
    for temperature in TEMPERATURES:
      rule = SamplingRule(temperature)
      self._programs[temperature] = evaluation.make_alpha(
          pair.target.module, draft, pair.vocabulary.size, rule, rule)
      writer = type(pair)(pair.target, pair.draft, pair.vocabulary, pair.gamma, rule)
      for source, path in SOURCES.items():
        ids = [[*pair.vocabulary.encode(text), pair.vocabulary.eos_id]
               for text, _ in corpus.spread(path, count)]
        ids = [row for row in ids if len(row) <= LENGTHS['inputs']]
        written = generation.target_texts(
            writer, ids, folder / f'{source}_{temperature:g}',
            {'inputs_sha256': examples.digest(ids), 'rule': str(rule)}, batch_size=batch_size,
            buckets=BUCKETS, seed=0, place=jnp.asarray, tell=lambda *_: None)
        self._batches[source, temperature] = evaluation.held_out_batches(
            list(zip(ids, written, strict=True)), batch_size, BUCKETS)

  def __call__(self, checkpoint, source):
    """`{'T=0': alpha, 'T=1': alpha}` of a checkpoint."""
    params = load_model(str(checkpoint)).params
    return {
        f'T={temperature:g}': round(self._programs[temperature](
            self._target.params, params, self._batches[source, temperature]), 4)
        for temperature in TEMPERATURES}


def arguments(args, settings, folder):
  """The command line of one run."""
  period = max(1, args.steps // args.points)
  settings = {
      **settings, 'TEMPERATURE': 1.0, 'TRAIN_STEPS': args.steps, 'SAVE_PERIOD': period,
      'EVAL_PERIOD': period, 'LOG_PERIOD': period, 'WARMUP_STEPS': min(100, args.steps // 10),
      'BATCH_SIZE': args.batch_size, 'LEARNING_RATE': args.learning_rate,
      'NUM_HELD_OUT': 2 * args.held_out, 'TARGET_OUTPUTS_DIR': str(args.dir / 'target_outputs'),
      # Drafting with the packaged draft would be faster, and no less exact; this is plainer.
      'DRAFT_CHECKPOINT_PATH': None,
  }
  return [
      '--gin_file=gin_configs/examples/demo_distil.gin', f'--input={args.dir / "train.jsonl"}',
      f'--held_out={args.dir / "validation.jsonl"}', f'--output_dir={folder}',
      *(f'--gin.{name}={value!r}' for name, value in settings.items())]


def draw(report, path):
  """Validation alpha against steps, a panel a temperature."""
  from matplotlib import figure

  found = figure.Figure(figsize=(12, 5), layout='constrained')
  panels = found.subplots(1, len(TEMPERATURES))
  styles = dict(zip(EXAMPLES, ('-', '--', ':'), strict=True))
  for panel, temperature in zip(panels, TEMPERATURES, strict=True):
    for name, run in report['runs'].items():
      divergence, _, source = name.partition(', ')
      style = {'color': 'black', 'linewidth': 2.5} if name == ALONE else {
          'color': f'C{list(DIVERGENCES).index(divergence)}', 'linestyle': styles[source]}
      panel.plot(run['steps'], [x[f'T={temperature:g}'] for x in run['validation']], label=name,
                 **style)
    panel.set(title=f'Held-out alpha, T = {temperature:g}', xlabel='step', ylabel='alpha')
    panel.grid(alpha=0.3)
  panels[0].legend(fontsize='small')
  plots.save(panels[0], path)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--dir', required=True, type=pathlib.Path, help='of the runs')
  parser.add_argument('--results', type=pathlib.Path, default=HERE / 'results')
  parser.add_argument('--steps', type=int, default=3000)
  parser.add_argument('--points', type=int, default=10, help='of each curve; default: 10')
  parser.add_argument('--inputs', type=int, default=12_000, help='of each task; default: 12000')
  parser.add_argument('--held_out', type=int, default=64, help='of each task; default: 64')
  parser.add_argument('--batch_size', type=int, default=32)
  parser.add_argument('--learning_rate', type=float, default=0.02)
  parser.add_argument('--only', nargs='+', help='names of runs; default: all')
  args = parser.parse_args()
  chosen = {name: x for name, x in runs().items() if args.only is None or name in args.only}
  args.dir.mkdir(parents=True, exist_ok=True)
  texts = corpus.choose(args.inputs)
  corpus.write(args.dir / 'train.jsonl', texts)
  corpus.write(args.dir / 'validation.jsonl', corpus.spread(tasks.VALIDATION, args.held_out))
  pair = load_demo_pair()
  alpha = Alpha(pair, args.dir / 'texts', args.held_out, args.batch_size)
  report = {
      'settings': {
          'target': pathlib.Path(gin_command.macro('CHECKPOINT_PATH')).name, 'steps': args.steps,
          'inputs': len(texts), 'held_out': 2 * args.held_out, 'batch_size': args.batch_size,
          'learning_rate': args.learning_rate, 'backend': jax.default_backend()},
      'runs': {},
  }
  for name, settings in chosen.items():
    folder = args.dir / name.replace(', ', '_').replace(' ', '_')
    print(f'== {name}', flush=True)
    if command.main(arguments(args, settings, folder)):
      raise SystemExit(f'{name}: failed')
    saved = sorted(folder.glob('checkpoint_*'), key=lambda p: int(p.name.split('_')[1]))
    report['runs'][name] = {
        'steps': [int(path.name.split('_')[1]) for path in saved],
        'validation': [alpha(path, 'validation') for path in saved],
        'test': alpha(saved[-1], 'test'),
    }
    print(name, report['runs'][name]['validation'][-1], flush=True)
  distilled = [name for name in report['runs'] if name != ALONE]
  if distilled:
    selected = max(distilled, key=lambda name: sum(
        report['runs'][name]['validation'][-1].values()))
    report['selection'] = {
        'rule': 'highest mean of both validation alphas at the last step, references alone apart',
        'selected': selected,
        'test': {name: report['runs'][name]['test'] for name in (selected, ALONE)
                 if name in report['runs']},
    }
  args.results.mkdir(parents=True, exist_ok=True)
  text = json.dumps(report, indent=1) + '\n'
  (args.results / 'distil.json').write_text(text, encoding='utf-8')
  draw(report, args.results / 'distil.png')
  print(json.dumps(report.get('selection'), indent=1))


if __name__ == '__main__':
  main()
