"""`python -m t5x.infer` with our gin files, on the embedded pair. Skipped without T5X."""

import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative_t5x import gin_command
from speculative_t5x import infer as standalone
from speculative_t5x.demo import tasks as demo_tasks
from speculative_t5x.pair import load_pair
from speculative_t5x.vocabularies import load_vocabulary

# A submodule: this folder itself would pass for a package `t5x` without T5X.
pytest.importorskip('t5x.partitioning', reason='needs T5X, which is not on PyPI')

ROOT = pathlib.Path(__file__).parents[2]
DEMO = '--gin_file=gin_configs/examples/demo_t5x.gin'
BASELINE = '--gin.model.SpeculativeModel.decode_fn=@t5x_decoding.temperature_sample'
LENGTHS = "--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 64}"
GAMMA = 5

# Runs the command once for each list of arguments in its own: imports and devices are paid once.
# Everything but that is what `python -m t5x.infer` does.
LAUNCHER = """
import json, runpy, sys
from absl import flags
from gin import config

# What the module defines anew in every run.
OWN = ('shard_id', 'gin_file', 'gin_bindings', 'gin_search_paths', 'tfds_data_dir')

for arguments in json.loads(sys.argv[1]):
  for name in {*OWN} & {*flags.FLAGS}:
    delattr(flags.FLAGS, name)
  config.clear_config()
  sys.argv = ['infer', *arguments]
  try:
    with config.interactive_mode():  # For `infer`, likewise.
      runpy.run_module('t5x.infer', run_name='__main__', alter_sys=True)
  except SystemExit as stop:
    if stop.code:
      raise
"""

BYTES_DRAFT = """
from __gin__ import dynamic_registration

from speculative_t5x.t5x_integration import tasks
from t5x import models

draft/models.EncoderDecoderModel.output_vocabulary = @bytes/tasks.vocabulary()
bytes/tasks.vocabulary.path = 'bytes'
"""


def environment(**variables: str) -> dict[str, str]:
  """Of a process that finds the package and T5X from any folder, and has one CPU device."""
  path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
  return {**os.environ, 'PYTHONPATH': path, 'JAX_PLATFORMS': 'cpu', **variables}


def python(folder, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
  """Runs Python in `folder`, which is not the repository's: all files are found by name."""
  return subprocess.run(
      [sys.executable, *arguments], cwd=folder, env=environment(**variables), text=True,
      capture_output=True, timeout=1200, check=False)


def run_all(folder, runs: dict[str, list[str]], code: str = LAUNCHER, **variables: str):
  """Records of several runs of the command in one process, by the name of their output folder."""
  arguments = [
      [*given, f'--gin.INFER_OUTPUT_DIR="{folder / name}"'] for name, given in runs.items()]
  done = python(folder, '-c', code, json.dumps(arguments), **variables)
  assert done.returncode == 0, done.stderr[-5000:]
  return {name: records_of(folder / name) for name in runs}


def records_of(folder: pathlib.Path) -> list[dict]:
  """The merged output of a finished run."""
  [path] = folder.glob('*.jsonl-00000-of-00001')
  assert path.with_name(f'{path.name}.COMPLETED').exists()
  return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]


def texts(records: list[dict]) -> list[str]:
  return [record['prediction'] for record in records]


def scores(records: list[dict]) -> np.ndarray:
  return np.array([record['aux']['scores'] for record in records])


