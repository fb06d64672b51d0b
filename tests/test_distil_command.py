"""The command on tiny models: going on, what it logs and saves, meshes, what it refuses."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative_t5x import checkpoints, training, vocabularies
from speculative_t5x.distil import __main__ as command
from speculative_t5x.distil import trainer
from speculative_t5x.distil.recipe import Recipe
from speculative_t5x.measure import acceptance
from speculative_t5x.measure.subject import model_steps
from speculative_t5x.network import T5Config, Transformer
from speculative_t5x.pair import load_model
from speculative_t5x.sampling import SamplingRule

ROOT = pathlib.Path(__file__).parents[1]
# 259 bytes and the like; the rest are rows that pad the embedding.
SIZES = {'emb_dim': 16, 'num_heads': 2, 'head_dim': 8, 'num_encoder_layers': 1,
         'num_decoder_layers': 1, 'mlp_dim': 16}
GIN = """
include 'gin_configs/models/pair.gin'
include 'gin_configs/runs/distil.gin'
VOCABULARY_PATH = 'bytes'
TARGET = None
DRAFT = @draft/speculative_t5x.T5Config()
draft/speculative_t5x.T5Config:
  vocab_size = 262
  emb_dim = 16
  num_heads = 2
  head_dim = 8
  num_encoder_layers = 1
  num_decoder_layers = 1
  mlp_dim = 16
  mlp_activations = ('gelu', 'linear')
TASK_FEATURE_LENGTHS = {'inputs': 16, 'targets': 6}
BATCH_SIZE = 4
NUM_HELD_OUT = 6
TRAIN_STEPS = 8
WARMUP_STEPS = 2
LOG_PERIOD = 1
SAVE_PERIOD = 3
EVAL_PERIOD = 4
LEARNING_RATE = 0.05
"""


@pytest.fixture(scope='module')
def world(tmp_path_factory):
  """A folder with a target of random weights, inputs of one length, and the gin file."""
  folder = tmp_path_factory.mktemp('world')
  config = T5Config(vocab_size=264, mlp_activations=('gelu', 'linear'), **SIZES)
  tokens = jnp.ones((1, 1), jnp.int32)
  params = Transformer(config).init(jax.random.key(5), tokens, tokens)['params']
  # Larger logits: a target that has made up its mind.
  params = jax.tree.map(lambda x: x * 1.3, params)
  checkpoints.save_params(folder / 'target', params)
  rng = np.random.default_rng(0)
  word = lambda length: ''.join(rng.choice(list('abcdefgh'), length))
  lines = [json.dumps({'inputs': word(14), 'targets': word(5)}) for _ in range(26)]
  (folder / 'inputs.jsonl').write_text('\n'.join(lines) + '\n', encoding='utf-8')
  (folder / 'distil.gin').write_text(
      f'{GIN}CHECKPOINT_PATH = {str(folder / "target")!r}\n', encoding='utf-8')
  return folder


def arguments(world, folder, *more):
  return [f'--gin_file={world}/distil.gin', f'--input={world}/inputs.jsonl',
          f'--output_dir={folder}', *more]


def read_log(folder):
  lines = (pathlib.Path(folder) / 'log.jsonl').read_text(encoding='utf-8').splitlines()
  return [json.loads(line) for line in lines]


def reached(folder):
  """What does not depend on the clock, of every record."""
  return [{k: x.get(k) for k in ('step', 'loss', 'alpha')} for x in read_log(folder)]


MIXED = ['--gin.DRAFT_FRACTION=0.5', '--gin.DROPOUT_RATE=0.1', '--gin.REFERENCE_WEIGHT=0.3',
         '--gin.TEMPERATURE=1.0', '--gin.DRAFT_TEMPERATURE=0.9']


@pytest.fixture(scope='module')
def whole(world):
  """An uninterrupted run with everything in it."""
  # Both kinds of batches, so that going on concerns both.
  kinds = {trainer.draft_writes(Recipe(draft_fraction=0.5), step) for step in range(8)}
  assert kinds == {True, False}
  assert command.main(arguments(world, world / 'whole', *MIXED)) == 0
  return world / 'whole'


def test_what_a_run_leaves(world, whole, capsys):
  records = read_log(whole)
  assert [x['step'] for x in records] == list(range(9))
  assert [x['step'] for x in records if 'alpha' in x] == [0, 4, 8]
  assert records[-1]['loss'] < records[1]['loss']
  assert sorted(p.name for p in whole.glob('checkpoint_*')) == [
      'checkpoint_3', 'checkpoint_6', 'checkpoint_8']
  # Started again: nothing is left to do, and it says what to use.
  before = (whole / 'log.jsonl').read_bytes()
  assert command.main(arguments(world, whole, *MIXED)) == 0
  assert (whole / 'log.jsonl').read_bytes() == before
  printed = capsys.readouterr()
  assert printed.out == f"DRAFT_CHECKPOINT_PATH = '{whole}/checkpoint_8'\n"
  assert 'the last 6 inputs' in printed.err
  # The target's texts are there to be read, and are bytes of the target.
  vocabulary = vocabularies.load_vocabulary('bytes')
  for name, count in [('held_out', 6), ('target_outputs', 20)]:
    lines = (whole / name / 'inferences.jsonl').read_text(encoding='utf-8').splitlines()
    found = [json.loads(line) for line in lines]
    assert sorted(x['number'] for x in found) == list(range(count))
    assert all(x['targets'] == vocabulary.decode(x['ids']) for x in found)
    assert max(max(x['ids']) for x in found) < vocabulary.size


def held_out(world, folder):
  """Inputs `[6, S]` and the target's texts `[6, L]`."""
  lines = (world / 'inputs.jsonl').read_text(encoding='utf-8').splitlines()[-6:]
  vocabulary = vocabularies.load_vocabulary('bytes')
  inputs = [[*vocabulary.encode(json.loads(line)['inputs']), 1] for line in lines]
  records = [json.loads(line) for line in
             (folder / 'held_out' / 'inferences.jsonl').read_text(encoding='utf-8').splitlines()]
  texts = {x['number']: x['ids'] for x in records}
  return training.pad(inputs, 16), training.pad([texts[i] for i in range(6)], 6)


