"""Our gin files beside T5X's: the overlay behind a user's own file, sizes, names, what is required.

Skipped where T5X is not installed.
"""

import functools
import json
import re
import shutil

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative_t5x import checkpoints
from speculative_t5x.demo import tasks as demo_tasks

# Submodules: this folder itself would pass for a package `t5x` without T5X.
REASON = 'needs T5X, which is not on PyPI'
t5x_checkpoints = pytest.importorskip('t5x.checkpoints', reason=REASON)
partitioning = pytest.importorskip('t5x.partitioning', reason=REASON)
train_state_lib = pytest.importorskip('t5x.train_state', reason=REASON)
t5_network = pytest.importorskip('t5x.examples.t5.network', reason=REASON)
lm_network = pytest.importorskip('t5x.examples.decoder_only.network', reason=REASON)

from test_t5x_infer import ROOT, python, records_of, run_all, scores, texts  # noqa: E402

# What a user of T5X has: a task, an inference file, and checkpoints.
MY_TASKS = """
import seqio
import tensorflow as tf

LINES = ['open the file', 'save the document', 'Choose Insert - Table.', 'a', 'the dialog opens']
FEATURE = seqio.Feature(seqio.SentencePieceVocabulary('sp4k.model'))


def lines(split, shuffle_files, seed=None):
  return tf.data.Dataset.from_tensor_slices({'inputs': LINES, 'targets': LINES})


seqio.TaskRegistry.add(
    'my_task', output_features={'inputs': FEATURE, 'targets': FEATURE},
    source=seqio.FunctionDataSource(lines, ['test'], num_input_examples={'test': len(LINES)}),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos])
"""
MY_INFER = """
from __gin__ import dynamic_registration

import __main__ as infer_script
import my_tasks
import seqio
from t5x import decoding
from t5x import models
from t5x.examples.t5 import network

include 't5x/examples/t5/t5_1_1/tiny.gin'
include 't5x/configs/runs/infer.gin'

MIXTURE_OR_TASK_NAME = 'my_task'
TASK_FEATURE_LENGTHS = {'inputs': 16, 'targets': 16}
DROPOUT_RATE = 0.0
CHECKPOINT_PATH = 'FOLDER/target/checkpoint_9'
seqio.SentencePieceVocabulary.sentencepiece_model_file = 'sp4k.model'
network.T5Config:
  vocab_size = 4096
  dtype = 'float32'
models.EncoderDecoderModel.decode_fn = @decoding.temperature_sample
decoding.temperature_sample:
  temperature = 0.0
  topk = 0
  rescale_log_probs = False
infer_script.infer.mode = 'predict_with_aux'
"""
MY_DRAFT = """
from __gin__ import dynamic_registration

from t5x import utils
from t5x.examples.t5 import network

draft/network.T5Config.num_decoder_layers = 1
draft/utils.RestoreCheckpointConfig.mode = 'latest'
"""
MY_LANGUAGE_MODEL = """
from __gin__ import dynamic_registration

from t5x import models
from t5x.examples.decoder_only import network

DRAFT_MODEL = @draft/models.DecoderOnlyModel()
models.DecoderOnlyModel:
  module = @network.DecoderWrapper()
  vocabulary = %VOCABULARY
  optimizer_def = None
network.DecoderWrapper.config = @network.TransformerConfig()
network.TransformerConfig:
  vocab_size = 4096
  dtype = 'float32'
  emb_dim = 16
  num_heads = 2
  num_layers = 1
  head_dim = 4
  mlp_dim = 24
  mlp_activations = ('gelu', 'linear')
  dropout_rate = %DROPOUT_RATE
"""
OVERLAY = [
    '--gin_file=my_infer.gin', '--gin_file=gin_configs/runs/speculate.gin',
    '--gin_file=my_draft.gin', '--gin.DRAFT_CHECKPOINT_PATH="draft"', '--gin.GAMMA=3',
]


