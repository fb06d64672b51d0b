"""Widens the demo's target or draft to a T5 1.1 size and saves it as a T5X checkpoint.

    python scripts/benchmark/widen.py target xl --dtype bfloat16 /data/target_xl/checkpoint_0

The widened network says what the original does, at the costs of its size: real text and acceptance
for measurements. Its gin file is that of the size, with the demo's vocabulary. See
`speculative_t5x.widening`.
"""

import argparse
import dataclasses
import pathlib
import sys

import gin
import jax

from speculative_t5x import checkpoints, paths
from speculative_t5x.demo.__main__ import load_demo_pair
from speculative_t5x.errors import UserError
from speculative_t5x.network import T5Config
from speculative_t5x.widening import widen

SIZES = ('small', 'base', 'large', 'xl', 'xxl')


def size_config(size: str) -> T5Config:
  """T5 1.1 of a size, from the package's gin file."""
  gin.clear_config()
  gin.add_config_file_search_path(str(paths.PACKAGES))
  gin.parse_config_file('gin_configs/models/t5_1_1.gin')
  return gin.get_configurable(f't5_1_1_{size}/T5Config')()


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('model', choices=('target', 'draft'))
  parser.add_argument('size', choices=SIZES)
  parser.add_argument('checkpoint', type=pathlib.Path, help='folder to make, …/checkpoint_N')
  parser.add_argument('--dtype', default='float32', choices=('float32', 'bfloat16'))
  parser.add_argument('--seed', type=int, default=0, help='of the random weights')
  args = parser.parse_args()
  model = getattr(load_demo_pair(), args.model)
  wide = dataclasses.replace(size_config(args.size), dtype=args.dtype)
  try:
    params = widen(
        model.params, model.module.config, wide, jax.random.key(args.seed), dtype=args.dtype)
    checkpoints.save_params(args.checkpoint, params, dtype=args.dtype)
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  count = sum(x.size for x in jax.tree.leaves(params))
  print(f'{args.checkpoint}: {count:,} parameters')
  return 0


if __name__ == '__main__':
  sys.exit(main())