def held_out(count: int) -> list[tuple[str, str]]:
  """`(inputs, targets)` of both tasks in turn, short enough for `LENGTHS`."""
  pairs = demo_tasks.read_pairs(demo_tasks.HELD_OUT)
  pairs = [pair for pair in pairs if 30 < len(pair[0]) < 90][: count // 2]
  both = [demo_tasks.examples(pairs, task) for task in demo_tasks.PREFIXES]
  return [example for examples in zip(*both, strict=True) for example in examples]


@pytest.fixture(scope='module')
def lines():
  """Inputs, with an empty one among them."""
  found = [inputs for inputs, _ in held_out(12)]
  return [*found[:7], '', *found[7:]]


@pytest.fixture(scope='module')
def scored():
  return held_out(6)


@pytest.fixture(scope='module')
def outputs(tmp_path_factory, lines, scored):
  """Records of the embedded pair in every mode, and of its target alone."""
  folder = tmp_path_factory.mktemp('modes')
  (folder / 'lines.txt').write_text('\n'.join(lines) + '\n', encoding='utf-8')
  (folder / 'scored.jsonl').write_text('\n'.join(
      json.dumps({'inputs': inputs, 'targets': targets}) for inputs, targets in scored
  ) + '\n', encoding='utf-8')
  pair = [DEMO, LENGTHS, '--gin.INPUT_PATH="lines.txt"', f'--gin.GAMMA={GAMMA}']
  return run_all(folder, {
      'aux': pair,
      'target': [*pair, BASELINE],
      'copying': [*pair, '--gin.DRAFTER="copying"', '--gin.DRAFT_CHECKPOINT_PATH=None'],
      'mixed': [*pair, '--gin.DRAFTER="mixed"', '--gin.MIN_CONFIDENCE=0.3', '--gin.DRAFT_TOPK=5'],
      'beams': [
          *pair, '--gin.NUM_DECODES=2', '--gin.GAMMA=2',
          '--gin.model.SpeculativeModel.decode_fn=@beams.speculative_beam_search'],
      'beams of the target': [
          *pair, '--gin.NUM_DECODES=2',
          '--gin.model.SpeculativeModel.decode_fn=@t5x_decoding.beam_search'],
      'predict': [*pair, '--gin.infer.mode="predict"'],
      'score': [
          '--gin_file=gin_configs/runs/score.gin', '--gin_file=gin_configs/models/demo.gin',
          '--gin_file=gin_configs/examples/text_file.gin', LENGTHS,
          '--gin.INPUT_PATH="scored.jsonl"', '--gin.utils.RestoreCheckpointConfig.dtype="float32"',
          '--gin.BATCH_SIZE=4',
      ],
  })


@pytest.fixture(scope='module')
def without_t5x(tmp_path_factory, lines):
  """Records of the command that needs no T5X."""
  folder = tmp_path_factory.mktemp('standalone')
  (folder / 'lines.txt').write_text('\n'.join(lines) + '\n', encoding='utf-8')
  assert standalone.main([
      '--gin_file=gin_configs/examples/demo.gin', LENGTHS, f'--gin.GAMMA={GAMMA}',
      f'--input={folder / "lines.txt"}', f'--output_dir={folder / "out"}']) == 0
  content = (folder / 'out' / 'inferences.jsonl').read_text(encoding='utf-8')
  return [json.loads(line) for line in content.splitlines()]


def test_outputs_are_those_of_the_target_alone(outputs, lines):
  found, expected = outputs['aux'], outputs['target']
  assert [record['inputs']['inputs_pretokenized'] for record in found] == lines
  assert texts(found) == texts(expected)
  assert sum(map(bool, texts(found))) >= 12 and len(set(texts(found))) >= 12
  np.testing.assert_allclose(scores(found), scores(expected), rtol=0, atol=1e-3)
  assert 'statistics' not in expected[0]['aux']


def test_outputs_are_those_of_the_command_without_t5x(outputs, without_t5x, lines):
  assert [record['inputs'] for record in without_t5x] == lines
  for found, expected in zip(outputs['aux'], without_t5x, strict=True):
    assert found['prediction'] == expected['prediction']
    # It answers an empty line without a model; T5X asks the model.
    if expected['inputs']:
      assert found['aux']['scores'] == pytest.approx(expected['score'], abs=1e-3)
      assert found['aux']['statistics'] == expected['statistics']


def test_the_drafter_does_not_change_the_outputs(outputs):
  assert texts(outputs['mixed']) == texts(outputs['target'])
  drafted = lambda name: sum(
      sum(record['aux']['statistics']['drafted']) if isinstance(
          record['aux']['statistics']['drafted'], list) else record['aux']['statistics']['drafted']
      for record in outputs[name])
  assert 0 < drafted('mixed') != drafted('aux')


def test_beams_are_those_of_the_target_alone(outputs):
  assert texts(outputs['beams']) == texts(outputs['beams of the target'])
  np.testing.assert_allclose(
      scores(outputs['beams']), scores(outputs['beams of the target']), atol=1e-3)
  statistics = [record['aux']['statistics'] for record in outputs['beams']]
  assert sum(found['rounds'] for found in statistics) < sum(
      found['emitted'] for found in statistics)


def test_copying_needs_no_draft(outputs):
  assert texts(outputs['copying']) == texts(outputs['target'])
  np.testing.assert_allclose(
      scores(outputs['copying']), scores(outputs['target']), rtol=0, atol=1e-3)
  statistics = [record['aux']['statistics'] for record in outputs['copying']]
  assert sum(counts['accepted'] for counts in statistics) > 0


def test_predict_writes_the_same_text_and_nothing_else(outputs):
  assert texts(outputs['predict']) == texts(outputs['aux'])
  assert all(record.keys() == {'inputs', 'prediction'} for record in outputs['predict'])


def test_statistics_of_every_record(outputs):
  vocabulary = load_vocabulary(str(demo_tasks.VOCABULARY))
  for record in outputs['aux']:
    counts = record['aux']['statistics']
    assert counts['emitted'] >= 1 and counts['rounds'] >= 1
    # Every round emits the target's own token behind its drafts, but for a last one that ends in
    # an accepted EOS.
    assert counts['accepted'] + counts['rounds'] - counts['emitted'] in (0, 1)
    assert 0 <= counts['rejected'] <= counts['rounds']
    assert counts['accepted'] <= counts['drafted'] <= GAMMA * counts['rounds']
    by_position = counts['accepted_at_position']
    assert len(by_position) == GAMMA and sum(by_position) == counts['accepted']
    assert by_position == sorted(by_position, reverse=True)
    if record['prediction']:
      assert counts['emitted'] >= len(vocabulary.encode(record['prediction'])) // 2
  total = {name: sum(record['aux']['statistics'][name] for record in outputs['aux'])
           for name in ('emitted', 'rounds', 'rejected')}
  assert total['emitted'] > 2 * total['rounds'] and total['rejected'] > 0


def test_scores_are_log_likelihoods_of_our_network(outputs, scored):
  assert [record['inputs'] for record in outputs['score']] == [
      {'inputs_pretokenized': inputs, 'targets_pretokenized': targets}
      for inputs, targets in scored]
  gin_command.configure(standalone.parse([
      '--gin_file=gin_configs/models/demo.gin', '--gin_file=gin_configs/models/pair_standalone.gin'
  ]))
  pair = load_pair()
  target, vocabulary = pair.target, pair.vocabulary
  ids = lambda text: [*vocabulary.encode(text), vocabulary.eos_id]
  pad = lambda rows: np.array([row + [0] * (64 - len(row)) for row in rows], np.int32)
  inputs, targets = (pad([ids(text) for text in column]) for column in zip(*scored, strict=True))
  shifted = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
  logits = jax.jit(target.module.apply)({'params': target.params}, inputs, shifted)
  log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, :, None], axis=2)[..., 0]
  expected = np.asarray(jnp.sum(log_probs * (targets != 0), axis=1))
  # None so near 0 that a score that was left out would pass for it.
  assert np.all(expected < -0.01)
  found = [record['score'] for record in outputs['score']]
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


