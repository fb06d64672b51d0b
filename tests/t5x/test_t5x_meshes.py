"""The embedded pair on several devices and in two processes. Skipped without T5X."""

import json
import socket
import subprocess
import sys

import numpy as np
import pytest

# A submodule: this folder itself would pass for a package `t5x` without T5X.
pytest.importorskip('t5x.partitioning', reason='needs T5X, which is not on PyPI')

from test_t5x_infer import (
    DEMO,
    LAUNCHER,
    environment,
    held_out,
    python,
    records_of,
    run_all,
    scores,
    texts,
)

PAIR = [
    DEMO, "--gin.TASK_FEATURE_LENGTHS={'inputs': 48, 'targets': 48}", '--gin.GAMMA=3',
    '--gin.INPUT_PATH="lines.txt"', '--gin.BATCH_SIZE=4']
FOUR_DEVICES = {'XLA_FLAGS': '--xla_force_host_platform_device_count=4'}

# The draft is whole on every device unless it has rules.
OWN_RULES = '--gin.DRAFT_AXIS_RULES=@partitioning.standard_logical_axis_rules()'
# The same behind any configuration, as runs/speculate.gin says.
RULES_FILE = """
from __gin__ import dynamic_registration

from speculative_t5x.t5x_integration import model
from speculative_t5x.t5x_integration import partitioning as pair_partitioning
from t5x import partitioning

DRAFT_RULES = @partitioning.standard_logical_axis_rules()
model.SpeculativeModel.draft_logical_axis_rules = %DRAFT_RULES
pair_partitioning.pair_logical_axis_rules.draft_rules = %DRAFT_RULES
partitioning.PjitPartitioner.logical_axis_rules = @pair_partitioning.pair_logical_axis_rules()
"""

# Prints the shape of every restored parameter and of the part of it that one device holds.
PROBE = """
import json
import flax
from t5x import utils

restore = utils.create_checkpoint_manager_and_restore


def probed(*args, **kwargs):
  state, manager = restore(*args, **kwargs)
  params = flax.traverse_util.flatten_dict(flax.core.unfreeze(state.params), sep='/')
  print(json.dumps({
      name: [x.shape, x.sharding.shard_shape(x.shape)] for name, x in params.items()}))
  return state, manager


utils.create_checkpoint_manager_and_restore = probed
"""

# One of two processes of the command, which T5X's own does not connect.
PROCESS = """
import runpy, sys
import jax

jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize(f'127.0.0.1:{sys.argv[1]}', num_processes=2, process_id=int(sys.argv[2]))
assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 4, 2)
sys.argv = ['infer', *sys.argv[3:]]
runpy.run_module('t5x.infer', run_name='__main__', alter_sys=True)
"""