def alpha_of(world, folder, checkpoint, temperature):
  """The measurement's own way: the decode step, all held-out texts of a run at once."""
  inputs, texts = held_out(world, folder)
  target, draft = (load_model(str(path)) for path in (world / 'target', checkpoint))
  steps = [model_steps(model, jnp.asarray(inputs), 8, 259) for model in (target, draft)]
  logits = acceptance.logits_along(*steps, texts)
  return acceptance.alpha(acceptance.paths_of(
      *logits, texts, SamplingRule(1.0), SamplingRule(temperature)))


def test_alpha_is_acceptance_along_the_targets_texts(world, whole):
  last = read_log(whole)[-1]['alpha']
  assert last == pytest.approx(alpha_of(world, whole, whole / 'checkpoint_8', 0.9), abs=2e-5)
  # Another temperature of the draft, and another draft, are other numbers.
  assert last != pytest.approx(alpha_of(world, whole, whole / 'checkpoint_8', 1.0), abs=1e-3)
  assert last != pytest.approx(alpha_of(world, whole, whole / 'checkpoint_6', 0.9), abs=1e-3)


def test_the_checkpoint_is_the_state(whole):
  config = T5Config(vocab_size=262, mlp_activations=('gelu', 'linear'), **SIZES)
  like = training.init_state(Transformer(config), training.TrainConfig())
  state = training.load_state(whole / 'state.msgpack', like)
  assert int(state.step) == 8
  found = checkpoints.load_params(whole / 'checkpoint_8', like=like.params)
  jax.tree.map(np.testing.assert_array_equal, found, state.params)