def test_a_killed_run_continues(tmp_path, outputs, lines):
  (tmp_path / 'lines.txt').write_text('\n'.join(lines) + '\n', encoding='utf-8')
  arguments = [
      '-m', 't5x.infer', DEMO, LENGTHS, '--gin.INPUT_PATH="lines.txt"', f'--gin.GAMMA={GAMMA}',
      '--gin.BATCH_SIZE=1', '--gin.infer.checkpoint_period=1', '--gin.INFER_OUTPUT_DIR="out"']
  out = tmp_path / 'out'
  with (tmp_path / 'log').open('wb') as log:
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=tmp_path, env=environment(), stdout=log, stderr=log)
  try:
    # The place in the inputs is renamed behind a finished chunk: T5X cannot be killed amid that.
    while not (list(out.glob('tmp-*/*-chunk00002.COMPLETED'))
               and not list(out.glob('tmp-*/2.ckpt*'))):
      assert process.poll() is None, (tmp_path / 'log').read_text()[-5000:]
      time.sleep(0.01)
  finally:
    process.kill()
    process.wait()
  assert not list(out.glob('*.COMPLETED'))
  before = {path.name: path.stat().st_mtime_ns for path in out.glob('tmp-*/*-chunk0000[012]')}
  assert len(before) == 3
  done = python(tmp_path, *arguments)
  assert done.returncode == 0, done.stderr[-5000:]
  # It began behind the finished chunks.
  assert 'Starting chunk 3' in done.stderr and 'Starting chunk 2\n' not in done.stderr
  found = records_of(out)
  assert [record['inputs']['inputs_pretokenized'] for record in found] == lines
  assert texts(found) == texts(outputs['aux'])
  np.testing.assert_allclose(scores(found), scores(outputs['aux']), rtol=0, atol=1e-3)
  assert not list(out.glob('tmp-*'))


