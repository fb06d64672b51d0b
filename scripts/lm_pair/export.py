"""Writes a trained state of `train.py` as the T5X checkpoint that the package holds.

python scripts/lm_pair/export.py target runs/lm_target/state.msgpack speculative_t5x/demo/lm/target

Checkpoints of other steps in that folder are removed, and gin_configs/models/demo_lm.gin is made to
name the new one.
"""

import argparse
import pathlib
import re
import shutil

import train

from speculative_t5x import checkpoints, training
from speculative_t5x.network import DecoderOnly

GIN = pathlib.Path(__file__).parents[2] / 'gin_configs' / 'models' / 'demo_lm.gin'


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('model', choices=('target', 'draft'))
  parser.add_argument('state', type=pathlib.Path)
  parser.add_argument('folder', type=pathlib.Path, help='gets a folder checkpoint_N')
  args = parser.parse_args()
  like = training.init_state(DecoderOnly(train.network_config(args.model)), training.TrainConfig())
  state = training.load_state(args.state, like)
  args.folder.mkdir(parents=True, exist_ok=True)
  for earlier in args.folder.glob('checkpoint_*'):
    shutil.rmtree(earlier)
  path = args.folder.resolve() / f'checkpoint_{int(state.step)}'
  # Half the bytes; decoding computes in float32.
  checkpoints.save_params(path, state.params, step=int(state.step), dtype='bfloat16')
  text = GIN.read_text(encoding='utf-8')
  GIN.write_text(
      re.sub(rf'demo/lm/{args.model}/checkpoint_\d+', f'demo/lm/{args.model}/{path.name}', text),
      encoding='utf-8')
  print(path)


if __name__ == '__main__':
  main()