@pytest.fixture(scope='module')
def user(tmp_path_factory):
  """A folder with all that: an Orbax target, and a draft that is the target without a layer."""
  folder = tmp_path_factory.mktemp('user')
  for name, content in {
      'my_tasks.py': MY_TASKS, 'my_infer.gin': MY_INFER.replace('FOLDER', str(folder)),
      'my_draft.gin': MY_DRAFT, 'my_language_model.gin': MY_LANGUAGE_MODEL}.items():
    (folder / name).write_text(content, encoding='utf-8')
  shutil.copy(demo_tasks.VOCABULARY, folder / 'sp4k.model')
  tokens = np.ones((1, 2), np.int32)
  sizes = {'vocab_size': 4096, 'mlp_activations': ('gelu', 'linear'), 'dropout_rate': 0.0}
  module = t5_network.Transformer(t5_network.T5Config(
      **sizes, emb_dim=8, num_heads=4, head_dim=3, mlp_dim=16, num_encoder_layers=2,
      num_decoder_layers=2))
  init = functools.partial(module.init, enable_dropout=False)
  variables = flax.core.unfreeze(init(jax.random.key(0), tokens, tokens, tokens))
  params = variables['params']
  # More of the inputs in the outputs, less of the layer that the draft lacks.
  first, last = params['decoder']['layers_0'], params['decoder']['layers_1']
  first['encoder_decoder_attention']['out']['kernel'] *= 3
  for block, name in (('self_attention', 'out'), ('encoder_decoder_attention', 'out'),
                      ('mlp', 'wo')):
    last[block][name]['kernel'] *= 0.3
  (folder / 'target').mkdir()
  state = train_state_lib.InferenceState.create(flax.core.freeze(variables))
  state = state.replace_step(jnp.int32(9))
  manager = t5x_checkpoints.OrbaxCheckpointManagerInterface(
      str(folder / 'target'), state, partitioning.PjitPartitioner(num_partitions=1))
  manager.save(state)
  manager.close()
  del params['decoder']['layers_1']
  checkpoints.save_params(folder / 'draft' / 'checkpoint_3', params, step=3)
  module = lm_network.DecoderWrapper(lm_network.TransformerConfig(
      **sizes, emb_dim=16, num_heads=2, num_layers=1, head_dim=4, mlp_dim=24))
  params = module.init(jax.random.key(1), tokens, tokens, enable_dropout=False)['params']
  checkpoints.save_params(folder / 'language_model' / 'checkpoint_3', params, step=3)
  return folder


@pytest.fixture(scope='module')
def plain(user):
  """Records of the user's own file, and of the overlay behind it."""
  return run_all(user, {'plain': ['--gin_file=my_infer.gin'], 'overlay': OVERLAY})


def assert_is_plain(records, expected):
  assert texts(records) == texts(expected) and len(set(texts(records))) > 2
  np.testing.assert_allclose(scores(records), scores(expected), rtol=0, atol=1e-3)
  assert all(record['aux']['statistics']['drafted'] > 0 for record in records)
  assert all(len(record['aux']['statistics']['accepted_at_position']) == 3 for record in records)


def test_the_overlay_behind_a_users_file(plain):
  assert_is_plain(plain['overlay'], plain['plain'])
  statistics = [record['aux']['statistics'] for record in plain['overlay']]
  # The draft's layers are the target's: it would not agree with random ones.
  assert sum(x['accepted'] for x in statistics) > sum(x['rejected'] for x in statistics) > 0


def test_a_draft_of_another_class(user, plain):
  arguments = [*OVERLAY[:2], '--gin_file=my_language_model.gin', '--gin.GAMMA=3',
               '--gin.DRAFT_CHECKPOINT_PATH="language_model/checkpoint_3"']
  done = python(user, '-m', 't5x.infer', *arguments, '--gin.INFER_OUTPUT_DIR="language_model_out"')
  assert done.returncode == 0, done.stderr[-5000:]
  assert_is_plain(records_of(user / 'language_model_out'), plain['plain'])


