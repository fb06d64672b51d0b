"""Writes a trained state of `train.py` as the T5X checkpoint that the demo loads.

python scripts/demo_pair/export.py target runs/target/state.msgpack speculative_t5x/demo/target
"""

import argparse
import pathlib

import train

from speculative_t5x import checkpoints, training
from speculative_t5x.network import Transformer


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('model', choices=('target', 'draft'))
  parser.add_argument('state', type=pathlib.Path)
  parser.add_argument('folder', type=pathlib.Path, help='gets a folder checkpoint_N')
  args = parser.parse_args()
  like = training.init_state(Transformer(train.network_config(args.model)), training.TrainConfig())
  state = training.load_state(args.state, like)
  args.folder.mkdir(parents=True, exist_ok=True)
  path = args.folder / f'checkpoint_{int(state.step)}'
  # Half the bytes; the demo computes in float32.
  checkpoints.save_params(path, state.params, step=int(state.step), dtype='bfloat16')
  print(path)


if __name__ == '__main__':
  main()