def mesh(model_devices: int) -> list[str]:
  """Arguments for a mesh of four devices, `model_devices` of them to a copy of the target."""
  return ['--gin.partitioning.PjitPartitioner.num_partitions=None',
          f'--gin.partitioning.PjitPartitioner.model_parallel_submesh=(1, {model_devices})']


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A folder with a few inputs; the last batch is not full."""
  folder = tmp_path_factory.mktemp('meshes')
  lines = [inputs for inputs, _ in held_out(6)]
  (folder / 'lines.txt').write_text('\n'.join(lines) + '\n', encoding='utf-8')
  (folder / 'rules.gin').write_text(RULES_FILE, encoding='utf-8')
  return folder


@pytest.fixture(scope='module')
def single(folder):
  """Records of a run on one device."""
  return run_all(folder, {'single': PAIR})['single']


@pytest.fixture(scope='module')
def on_meshes(folder):
  """Records, and shapes of parameters and of their parts, of a run on every mesh."""
  runs = {
      '1x4': [*PAIR, *mesh(4)], '2x2': [*PAIR, *mesh(2)], '4x1': [*PAIR, *mesh(1)],
      '2x2 own rules': [*PAIR, OWN_RULES, *mesh(2)],
      '1x4 own rules': [*PAIR, '--gin_file=rules.gin', *mesh(4)],
  }
  arguments = [[*given, f'--gin.INFER_OUTPUT_DIR="{folder / name}"']
               for name, given in runs.items()]
  done = python(folder, '-c', PROBE + LAUNCHER, json.dumps(arguments), **FOUR_DEVICES)
  assert done.returncode == 0, done.stderr[-5000:]
  shapes = [json.loads(line) for line in done.stdout.splitlines()]
  return {name: (records_of(folder / name), found)
          for name, found in zip(runs, shapes, strict=True)}


def assert_is_single(records, single):
  assert texts(records) == texts(single) and len({*texts(single)}) == 6
  np.testing.assert_allclose(scores(records), scores(single), rtol=0, atol=1e-3)
  for found, expected in zip(records, single, strict=True):
    assert found['aux']['statistics'] == expected['aux']['statistics']


@pytest.mark.parametrize('name', ['1x4', '2x2', '4x1', '2x2 own rules', '1x4 own rules'])
def test_outputs_are_those_of_one_device(on_meshes, single, name):
  assert_is_single(on_meshes[name][0], single)


def assert_split(shapes, side, devices):
  """Whether a matrix of each kind of axis is cut in `devices` parts."""
  for name, axis in (('decoder/layers_0/mlp/wi_0/kernel', 1), ('token_embedder/embedding', 0),
                     ('decoder/layers_0/self_attention/query/kernel', 1)):
    shape, part = shapes[f'{side}/{name}']
    expected = list(shape)
    expected[axis] //= devices
    assert part == expected, name


def split(shapes, side):
  """Names of the parameters of a side that devices hold parts of, without the side."""
  return {name.removeprefix(f'{side}/') for name, (shape, part) in shapes.items()
          if name.startswith(side) and shape != part}


def test_the_target_is_partitioned_and_the_draft_is_not(on_meshes):
  for name, devices in (('1x4', 4), ('2x2', 2)):
    _, shapes = on_meshes[name]
    assert_split(shapes, 'target', devices)
    assert split(shapes, 'draft') == set()
  _, shapes = on_meshes['4x1']
  assert split(shapes, 'target') == split(shapes, 'draft') == set()


def test_a_draft_with_rules_of_its_own_is_partitioned(on_meshes):
  for name, devices in (('1x4', 4), ('2x2', 2)):
    _, shapes = on_meshes[f'{name} own rules']
    assert_split(shapes, 'draft', devices)
    in_both = {name for name in split(shapes, 'target') if f'draft/{name}' in shapes}
    assert split(shapes, 'draft') == in_both and len(in_both) > 20
    # The target is as it was.
    assert split(shapes, 'target') == split(on_meshes[name][1], 'target')


def test_a_batch_that_the_mesh_does_not_divide(folder):
  done = python(
      folder, '-m', 't5x.infer', *PAIR, *mesh(1), '--gin.BATCH_SIZE=6',
      '--gin.INFER_OUTPUT_DIR="batch"', **FOUR_DEVICES)
  assert done.returncode == 1
  *_, line, _ = done.stderr.splitlines()
  assert line == ('ValueError: Batch size (6) must be divisible by corresponding data mesh size '
                  '(4).')


def test_two_processes(folder, single):
  with socket.socket() as found:
    found.bind(('127.0.0.1', 0))
    port = found.getsockname()[1]
  variables = environment(XLA_FLAGS='--xla_force_host_platform_device_count=2')
  arguments = [*PAIR, f'--gin.INFER_OUTPUT_DIR="{folder / "processes"}"']
  # Files: a process that waits for a full pipe to be read would let the other wait for it.
  logs = [folder / f'process{index}.log' for index in range(2)]
  processes = []
  try:
    for index, log in enumerate(logs):
      with log.open('wb') as output:
        processes.append(subprocess.Popen(
            [sys.executable, '-c', PROCESS, str(port), str(index), *arguments], cwd=folder,
            env=variables, stdout=output, stderr=output))
    codes = [process.wait(timeout=1200) for process in processes]
  finally:
    for process in processes:
      process.kill()
      process.wait()
  assert codes == [0, 0], logs[0].read_text(encoding='utf-8')[-3000:]
  assert_is_single(records_of(folder / 'processes'), single)
