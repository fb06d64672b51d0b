"""Writes README.md: its text is README.template.md, its figures those of the committed results.

    python scripts/readme/readme.py

Run it after anything under a `results` folder has changed. tests/test_readme.py refuses a README
that this does not give.
"""

import json
import pathlib
import re
import string

from speculative_t5x import analysis
from speculative_t5x.demo import tasks

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
PAIR = ROOT / 'scripts' / 'demo_pair' / 'results'
BENCHMARK = ROOT / 'scripts' / 'benchmark' / 'results'
DRAFTERS = {
    'model': 'model', 'confident model': 'model, `MIN_CONFIDENCE = 0.2`', 'copying': 'copying',
    'mixed': 'mixed', 'cascade': 'cascade with copying', 'unigram': 'unigram', 'bigram': 'bigram',
}


def read(path):
  return json.loads(path.read_text(encoding='utf-8'))


def table(head, rows):
  """A Markdown table whose first column is text, the others figures."""
  lines = [head, ['---', *['---:'] * (len(head) - 1)], *rows]
  return '\n'.join('| ' + ' | '.join(map(str, line)) + ' |' for line in lines)


def pick(records, **wanted):
  """The one record that has these values."""
  [found] = [record for record in records
             if all(record[name] == value for name, value in wanted.items())]
  return found


def short(value):
  """A share without its leading zero."""
  return f'{value:.2f}'.removeprefix('0')


def differing(count, equal, unequal):
  """What is said of outputs that differ."""
  return unequal.format(count) if count else equal


def demo():
  """The target's place, and the first sentence of the demo's output with four rounds or more."""
  gin_file = (ROOT / 'gin_configs' / 'models' / 'demo.gin').read_text(encoding='utf-8')
  checkpoint = re.search(r"^CHECKPOINT_PATH = '(.*)'", gin_file, re.M)[1]
  text = (PAIR / 'demo_gamma_4.txt').read_text(encoding='utf-8')
  blocks = re.findall(r'^input .*?(?=^ *$)', text, re.M | re.S)
  found = next(block for block in blocks if re.search(r'^  4 ', block, re.M))
  return {'target_checkpoint': checkpoint,
          'demo_sentence': '\n'.join(line.rstrip() for line in found.splitlines())}


def measured():
  """Speed, acceptance and costs of both tasks."""
  values = {}
  for task in tasks.PREFIXES:
    report = read(BENCHMARK / f'measure_{task}' / 'report.json')
    drafted = [at for at in report['gammas'] if at['gamma']]
    best = max(drafted, key=lambda at: at['factor'])
    if any(at['identical'] != report['num_inputs'] for at in drafted):
      raise ValueError(f'{task}: the README says that all outputs are identical')
    values |= {
        f'{task}_factor': f'{best["factor"]:.2f}', f'{task}_gamma': best['gamma'],
        f'{task}_alpha': short(report['alpha']), 'measured_inputs': report['num_inputs'],
        'c': short(report['c']), 'v4': f'{report["v"]["4"]:.2f}',
        f'{task}_free': f'{analysis.walltime_improvement(report["alpha"], 4, report["c"]):.1f}',
    }
  return values


def beside_t5x():
  """Tokens a second over T5X's decoding."""
  records = read(PAIR / 't5x.json')
  tasks_and_sizes = list(dict.fromkeys((x['task'], x['batch_size']) for x in records))
  rows = []
  for way in dict.fromkeys(record['way'] for record in records):
    cells = [pick(records, task=task, batch_size=size, way=way)['factor']
             for task, size in tasks_and_sizes]
    rows.append([way, *(f'{cell:.2f}' for cell in cells)])
  different = sum(record['different'] for record in records)
  return {
      't5x_table': table(
          ['way', *(f'{task}, batch {size}' for task, size in tasks_and_sizes)], rows),
      't5x_different': differing(
          different, 'outputs identical in every case', '{} outputs different'),
  }


