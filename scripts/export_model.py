"""Writes trained states as a T5X checkpoint of one of the pairs that come with the package.

    python scripts/export_model.py demo target runs/export runs/target/state_*.msgpack
    python scripts/export_model.py demo draft speculative_t5x/demo/draft runs/draft/state.msgpack \
        --replace

Of several states of one training the parameters are averaged; the checkpoint is called after the
last step. The network is that of gin_configs/models/PAIR.gin.
"""

import argparse
import pathlib
import re
import shutil

import gin
import jax

from speculative_t5x import checkpoints, training
from speculative_t5x.network import network_of

ROOT = pathlib.Path(__file__).resolve().parents[1]


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('pair', choices=('demo', 'demo_lm'))
  parser.add_argument('model', choices=('target', 'draft'))
  parser.add_argument('folder', type=pathlib.Path, help='gets a folder checkpoint_N')
  parser.add_argument('states', type=pathlib.Path, nargs='+')
  parser.add_argument('--replace', action='store_true',
                      help="remove the folder's other checkpoints, and let the gin file name this")
  args = parser.parse_args()
  gin_file = ROOT / 'gin_configs' / 'models' / f'{args.pair}.gin'
  gin.add_config_file_search_path(str(ROOT))
  gin.parse_config_file(str(gin_file))
  module = network_of(gin.get_configurable(f'{args.model}/T5Config')())
  like = training.init_state(module, training.TrainConfig())
  states = [training.load_state(path, like) for path in args.states]
  params = jax.tree.map(lambda *x: sum(x) / len(x), *(state.params for state in states))
  step = max(int(state.step) for state in states)
  args.folder.mkdir(parents=True, exist_ok=True)
  if args.replace:
    for earlier in args.folder.glob('checkpoint_*'):
      shutil.rmtree(earlier)
  path = args.folder.resolve() / f'checkpoint_{step}'
  # Half the bytes; decoding computes in float32.
  checkpoints.save_params(path, params, step=step, dtype='bfloat16')
  if args.replace:
    folder = path.parent.relative_to(ROOT)
    text = gin_file.read_text(encoding='utf-8')
    text = re.sub(rf'{re.escape(str(folder))}/checkpoint_\d+', str(path.relative_to(ROOT)), text)
    gin_file.write_text(text, encoding='utf-8')
  print(path)


if __name__ == '__main__':
  main()