# Sizes of a network; what T5X's has no option for must be as it is there.
DESCRIBE = """
import dataclasses

CONSTANTS = {
    'relative_bias_per_layer': False, 'relative_attention_num_buckets': 32,
    'relative_attention_max_distance': 128, 'layer_norm_epsilon': 1e-6,
    'scale_logits_via_embedding': True,
}


def sizes(config):
  found = dataclasses.asdict(config)
  # Ours has float32 in any case.
  assert not found.pop('float32_attention_logits', False)
  for name, value in CONSTANTS.items():
    assert found.pop(name, value) == value
  return {name: str(value) if name == 'dtype' else value for name, value in found.items()}
"""

# Prints, for each list of files and bindings, the sizes of the networks, or what gin says.
BUILD = DESCRIBE + """
import json, sys
import gin
from t5x import gin_utils
from t5x.infer import infer  # T5X's files name it `__main__.infer`.


def value(name):
  return gin.query_parameter(name).scoped_configurable_fn()


def build(files, bindings):
  gin.clear_config()
  gin_utils.parse_gin_flags(['.'], files, bindings)
  try:
    gin.query_parameter('infer.model')
  except ValueError:
    return sizes(value('network.Transformer.config'))
  model = value('infer.model')
  return {side: sizes(getattr(model, side).module.config) for side in ('target', 'draft')}


found = []
for files, bindings in json.loads(sys.argv[1]):
  try:
    found.append(build(files, bindings))
  except Exception as error:
    found.append(f'{type(error).__name__}: {error}')
print(json.dumps(found))
"""
# What the headers of the files require.
REQUIRED = [
    'CHECKPOINT_PATH = "a"', 'DRAFT_CHECKPOINT_PATH = "b"', 'INFER_OUTPUT_DIR = "c"',
    'MIXTURE_OR_TASK_NAME = "d"', 'TASK_FEATURE_LENGTHS = {"inputs": 8, "targets": 8}',
]
# The vocabularies are in the cloud.
BYTES = 'VOCABULARY_PATH = "bytes"'
SIZES = ['small', 'base', 'large', 'xl', 'xxl']
FAMILIES = ['t5_1_1', 'mt5', 'byt5']
# Files of pairs: the family, the target's and the draft's size.
PAIRS = {
    'byt5_xxl_small': ('byt5', 'xxl', 'small'), 'mt5_xxl_small': ('mt5', 'xxl', 'small'),
    'flan_t5_xxl_small': ('t5_1_1', 'xxl', 'small'), 't5_1_1_xxl_small': ('t5_1_1', 'xxl', 'small'),
    't5_1_1_xxl_base': ('t5_1_1', 'xxl', 'base'), 't5_1_1_xxl_large': ('t5_1_1', 'xxl', 'large'),
    't5_1_1_xl_small': ('t5_1_1', 'xl', 'small'),
}
# Examples with the paper's pair.
PAPER = [
    'cnn_dailymail_greedy', 'cnn_dailymail_sample', 'wmt_ende_greedy', 'wmt_ende_sample']


def build(folder, requests):
  """What `BUILD` prints of `{name: (files, bindings)}`."""
  done = python(folder, '-c', BUILD, json.dumps([*requests.values()]))
  assert done.returncode == 0, done.stderr[-5000:]
  return dict(zip(requests, json.loads(done.stdout), strict=True))


@pytest.fixture(scope='module')
def of_t5x(tmp_path_factory):
  """Sizes in T5X's own files."""
  return build(tmp_path_factory.mktemp('t5x'), {
      (family, size): ([f't5x/examples/t5/{family}/{size}.gin'], ['DROPOUT_RATE = 0.0'])
      for family in FAMILIES for size in SIZES})


