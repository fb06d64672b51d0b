"""The measurement of a pair of T5X models, by the gin files of `python -m t5x.infer`."""

import json

import pytest

from speculative_t5x.demo import tasks as demo_tasks
from speculative_t5x.demo.__main__ import load_demo_pair
from speculative_t5x.measure import __main__ as standalone
from speculative_t5x.measure.run import measure
from speculative_t5x.measure.subject import PairSubject

# A submodule: this folder itself would pass for a package `t5x` without T5X.
pytest.importorskip('t5x.partitioning', reason='needs T5X, which is not on PyPI')

from test_t5x_infer import DEMO, python

COMMAND = ['-m', 'speculative_t5x.t5x_integration.measure']
LENGTHS = {'inputs': 32, 'targets': 24}


@pytest.fixture(scope='module')
def texts():
  pairs = demo_tasks.read_pairs(demo_tasks.HELD_OUT)
  return [inputs for inputs, _ in demo_tasks.spread(
      demo_tasks.examples(pairs, 'restoration'), 40) if len(inputs) < 60][:4]


def run(folder, texts, *arguments):
  (folder / 'in.txt').write_text('\n'.join(texts) + '\n', encoding='utf-8')
  return python(
      folder, *COMMAND, DEMO, '--gin.INPUT_PATH="in.txt"', f'--gin.TASK_FEATURE_LENGTHS={LENGTHS}',
      '--output_dir=out', '--gammas', '2', '--repeats', '1', '--batch_size', '2', *arguments)


def test_it_finds_what_the_other_door_finds(tmp_path, texts):
  done = run(tmp_path, texts)
  assert done.returncode == 0, done.stderr[-3000:]
  found = json.loads((tmp_path / 'out' / 'report.json').read_text(encoding='utf-8'))
  pair = load_demo_pair()
  batches = standalone.batches_of(pair, texts, LENGTHS['inputs'], 2)
  expected = measure(PairSubject(pair, batches, LENGTHS['targets']), [2], 1)
  assert found['alpha'] == pytest.approx(expected.alpha)
  for theirs, ours in zip(found['gammas'], expected.gammas, strict=True):
    assert theirs['identical'] == ours.identical == 4
    for name in ('tokens_a_round', 'predicted_tokens_a_round'):
      assert theirs[name] == pytest.approx(getattr(ours, name))
    assert theirs['temporary_bytes'] > 0
  assert (tmp_path / 'out' / 'speed.png').exists()


def test_too_few_inputs_are_one_line(tmp_path, texts):
  done = run(tmp_path, texts[:1])
  assert done.returncode == 2
  assert done.stderr.splitlines()[-1] == (
      'error: inputs: expected at least --batch_size 2, found fewer')
  assert not (tmp_path / 'out').exists()