@pytest.mark.parametrize('where', ['after a step', 'while a state is saved', 'between both files'])
def test_an_interrupted_run_does_what_it_would_have_done(world, whole, where, monkeypatch):
  folder = world / where.replace(' ', '_')
  # The target's texts are the same, and made once.
  shutil.copytree(whole / 'target_outputs', folder / 'target_outputs')

  def interrupt(owner, name, is_time):
    original = getattr(owner, name)
    def replaced(*args, **kwargs):
      if is_time(*args):
        raise KeyboardInterrupt
      return original(*args, **kwargs)
    return owner, name, replaced

  patched = {
      'after a step': lambda: interrupt(
          trainer.Folder, 'log', lambda self, record: record['step'] == 5),
      'while a state is saved': lambda: interrupt(
          training.os, 'replace', lambda source, target: (
              str(target).endswith('state.msgpack') and (folder / 'checkpoint_3').exists())),
      'between both files': lambda: interrupt(
          checkpoints, 'save_params', lambda path, *_: path.name == 'checkpoint_6'),
  }[where]()
  with monkeypatch.context() as patch:
    patch.setattr(*patched)
    with pytest.raises(KeyboardInterrupt):
      command.main(arguments(world, folder, *MIXED))
  assert not (folder / 'checkpoint_8').exists()
  assert command.main(arguments(world, folder, *MIXED)) == 0
  assert reached(folder) == reached(whole)
  assert {p.name for p in folder.glob('checkpoint_*')} == {
      p.name for p in whole.glob('checkpoint_*')}
  assert (folder / 'state.msgpack').read_bytes() == (whole / 'state.msgpack').read_bytes()


def test_a_contradiction_on_going_on_is_one_line(world, whole, capsys):
  for setting, named in [
      ('DIVERGENCE=total_variation', "expected \"DIVERGENCE = 'total_variation'\""),
      ('TRAIN_STEPS=9', "expected 'TRAIN_STEPS = 9', found 'TRAIN_STEPS = 8'"),
      ('NUM_HELD_OUT=5', "expected 'NUM_HELD_OUT = 5'"),
  ]:
    assert command.main(arguments(world, whole, *MIXED, f'--gin.{setting}')) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith('error: ') and 'holds another run' in line and named in line
  free = ['--gin.SAVE_PERIOD=4', '--gin.EVAL_PERIOD=8', '--gin.LOG_PERIOD=2']
  assert command.main(arguments(world, whole, *MIXED, *free)) == 0


ON_A_MESH = """
import sys
import jax
from speculative_t5x.distil import __main__ as command, trainer
assert jax.device_count() == 4
train = trainer.train
def spy(state, *args, target_params, place, **kwargs):
  shard = lambda x: x.addressable_shards[0].data.shape
  kernel = target_params['encoder']['layers_0']['mlp']['wi_0']['kernel']
  assert (kernel.shape, shard(kernel)) == ((16, 16), (16, 8))
  assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state.params))
  import numpy as np
  assert shard(place(np.zeros((4, 3)))) == (2, 3)
  return train(state, *args, target_params=target_params, place=place, **kwargs)
trainer.train = spy
sys.exit(command.main(sys.argv[1:]))
"""


