"""Prints the plans of a folder as the table of README.md.

    python scripts/tpu_plans/table.py scripts/tpu_plans/results

`plans.sh` makes them.
"""

import json
import pathlib
import sys

# The paper's measured factors on EnDe at T = 0, gamma 7, one TPU v4, by alpha.
PAPER = {0.75: '3.4x', 0.80: '2.8x', 0.82: '1.7x'}
HEAD = ('pair', 'slice', 'chips a model', 'GiB a chip', 'fits', 'c', 'v(7)', 'factor',
        'c, v, factor by traffic', 'paper')


def main():
  rows = []
  for path in sorted(pathlib.Path(sys.argv[1]).glob('*.json')):
    for plan in json.loads(path.read_text()):
      request = plan['request']
      pair = ' with '.join(path.stem.split('_')[:2])
      rows.append((
          pair, request['topology'], request['partitions'],
          f'{plan["needed_bytes"] / 2**30:.1f} of {plan["hbm_bytes"] / 2**30:.0f}',
          'yes' if plan['fits'] else 'no', f'{plan["c"]:.3f}', f'{plan["v"]:.2f}',
          f'{plan["factor"]:.2f}x',
          f'{plan["traffic_c"]:.3f}, {plan["traffic_v"]:.2f}, {plan["traffic_factor"]:.2f}x',
          PAPER.get(request['alpha'], '')))
  print('| ' + ' | '.join(HEAD) + ' |')
  print('| ' + '--- | ' * len(HEAD))
  for row in rows:
    print('| ' + ' | '.join(map(str, row)) + ' |')


if __name__ == '__main__':
  main()
