"""Writes the plans of a folder as Markdown tables, `table.md` beside them.

    python scripts/tpu_plans/table.py scripts/tpu_plans/results

`plans.sh` makes the plans.
"""

import json
import pathlib
import sys

# The paper's measured factors on EnDe at T = 0, gamma 7, one TPU v4, by alpha.
PAPER = {0.75: '3.4x', 0.80: '2.8x', 0.82: '1.7x'}
PLACE = ('pair', 'slice', 'chips a model', 'GiB a chip')
BY_TRAFFIC = 'c, v(7), factor by memory traffic'
SPEED = (*PLACE, BY_TRAFFIC, "by the compiler's cycles", "a step of T5X's own, by traffic", 'paper')
MEMORY = (*PLACE, 'of it caches and other temporaries', 'fits', 'largest batch',
          "GiB a chip in T5X's own decoding", BY_TRAFFIC)
GIB = 2**30


def table(head, rows):
  """Lines of a Markdown table."""
  return [f'| {" | ".join(map(str, row))} |' for row in (head, ('---',) * len(head), *rows)]


def place(path, plan):
  """What a row begins with."""
  request = plan['request']
  return (' with '.join(path.stem.split('_')[:2]), request['topology'], request['partitions'],
          f'{plan["needed_bytes"] / GIB:.1f} of {plan["hbm_bytes"] / GIB:.0f}')


def estimate(plan, by):
  """c, v and the factor of a plan, by 'traffic' or 'cycle'."""
  return f'{plan[f"{by}_c"]:.3f}, {plan[f"{by}_v"]:.2f}, {plan[f"{by}_factor"]:.2f}x'


def speed(path, plan):
  """A row on what a round costs."""
  programs, t5x = plan['programs'], '–'
  if 't5x' in programs:
    t5x = programs['t5x']['loop_traffic_bytes'] / programs['plain']['loop_traffic_bytes']
    t5x = f'{t5x:.2f} of ours'
  return (*place(path, plan), estimate(plan, 'traffic'), estimate(plan, 'cycle'), t5x,
          PAPER.get(plan['request']['alpha'], ''))


def memory(path, plan):
  """A row on what a chip must hold."""
  t5x = plan['programs'].get('t5x')
  t5x = '–' if t5x is None else f'{needed(t5x):.1f}'
  too_large = plan['too_large_batch']
  how = 'extrapolated' if too_large is None else f'{too_large} does not fit'
  return (*place(path, plan), f'{plan["programs"]["speculative"]["temporary_bytes"] / GIB:.1f}',
          'yes' if plan['fits'] else 'no', f'{plan["largest_batch"] or "none"} ({how})', t5x,
          estimate(plan, 'traffic'))


def needed(program):
  """GiB of a program."""
  return sum(program[f'{kind}_bytes'] for kind in ('argument', 'temporary', 'output')) / GIB


def main():
  folder = pathlib.Path(sys.argv[1])
  plans = [(path, plan) for path in sorted(folder.glob('*.json'))
           for plan in json.loads(path.read_text(encoding='utf-8'))]
  single = [(path, plan) for path, plan in plans if plan['request']['batch_size'] == 1]
  lines = table(SPEED, (speed(*entry) for entry in single))
  size = lambda plan: (plan['request']['batch_size'], plan['request']['output_length'])
  larger = {size(plan) for _, plan in plans if size(plan)[0] > 1}
  for batch, length in sorted(larger, reverse=True):
    lines += ['', f'Batch {batch}, {length} tokens out:', '']
    lines += table(MEMORY, (
        memory(*entry) for entry in plans if size(entry[1]) == (batch, length)))
  (folder / 'table.md').write_text('\n'.join(lines) + '\n', encoding='utf-8')
  print('\n'.join(lines))


if __name__ == '__main__':
  main()
