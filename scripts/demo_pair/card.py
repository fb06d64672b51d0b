"""Writes the demo pair's model card and its learning curve from what was measured.

    python scripts/demo_pair/card.py

Reads `speculative_t5x/demo/evaluation.json` (evaluate.py), the training logs and what shapes.py
measured in `results/` beside this script; writes `speculative_t5x/demo/README.md` and
`learning_curve.png`.
"""

import json
import pathlib
import re
import string

import matplotlib
import shapes

matplotlib.use('Agg')
import matplotlib.pyplot as plt

from speculative_t5x import training
from speculative_t5x.demo import tasks

HERE = pathlib.Path(__file__).parent


def read_log(model):
  """Records of a model's training."""
  return training.read_log(HERE / 'results' / f'{model}_log.jsonl')


def draw(path):
  """How both models learnt: the target's losses, the draft's acceptance rate."""
  figure, (target, draft) = plt.subplots(1, 2, figsize=(10, 3.6), layout='constrained')
  log = read_log('target')
  target.plot([r['step'] for r in log], [r['train_loss'] for r in log], color='0.7',
              label='training, both tasks')
  for task, colour in zip(tasks.PREFIXES, ('tab:blue', 'tab:orange'), strict=True):
    measured = [r for r in log if task in r]
    target.plot([r['step'] for r in measured], [r[task]['loss'] for r in measured], color=colour,
                marker='o', markersize=3, label=f'validation, {task}')
  target.set(title='target', xlabel='step', ylabel='loss a token', ylim=(0, 4))
  target.legend()
  measured = [r for r in read_log('draft') if 'alpha' in r]
  draft.plot([r['step'] for r in measured], [r['alpha'] for r in measured], color='tab:green',
             marker='o', markersize=3)
  draft.set(title='draft, last stage', xlabel='step', ylabel='α on validation inputs, T = 0')
  for axis in (target, draft):
    axis.grid(alpha=0.3)
  figure.savefig(path, dpi=110)


def shapes_table(report):
  """Rows of the drafts that were tried: what each costs, and how fast it makes the target."""
  lines = ['| draft | parameters | α, T = 0 | ' + ' | '.join(
      f'{task}: best γ, factor' for task in tasks.PREFIXES) + ' | geometric mean |',
      '| --- |' + ' ---: |' * (3 + len(tasks.PREFIXES))]
  for name, shape in report['shapes'].items():
    best = [shapes.best_of(shape['tasks'][task]) for task in tasks.PREFIXES]
    lines.append(f'| {name} | {shape["parameters"]:,} | {shape["alpha"]:.3f} | ' + ' | '.join(
        f'{at["gamma"]}, {at["factor"]:.2f}' for at in best) + f' | {shape["factor"]:.2f} |')
  return '\n'.join(lines)


def acceptance_table(report):
  """Rows of the acceptance rate and tokens a round, for every gamma measured."""
  gammas = sorted({int(re.search(r'gamma (\d+)', name)[1])
                   for name in next(iter(report.values()))['acceptance']})
  lines = ['| α, tokens a round | ' + ' | '.join(f'γ = {gamma}' for gamma in gammas) + ' |',
           '| --- |' + ' --- |' * len(gammas)]
  for task, found in report.items():
    for temperature in (0, 1):
      cells = [found['acceptance'][f'T={temperature}, gamma {gamma}'] for gamma in gammas]
      lines.append(f'| {task}, T = {temperature} | ' + ' | '.join(
          f'{cell["alpha"]:.2f}, {cell["tokens_a_round"]:.2f}' for cell in cells) + ' |')
  return '\n'.join(lines)


def samples(report):
  """Rows of the samples: a vertical bar would end a cell."""
  lines = []
  for found in report.values():
    for example in found['examples']:
      cells = (example['inputs'], example['output'], example['reference'])
      lines.append('| ' + ' | '.join(cell.replace('|', '\\|') for cell in cells) + ' |')
  return '\n'.join(lines)


def compared(names):
  """Which gammas were compared at which batch size, of names such as 'batch 16, gamma 1'."""
  gammas = {}
  for name in names:
    batch, gamma = name.split(', gamma ')
    gammas.setdefault(batch, []).append(gamma)
  return '; '.join(f'{batch}: γ = {", ".join(found)}' for batch, found in gammas.items())


def speeds():
  """The best speed over plain decoding of each task, at T = 0, and what it is made of."""
  values = {}
  for task in tasks.PREFIXES:
    path = HERE.parent / 'benchmark' / 'results' / f'measure_{task}' / 'report.json'
    report = json.loads(path.read_text(encoding='utf-8'))
    best = max(report['gammas'], key=lambda at: at['factor'])
    values |= {
        f'{task}_factor': f'{best["factor"]:.2f}', f'{task}_gamma': best['gamma'],
        f'{task}_c': f'{report["c"]:.3f}', f'{task}_v': f'{report["v"][str(best["gamma"])]:.2f}',
        f'{task}_round': f'{best["round_seconds"] / best["predicted_round_seconds"]:.2f}'}
  return values


def main():
  report = json.loads((tasks.ASSETS / 'evaluation.json').read_text(encoding='utf-8'))
  draw(tasks.ASSETS / 'learning_curve.png')
  restoration, translation = report['restoration'], report['translation']
  identical = sorted({
      f'{count} of {found["sentences"]} ({task}, {where})' for task, found in report.items()
      for where, count in found['identical'].items() if count != found['sentences']})
  tried = json.loads((HERE / 'results' / 'shapes.json').read_text(encoding='utf-8'))
  steps = {model: read_log(model)[-1]['step'] for model in ('target', 'draft')}
  values = speeds() | {
      'target_steps': f'{steps["target"]:,}',
      'shape_steps': f'{tried["settings"]["steps"]:,}', 'draft_steps': f'{steps["draft"]:,}',
      'shapes': shapes_table(tried), 'selected': tried['selected'],
      'shape_sentences': tried['settings']['sentences'],
      'sentences': restoration['sentences'],
      'acceptance': acceptance_table(report), 'samples': samples(report),
      'identical': ', '.join(identical) or f'all of the {restoration["sentences"]} sentences',
      'compared': compared(restoration['identical']),
  }
  for model in ('target', 'draft'):
    for task in tasks.PREFIXES:
      validation = report[task]['validation'][model]
      values[f'{model}_{task}_loss'] = f'{validation["loss"]:.3f}'
      values[f'{model}_{task}_accuracy'] = f'{validation["accuracy"]:.1%}'
  for name, model in (('target', 'target'), ('beam', 'target, beam 4'), ('draft', 'draft')):
    for measure in ('exact', 'right_words'):
      share = restoration[model][measure] / restoration['sentences']
      values[f'{name}_{measure}'] = f'{share:.1%}'
    values[f'{name}_cer'] = f'{restoration[model]["character_error_rate"]:.3f}'
    values[f'{name}_bleu'] = f'{translation[model]["bleu"]:.1f}'
    values[f'{name}_chrf'] = f'{translation[model]["chrf"]:.1f}'
  template = string.Template((HERE / 'card.md').read_text(encoding='utf-8'))
  (tasks.ASSETS / 'README.md').write_text(template.substitute(values), encoding='utf-8')


if __name__ == '__main__':
  main()
