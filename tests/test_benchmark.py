"""The scripts under scripts/benchmark, at small sizes."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
ACCELERATOR = ROOT / 'scripts' / 'benchmark' / 'accelerator.py'

# Runs the script where nothing but JAX and Flax is installed.
BARE = """
import runpy, sys

class Absent:
  def find_spec(self, name, path=None, target=None):
    if name.partition('.')[0] in {
        'gin', 'sentencepiece', 'seqio', 'tensorflow', 'tqdm', 'matplotlib', 't5x'}:
      raise ImportError(name)

sys.meta_path.insert(0, Absent())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def python(*arguments):
  done = subprocess.run(
      [sys.executable, *map(str, arguments)], cwd=ROOT, text=True, capture_output=True,
      timeout=600, check=False)
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  path = tmp_path_factory.mktemp('pair') / 'pair.npz'
  python(ACCELERATOR, 'prepare', path)
  return path


def test_the_accelerator_run_needs_jax_and_flax_alone(prepared, tmp_path):
  output = tmp_path / 'results.json'
  settings = ['--sizes', 'tiny', '--draft_size', 'tiny', '--dtype', 'float32', '--gammas', '3',
              '--temperatures', '0', '--batch_sizes', '2', '--num_inputs', '2', '--repeats', '1']
  python('-c', BARE, ACCELERATOR, 'run', prepared, output, *settings)
  content = json.loads(output.read_text(encoding='utf-8'))
  assert content['environment']['jax'] and len(content['records']) == 4
  for record in content['records']:
    assert record['equal_outputs'] == record['outputs'] == 2
    assert record['tokens_a_round'] > 1 or record['gamma'] == 0


def test_it_starts_nothing_that_the_time_would_not_do_for(prepared, tmp_path):
  printed = python(
      ACCELERATOR, 'run', prepared, tmp_path / 'results.json', '--sizes', 'tiny', '--draft_size',
      'tiny', '--seconds', '0')
  assert 'no time left' in printed and not (tmp_path / 'results.json').exists()