def test_a_mesh_gives_the_same_losses(world, whole):
  """Two devices share the target's parameters, the rows are spread over two of those."""
  folder = world / 'mesh'
  flags = '--xla_force_host_platform_device_count=4'
  subprocess.run(
      [sys.executable, '-c', ON_A_MESH,
       *arguments(world, folder, *MIXED, '--gin.NUM_PARTITIONS=2')],
      check=True, cwd=ROOT, env=os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'})
  for found, expected in zip(reached(folder), reached(whole), strict=True):
    for name, value in expected.items():
      assert found[name] == (value and pytest.approx(value, rel=2e-4, abs=2e-4))


def test_a_draft_from_a_checkpoint_learns_on(world, whole):
  """It begins where the other ended, and drafts while the target writes."""
  folder = world / 'further'
  more = [f'--gin.DRAFT_CHECKPOINT_PATH={whole}/checkpoint_8', '--gin.TEMPERATURE=1.0',
          '--gin.DRAFT_TEMPERATURE=0.9', '--gin.TRAIN_STEPS=3', '--gin.GAMMA=2',
          '--gin.DIVERGENCE=total_variation']
  assert command.main(arguments(world, folder, *more)) == 0
  records = read_log(folder)
  assert records[-1]['step'] == 3 and len(records) == 4
  assert records[0]['alpha'] == pytest.approx(
      alpha_of(world, folder, whole / 'checkpoint_8', 0.9), abs=2e-5)


def test_references_alone_ask_no_target_and_on_policy_needs_no_references(world):
  references = world / 'references'
  assert command.main(arguments(
      world, references, '--gin.EXAMPLES=references', '--gin.REFERENCE_WEIGHT=1.0',
      '--gin.TRAIN_STEPS=4')) == 0
  assert not (references / 'target_outputs').exists()
  assert read_log(references)[-1]['loss'] < read_log(references)[1]['loss']
  inputs = world / 'inputs.txt'
  lines = (world / 'inputs.jsonl').read_text(encoding='utf-8').splitlines()
  inputs.write_text(''.join(json.loads(x)['inputs'] + '\n' for x in lines[:12]), encoding='utf-8')
  held = world / 'held.txt'
  held.write_text(''.join(json.loads(x)['inputs'] + '\n' for x in lines[12:]), encoding='utf-8')
  folder = world / 'on_policy'
  assert command.main([
      f'--gin_file={world}/distil.gin', f'--input={inputs}', f'--held_out={held}',
      f'--output_dir={folder}', '--gin.EXAMPLES=draft', '--gin.SAMPLE_PERIOD=3',
      '--gin.TRAIN_STEPS=6', '--gin.DIVERGENCE=reverse_kl', '--gin.TEMPERATURE=1.0']) == 0
  assert not (folder / 'target_outputs').exists()
  # A greedy draft that knows nothing draws padding; that counts, and is learnt from.
  assert all(x['loss'] > 0.01 for x in read_log(folder)[1:])


@pytest.mark.parametrize('more, named', [
    (['--gin.DIVERGENCE=js'], 'DIVERGENCE: expected one of'),
    (['--gin.EXAMPLES=references', '--input={folder}/no_references.jsonl'],
     "input 1: expected a text field 'targets'"),
    (['--input={folder}/missing.txt'], 'input file: expected one at'),
    (['--input={folder}/broken.jsonl'], 'broken.jsonl line 2: expected JSON'),
    (['--held_out={folder}/missing.txt'], 'input file: expected one at'),
    (['--gin.NUM_HELD_OUT=24'], 'inputs: expected at least BATCH_SIZE 4 to train on, found 2'),
    (['--gin.NUM_HELD_OUT=0'], 'NUM_HELD_OUT: expected a whole number from 1 on, found 0'),
    (['--gin.SAVE_PERIOD=4', '--gin.SAMPLE_PERIOD=3', '--gin.EXAMPLES=draft'],
     'SAVE_PERIOD: expected a multiple of SAMPLE_PERIOD 3, found 4'),
    (['--gin.NUM_PARTITIONS=2'], 'NUM_PARTITIONS: expected a divisor of the 1 devices, found 2'),
    (['--gin.DRAFT=None'], 'DRAFT: expected a network, or DRAFT_CHECKPOINT_PATH'),
    (['--gin.draft/speculative_t5x.T5Config.vocab_size=200'],
     'DRAFT: expected vocab_size of at least 259, found 200'),
    (['--gin.CHECKPOINT_PATH=nowhere'], 'nowhere'),
    (['--gin.TASK_FEATURE_LENGTHS=5'], 'TASK_FEATURE_LENGTHS: expected'),
    (['--gin.MIXTURE_OR_TASK_NAME=some_task'], 'inputs: expected either a file or'),
    (['--steps=5'], 'argument: expected a known one or --gin.NAME=value, found --steps=5'),
], ids=lambda x: str(x)[:50])
def test_bad_settings_are_one_line_and_change_nothing(world, tmp_path, more, named, capsys):
  (tmp_path / 'no_references.jsonl').write_text('{"inputs": "abc"}\n' * 20, encoding='utf-8')
  (tmp_path / 'broken.jsonl').write_text('{"inputs": "abc"}\n{"inp', encoding='utf-8')
  more = [x.format(folder=tmp_path) if x.startswith('--') and '{folder}' in x else x for x in more]
  assert command.main(arguments(world, tmp_path / 'out', *more)) == 2
  errors = [x for x in capsys.readouterr().err.splitlines() if x.startswith('error: ')]
  assert len(errors) == 1 and named in errors[0]
  assert not (tmp_path / 'out').exists()