def test_mistakes_are_told_in_one_line(tmp_path):
  (tmp_path / 'lines.txt').write_text('restore: save it\n', encoding='utf-8')
  (tmp_path / 'bytes.gin').write_text(BYTES_DRAFT, encoding='utf-8')
  pair = [DEMO, '--gin.INPUT_PATH="lines.txt"', '--gin.INFER_OUTPUT_DIR="out"']
  mistakes = [
      ('--gin.INPUT_PATH="no/such.txt"', 'no/such.txt, found none'),
      ('--gin.CHECKPOINT_PATH="/no/checkpoint_1"',
       "target checkpoint: expected one at /no/checkpoint_1 (mode 'specific'), found none"),
      ('--gin.DRAFT_CHECKPOINT_PATH="/no/checkpoint_1"',
       "draft checkpoint: expected one at /no/checkpoint_1 (mode 'specific'), found none"),
      ('--gin.DRAFT_CHECKPOINT_PATH=None',
       "draft checkpoint: expected one path and mode 'specific' or 'latest', found None and "
       "'specific'"),
      ('--gin.GAMMA=-1', 'gamma: expected at least 0, found -1'),
      ('--gin_file=bytes.gin',
       'draft vocabulary: expected the SentencePieceVocabulary of 4096 ids of the target, found '
       'another ByteVocabulary of 259 ids'),
  ]
  code = LAUNCHER.replace('  except SystemExit', """\
  except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
  except SystemExit""")
  done = python(tmp_path, '-c', code, json.dumps([[*pair, mistake] for mistake, _ in mistakes]))
  assert done.returncode == 0, done.stderr[-5000:]
  found = [json.loads(line) for line in done.stdout.splitlines()]
  for (mistake, expected), (kind, message) in zip(mistakes, found, strict=True):
    # gin adds a line for every function it called on the way.
    line, *rest = message.splitlines()
    assert kind == 'UserError' and expected in line, (mistake, kind, message)
    assert all(' configurable ' in other for other in rest)
  assert not list((tmp_path / 'out').glob('*.jsonl*'))


def test_the_command_ends_with_the_line(tmp_path):
  (tmp_path / 'lines.txt').write_text('restore: save it\n', encoding='utf-8')
  done = python(
      tmp_path, '-m', 't5x.infer', DEMO, '--gin.INPUT_PATH="lines.txt"',
      '--gin.INFER_OUTPUT_DIR="out"', '--gin.GAMMA=-1')
  assert done.returncode == 1
  *_, line, from_gin = done.stderr.splitlines()
  assert line.endswith('UserError: gamma: expected at least 0, found -1')
  assert from_gin.startswith('  In call to configurable')