@pytest.fixture(scope='module')
def of_ours(tmp_path_factory):
  """Networks of our files, with nothing bound but what their headers require."""
  folder = tmp_path_factory.mktemp('ours')
  # The package t5, which is imported for its tasks alone.
  (folder / 't5' / 'data').mkdir(parents=True)
  for module in ('__init__.py', 'data/__init__.py', 'data/mixtures.py'):
    (folder / 't5' / module).touch()
  model, run = 'gin_configs/models/{}.gin'.format, 'gin_configs/runs/{}.gin'.format
  requests = {name: ([model(name), run('infer')], [*REQUIRED, BYTES]) for name in PAIRS}
  requests |= {f'score {name}': ([model(name), run('score')], [*REQUIRED, BYTES])
               for name in PAIRS}
  # Any size, as the headers of the families say.
  requests |= {
      (family, size): ([model(f'{family}_xxl_small'), run('infer')], [
          *REQUIRED, BYTES, f'TARGET = @{family}_{size}/T5Config()',
          f'DRAFT = @{family}_{size}/T5Config()'])
      for family in FAMILIES for size in SIZES}
  requests['demo_t5x'] = (
      ['gin_configs/examples/demo_t5x.gin'], ['INPUT_PATH = "in.txt"', 'INFER_OUTPUT_DIR = "c"'])
  requests['text_file'] = (
      [model('byt5_xxl_small'), run('infer'), 'gin_configs/examples/text_file.gin'],
      [*(x for x in REQUIRED if 'MIXTURE' not in x), 'INPUT_PATH = "in.txt"'])
  requests |= {
      example: ([f'gin_configs/examples/{example}.gin'],
                [*(x for x in REQUIRED if 'PATH' in x or 'DIR' in x), BYTES])
      for example in PAPER}
  return build(folder, requests)


def test_every_file_is_tested():
  names = lambda folder: {path.stem for path in (ROOT / 'gin_configs' / folder).glob('*.gin')}
  # T5X has no minimal network of umT5, and none of MADLAD-400: sizes are tested with the families.
  others = {'umt5', 'umt5_xxl_small', 'madlad400', 'madlad400_10b_3b'}
  # Decoder-only pairs and distillation have test files of their own.
  others |= {'demo_lm', 'language_model_t5x'}
  assert names('models') - {*PAIRS, *FAMILIES} - others == {
      'decoding', 'demo', 'from_checkpoint', 'pair', 'pair_standalone', 'pair_t5x', 'sampling_t5x'}
  assert names('runs') - {'distil'} == {
      'infer', 'infer_standalone', 'restore_pair', 'score', 'speculate'}
  assert names('examples') - {'demo_distil', 'demo_lm', 'demo_lm_t5x'} == {
      'demo', 'demo_t5x', 'text_file', *PAPER}


def test_every_option_of_a_header_is_read():
  files = [path.read_text(encoding='utf-8') for path in (ROOT / 'gin_configs').rglob('*.gin')]
  read = {name for text in files for name in re.findall(r'%([A-Z_]+)', text)}
  for text in files:
    header = ''.join(line for line in text.splitlines() if line.startswith('#'))
    options = re.split('Required to be set:|Commonly overridden options:', header)[1:]
    options = ''.join(part.split('Expect')[0] for part in options)
    assert {*re.findall(r'\b[A-Z]+_[A-Z_]+\b', options)} <= read


def test_every_pair_has_the_sizes_of_t5x(of_ours, of_t5x):
  for name, (family, target, draft) in PAIRS.items():
    expected = {'target': of_t5x[family, target], 'draft': of_t5x[family, draft]}
    assert of_ours[name] == expected
    assert of_ours[f'score {name}'] == expected


@pytest.mark.parametrize('family', FAMILIES)
def test_every_size_is_that_of_t5x(of_ours, of_t5x, family):
  for size in SIZES:
    expected = of_t5x[family, size]
    assert expected['emb_dim'] > 0 and expected['dtype'].endswith('bfloat16')
    assert of_ours[family, size] == {'target': expected, 'draft': expected}