def drafters():
  """Every drafter at temperature 0, and gamma that confidence sets."""
  records = read(PAIR / 'drafters.json')
  rows = []
  for drafter, name in DRAFTERS.items():
    cells = []
    for task in tasks.PREFIXES:
      found = pick(records, drafter=drafter, task=task, temperature=0.0, gamma=4)
      cells += [short(found['alpha']), f'{found["factor"]:.2f}']
    rows.append([name, *cells])
  sentences = re.match(r'\d+', (PAIR / 'drafters.md').read_text(encoding='utf-8'))[0]
  gains, gammas = [], []
  records = read(PAIR / 'adaptive.json')
  for task, temperature in dict.fromkeys((x['task'], x['temperature']) for x in records):
    of = [x for x in records if (x['task'], x['temperature']) == (task, temperature)]
    best = max((x for x in of if x['way'].startswith('gamma')), key=lambda x: x['factor'])
    gammas.append(int(best['way'].split()[1]))
    gains.append(100 * (pick(of, way='confidence 0.2')['factor'] / best['factor'] - 1))
  speed = lambda gain: f'{abs(gain):.1f} % {"faster" if gain > 0 else "slower"}'
  return {
      'drafters_table': table(
          ['drafter', *(f'{task} {what}' for task in tasks.PREFIXES for what in ('α', 'factor'))],
          rows),
      'drafters_sentences': sentences, 'adaptive_worst': speed(min(gains)),
      'adaptive_best': speed(max(gains)), 'adaptive_least': min(gammas),
      'adaptive_most': max(gammas),
  }


def benchmark():
  """Tokens a second of every way at batch 1 and temperature 0."""
  every = read(BENCHMARK / 'benchmark.json')['records']
  records = [x for x in every if not x['temperature'] and x['batch_size'] == 1]
  rows, behind = [], []
  for way in dict.fromkeys(record['way'] for record in records):
    rows.append([way.replace('gamma', 'γ =')] + [
        f'{pick(records, way=way, task=task)["tokens_per_second"]:.0f}' for task in tasks.PREFIXES])
  for task in tasks.PREFIXES:
    of = {x['way']: x['tokens_per_second'] for x in records if x['task'] == task}
    ours = max(rate for way, rate in of.items() if way.startswith('speculative'))
    if ours < max(of.values()):
      behind.append(task)
  different = sum(record['different_outputs'] or 0 for record in every)
  remark = 'Speculative decoding is ahead of all others.'
  if behind:
    remark = (f'In {" and ".join(behind)} the draft is accepted too rarely to pay for verifying '
              'several tokens at a time on two cores.')
  return {
      'benchmark_table': table(['way', *tasks.PREFIXES], rows), 'benchmark_remark': remark,
      'benchmark_inputs': records[0]['inputs'],
      'benchmark_different': differing(
          different, 'greedy outputs are equal in all of them', '{} greedy outputs differ'),
  }


def distil():
  """What distillation gives the demo's draft."""
  report = read(PAIR / 'distil.json')
  found = report['selection']
  alone, best = (found['test'][name] for name in ('references alone', found['selected']))
  how = found['selected'].replace('_', ' ').replace('kl', 'KL').replace(
      ', references', ' on the references').replace(
      ', target', " on the target's texts").replace(', draft', " on the draft's own texts")
  return {'distil': (
      f'The demo\'s draft, drawn at random, beside the target `{report["settings"]["target"]}`, '
      f'after {report["settings"]["steps"]:,} steps of '
      f'{report["settings"]["batch_size"]} texts: α on test inputs is {short(best["T=0"])} at '
      f'temperature 0 and {short(best["T=1"])} at 1 with {how}, '
      f'{short(alone["T=0"])} and {short(alone["T=1"])} with references alone\n'
      '([curves](scripts/demo_pair/results/distil.png), by `scripts/demo_pair/distil.py`).')}


def bfloat16():
  """How often bfloat16 changes a greedy output."""
  report = read(PAIR / 'bfloat16.json')
  total = lambda name: sum(record[name] for record in report['records'])
  margin = max(record['largest_margin'] for record in report['records'])
  return {'bfloat16': (
      f'Of {total("sentences")} held-out sentences ({total("tokens"):,} tokens, γ = 7), '
      f'{total("different_sentences")} differ from plain bfloat16\ndecoding, each where two logits '
      f'were less than {margin:.2g} apart; plain bfloat16 decoding itself differs\nfrom float32 in '
      f'{total("plain_differs_from_float32")} '
      '([figures](scripts/demo_pair/results/bfloat16.json)).')}


def render() -> str:
  """The README."""
  template = string.Template((HERE / 'README.template.md').read_text(encoding='utf-8'))
  tpu = (ROOT / 'scripts' / 'tpu_plans' / 'results' / 'table.md').read_text(encoding='utf-8')
  return template.substitute(
      tpu_table=tpu.rstrip(), **demo(), **measured(), **beside_t5x(), **drafters(), **benchmark(),
      **distil(), **bfloat16())


if __name__ == '__main__':
  (ROOT / 'README.md').write_text(render(), encoding='utf-8')
