"""Writes trained states as the T5X checkpoint that the demo loads.

    python scripts/demo_pair/export.py draft speculative_t5x/demo/draft runs/draft/state.msgpack
    python scripts/demo_pair/export.py target speculative_t5x/demo/target runs/target/state_*

Of several states of one training the parameters are averaged; the checkpoint is called after the
last step.
"""

import argparse
import pathlib

import jax
import train

from speculative_t5x import checkpoints, training
from speculative_t5x.network import Transformer


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('model', choices=('target', 'draft'))
  parser.add_argument('folder', type=pathlib.Path, help='gets a folder checkpoint_N')
  parser.add_argument('states', type=pathlib.Path, nargs='+')
  args = parser.parse_args()
  like = training.init_state(Transformer(train.network_config(args.model)), training.TrainConfig())
  states = [training.load_state(path, like) for path in args.states]
  params = jax.tree.map(lambda *x: sum(x) / len(x), *(state.params for state in states))
  step = max(int(state.step) for state in states)
  args.folder.mkdir(parents=True, exist_ok=True)
  path = args.folder / f'checkpoint_{step}'
  # Half the bytes; the demo computes in float32.
  checkpoints.save_params(path, params, step=step, dtype='bfloat16')
  print(path)


if __name__ == '__main__':
  main()