def test_examples_need_what_their_headers_say(of_ours, of_t5x):
  for example in PAPER:
    assert of_ours[example] == {
        'target': of_t5x['t5_1_1', 'xxl'], 'draft': of_t5x['t5_1_1', 'small']}
  assert of_ours['text_file'] == {
      'target': of_t5x['byt5', 'xxl'], 'draft': of_t5x['byt5', 'small']}
  assert of_ours['demo_t5x']['target'].keys() == of_t5x['byt5', 'xxl'].keys()


def test_unscoped_bindings_are_of_both_and_draft_ones_of_the_draft(user):
  files = ['my_infer.gin', 'gin_configs/runs/speculate.gin', 'my_draft.gin']
  bindings = ['INFER_OUTPUT_DIR = "out"', 'DRAFT_CHECKPOINT_PATH = "draft/checkpoint_3"']
  found = build(user, {'overlay': (files, bindings)})['overlay']
  assert found['target'] == {
      'vocab_size': 4096, 'dtype': 'float32', 'emb_dim': 8, 'num_heads': 4, 'head_dim': 3,
      'num_encoder_layers': 2, 'num_decoder_layers': 2, 'mlp_dim': 16, 'dropout_rate': 0.0,
      'mlp_activations': ['gelu', 'linear'], 'logits_via_embedding': False}
  assert found['draft'] == {**found['target'], 'num_decoder_layers': 1}


def test_names_of_t5x_keep_their_meaning_beside_ours(user, of_t5x):
  large = 't5x/examples/t5/t5_1_1/large.gin'
  overlay = ['my_infer.gin', 'gin_configs/runs/speculate.gin']
  bindings = ['INFER_OUTPUT_DIR = "out"', 'DRAFT_CHECKPOINT_PATH = "b"']
  found = build(user, {
      'on the command line': (
          overlay, [*bindings, 'network.T5Config.emb_dim = 24',
                    'draft/network.T5Config.num_decoder_layers = 1']),
      'ours behind': ([large, 'gin_configs/models/t5_1_1.gin'], ['DROPOUT_RATE = 0.0']),
      'ours before': (['gin_configs/models/t5_1_1.gin', large], ['DROPOUT_RATE = 0.0']),
  })
  assert {name: type(value) for name, value in found.items()} == dict.fromkeys(found, dict), found
  for side, layers in (('target', 2), ('draft', 1)):
    config = found['on the command line'][side]
    assert (config['emb_dim'], config['num_decoder_layers']) == (24, layers)
  assert found['ours behind'] == found['ours before'] == of_t5x['t5_1_1', 'large']


def test_every_pair_without_t5x(tmp_path, of_ours, of_t5x):
  code = DESCRIBE + """
import json, sys
sys.modules['t5x'] = None
import gin
from speculative_t5x import gin_command, infer

found = {}
for name in json.loads(sys.argv[1]):
  gin_command.configure(infer.parse([
      f'--gin_file=gin_configs/models/{name}.gin',
      '--gin_file=gin_configs/runs/infer_standalone.gin', '--output_dir=out',
      '--gin.CHECKPOINT_PATH=a', '--gin.DRAFT_CHECKPOINT_PATH=b',
      '--gin.TASK_FEATURE_LENGTHS={"inputs": 8, "targets": 8}']))
  value = lambda key: gin.query_parameter(f'load_pair.{key}').scoped_configurable_fn()
  found[name] = {'gamma': value('gamma'), 'vocabulary': value('vocabulary_path')} | {
      side: sizes(value(side)) for side in ('target', 'draft')}
print(json.dumps(found))
"""
  done = python(tmp_path, '-c', code, json.dumps([*PAIRS, 'demo']))
  assert done.returncode == 0, done.stderr[-5000:]
  found = json.loads(done.stdout)
  for name, (family, target, draft) in PAIRS.items():
    assert found[name]['target'] == of_t5x[family, target]
    assert found[name]['draft'] == of_t5x[family, draft]
    assert found[name]['gamma'] in (5, 7)
    assert (found[name]['vocabulary'] == 'bytes') == (family == 'byt5')
  assert {side: found['demo'][side] for side in ('target', 'draft')} == of_ours['demo_t5x']
