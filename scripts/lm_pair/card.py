"""Writes the decoder-only pair's model card and its learning curve from what was measured.

    python scripts/lm_pair/card.py

Reads `speculative_t5x/demo/lm/evaluation.json` (evaluate.py) and the training logs in `results/`
beside this script; writes `speculative_t5x/demo/lm/README.md` and `learning_curve.png`.
"""

import json
import pathlib
import string

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt

from speculative_t5x import training
from speculative_t5x.demo import tasks

HERE = pathlib.Path(__file__).parent
ASSETS = tasks.ASSETS / 'lm'
MODELS = ('target', 'draft')


def read_log(model):
  """Records of a model's training."""
  return training.read_log(HERE / 'results' / f'{model}_log.jsonl')


def draw(path):
  """The learning curves of both models: loss a token of training and validation."""
  figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout='constrained')
  for axis, model, loss in zip(
      axes, MODELS, ('training', "training, against the target's distributions"), strict=True):
    log = read_log(model)
    measured = [record for record in log if 'validation' in record]
    axis.plot([r['step'] for r in log], [r['train_loss'] for r in log], color='0.7', label=loss)
    axis.plot([r['step'] for r in measured], [r['validation']['loss'] for r in measured],
              color='tab:blue', marker='o', markersize=3, label='validation')
    axis.set(title=model, xlabel='step')
    axis.grid(alpha=0.3)
    axis.legend()
  axes[0].set_ylabel('loss a token')
  figure.savefig(path, dpi=110)


def acceptance_table(acceptance):
  """Rows of the acceptance rate and tokens a round, for every gamma measured."""
  gammas = sorted({int(name.split()[-1]) for name in acceptance})
  lines = ['| α, tokens a round | ' + ' | '.join(f'γ = {gamma}' for gamma in gammas) + ' |',
           '| --- |' + ' --- |' * len(gammas)]
  for temperature in (0, 1):
    cells = [acceptance[f'T={temperature}, gamma {gamma}'] for gamma in gammas]
    lines.append(f'| T = {temperature} | ' + ' | '.join(
        f'{cell["alpha"]:.2f}, {cell["tokens_a_round"]:.2f}' for cell in cells) + ' |')
  return '\n'.join(lines)


def main():
  report = json.loads((ASSETS / 'evaluation.json').read_text(encoding='utf-8'))
  draw(ASSETS / 'learning_curve.png')
  different = [f'{count} of {report["inputs"]} at {where}'
               for where, count in report['identical'].items() if count != report['inputs']]
  values = {
      'sentences': report['sentences'], 'inputs': report['inputs'],
      'identical': ', '.join(different) or f'all of the {report["inputs"]}, at '
                   f'{len(report["identical"])} values of γ',
      'acceptance': acceptance_table(report['acceptance']),
      # A vertical bar would end a cell.
      'samples': '\n'.join(
          '| ' + ' | '.join(x[key].replace('|', '\\|') for key in ('inputs', 'greedy', 'sampled'))
          + ' |' for x in report['examples']),
  }
  for model in MODELS:
    found = report[model]
    values |= {
        f'{model}_steps': f'{read_log(model)[-1]["step"]:,}',
        f'{model}_parameters': f'{found["parameters"]:,}',
        f'{model}_loss': f'{found["loss"]:.3f}', f'{model}_accuracy': f'{found["accuracy"]:.1%}',
        f'{model}_perplexity': f'{found["perplexity"]:.1f}',
    }
  template = string.Template((HERE / 'card.md').read_text(encoding='utf-8'))
  (ASSETS / 'README.md').write_text(template.substitute(values), encoding='utf-8')


if __name__ == '__main__':
  main()
