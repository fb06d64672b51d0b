"""Writes the demo pair's model card and its learning curve from what was measured.

    python scripts/demo_pair/card.py

Reads `speculative_t5x/demo/evaluation.json` (evaluate.py) and the training logs in `results/`
beside this script; writes `speculative_t5x/demo/README.md` and `learning_curve.png`.
"""

import json
import pathlib
import re
import string

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt

from speculative_t5x import training
from speculative_t5x.demo import tasks

HERE = pathlib.Path(__file__).parent


def read_log(model):
  """Records of a model's training."""
  return training.read_log(HERE / 'results' / f'{model}_log.jsonl')


def draw(path):
  """The learning curves of both models: loss a token of training and validation."""
  figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout='constrained')
  for axis, model in zip(axes, ('target', 'draft'), strict=True):
    log = read_log(model)
    axis.plot([r['step'] for r in log], [r['train_loss'] for r in log], color='0.7',
              label='training, both tasks')
    for task, colour in zip(tasks.PREFIXES, ('tab:blue', 'tab:orange'), strict=True):
      measured = [r for r in log if task in r]
      axis.plot([r['step'] for r in measured], [r[task]['loss'] for r in measured], color=colour,
                marker='o', markersize=3, label=f'validation, {task}')
    axis.set(title=model, xlabel='step', ylim=(0, 4))
    axis.grid(alpha=0.3)
  axes[0].set_ylabel('loss a token')
  axes[0].legend()
  figure.savefig(path, dpi=110)


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


def main():
  report = json.loads((tasks.ASSETS / 'evaluation.json').read_text(encoding='utf-8'))
  draw(tasks.ASSETS / 'learning_curve.png')
  restoration, translation = report['restoration'], report['translation']
  identical = sorted({
      f'{count} of {found["sentences"]} ({task}, {where})' for task, found in report.items()
      for where, count in found['identical'].items() if count != found['sentences']})
  values = {
      'target_steps': f'{read_log("target")[-1]["step"]:,}',
      'draft_steps': f'{read_log("draft")[-1]["step"]:,}',
      'sentences': restoration['sentences'],
      'acceptance': acceptance_table(report), 'samples': samples(report),
      'identical': ', '.join(identical) or f'all of the {restoration["sentences"]} sentences',
      'compared': ', '.join(restoration['identical']),
  }
  for model in ('target', 'draft'):
    last = [record for record in read_log(model) if 'restoration' in record][-1]
    for task in tasks.PREFIXES:
      values[f'{model}_{task}_loss'] = f'{last[task]["loss"]:.3f}'
      values[f'{model}_{task}_accuracy'] = f'{last[task]["accuracy"]:.1%}'
    values[f'{model}_exact'] = f'{restoration[model]["exact"] / restoration["sentences"]:.1%}'
    values[f'{model}_cer'] = f'{restoration[model]["character_error_rate"]:.3f}'
    values[f'{model}_bleu'] = f'{translation[model]["bleu"]:.1f}'
    values[f'{model}_chrf'] = f'{translation[model]["chrf"]:.1f}'
  template = string.Template((HERE / 'card.md').read_text(encoding='utf-8'))
  (tasks.ASSETS / 'README.md').write_text(template.substitute(values), encoding='utf-8')


if __name__ == '__main__':
  main()
