"""A pair's two checkpoints, through T5X's own restoring. Skipped where T5X is not installed."""

import functools
import zlib

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seqio
import tensorflow as tf

from speculative_t5x import checkpoints as our_checkpoints
from speculative_t5x.errors import UserError
from trees import assert_same

# Submodules: this folder itself would pass for a package `t5x` without T5X.
REASON = 'needs T5X, which is not on PyPI'
t5x_checkpoints = pytest.importorskip('t5x.checkpoints', reason=REASON)
adafactor = pytest.importorskip('t5x.adafactor', reason=REASON)
models = pytest.importorskip('t5x.models', reason=REASON)
partitioning = pytest.importorskip('t5x.partitioning', reason=REASON)
train_state_lib = pytest.importorskip('t5x.train_state', reason=REASON)
utils = pytest.importorskip('t5x.utils', reason=REASON)
t5_network = pytest.importorskip('t5x.examples.t5.network', reason=REASON)
scalable_network = pytest.importorskip('t5x.examples.scalable_t5.network', reason=REASON)
lm_network = pytest.importorskip('t5x.examples.decoder_only.network', reason=REASON)

from speculative_t5x.t5x_integration import network  # noqa: E402 - it imports T5X
from speculative_t5x.t5x_integration.model import SpeculativeModel  # noqa: E402
from speculative_t5x.t5x_integration.restore import PairRestoreCheckpointConfig  # noqa: E402

SIZES = {
    'vocab_size': 32, 'emb_dim': 16, 'num_heads': 2, 'head_dim': 4, 'mlp_dim': 24,
    'mlp_activations': ('gelu', 'linear'), 'dropout_rate': 0.0,
}
VOCABULARY = seqio.PassThroughVocabulary(32, eos_id=1)
PARTITIONER = partitioning.PjitPartitioner(num_partitions=1)
PAIRS = [
    ('minimal', 'minimal'), ('scan', 'scan'), ('decoder-only', 'decoder-only'),
    ('minimal', 'decoder-only'), ('own', 'own'),
]
FORMATS = ['native', 'orbax']
# The draft has fewer layers, so that neither side's parameters would do for the other.
LAYERS = {'target': 2, 'draft': 1}


@functools.cache
def model_of(kind, layers):
  """A T5X model without parameters."""
  sizes = {**SIZES, 'num_encoder_layers': layers, 'num_decoder_layers': layers}
  match kind:
    case 'decoder-only':
      config = lm_network.TransformerConfig(**SIZES, num_layers=layers)
      return models.DecoderOnlyModel(lm_network.DecoderWrapper(config), VOCABULARY, None)
    case 'minimal' | 'wide':
      sizes['emb_dim'] += 8 * (kind == 'wide')
      module = t5_network.Transformer(t5_network.T5Config(**sizes))
    case 'scan':
      module = scalable_network.Transformer(
          scalable_network.T5Config(**sizes, scan_layers=True, remat_policy='minimal'))
    case 'own':
      module = network.Transformer(network.T5Config(**sizes))
  return models.EncoderDecoderModel(module, VOCABULARY, VOCABULARY, None)


def features_of(model):
  """Shapes and types of a batch, as `t5x.infer` finds them by the model's feature converter."""
  names = ('decoder_input_tokens', 'decoder_target_tokens')
  if model.FEATURE_CONVERTER_CLS is seqio.EncDecFeatureConverter:
    names += ('encoder_input_tokens',)
  return dict.fromkeys(names, (2, 3)), dict.fromkeys(names, jnp.dtype('int32'))


@functools.cache
def variables_of(kind, layers, seed):
  """Variables of one model, with parameters that no other model or seed has."""
  model = model_of(kind, layers)
  variables = flax.core.unfreeze(jax.eval_shape(
      lambda key: model.get_initial_variables(key, *features_of(model)), jax.random.key(0)))

  def draw(path, leaf):
    name = jax.tree_util.keystr(path)
    random = np.random.default_rng([seed, layers, zlib.crc32(f'{kind} {name}'.encode())])
    return random.normal(size=leaf.shape).astype(np.float32)

  variables['params'] = jax.tree_util.tree_map_with_path(draw, variables['params'])
  return variables


def save(folder, layout, kind, layers, *, step, seed, dtype='float32'):
  """Writes a checkpoint as a training of T5X does, optimizer included, or as we do."""
  variables = variables_of(kind, layers, seed)
  params = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), variables['params'])
  if layout == 'ours':
    our_checkpoints.save_params(folder / f'checkpoint_{step}', params, step=step)
    return
  optimizer = adafactor.Adafactor(
      decay_rate=0.8, logical_factor_rules=adafactor.standard_logical_factor_rules())
  state = train_state_lib.FlaxOptimTrainState.create(
      optimizer, flax.core.freeze({**variables, 'params': jax.tree.map(jnp.asarray, params)}))
  state = state.replace_step(jnp.asarray(step, jnp.int32))
  folder.mkdir(exist_ok=True)
  if layout == 'native':
    t5x_checkpoints.Checkpointer(
        state, PARTITIONER, str(folder), save_dtype=jnp.dtype(dtype)).save(state)
  else:
    manager = t5x_checkpoints.OrbaxCheckpointManagerInterface(str(folder), state, PARTITIONER)
    manager.save(state)
    manager.close()


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """Makes the folder of one side's checkpoints: the one of step 9 is meant, of step 2 is not."""
  @functools.cache
  def make(side, layout, kind):
    folder = tmp_path_factory.mktemp('saved') / f'{side}-{layout}-{kind}'
    for step, seed in ((2, 0), (9, 1)):
      save(folder, layout, kind, LAYERS[side], step=step, seed=seed)
    return folder

  return make


def restore(model, config, *, use_orbax=True):
  """What `t5x.infer` restores."""
  initializer = utils.TrainStateInitializer(
      None, model.get_initial_variables, features_of(model)[0], PARTITIONER, features_of(model)[1])
  config.strict = False
  state, _ = utils.create_checkpoint_manager_and_restore(
      initializer, PARTITIONER, config, config.path, None, use_orbax=use_orbax)
  return state


def pair_of(target, draft):
  """A model of two kinds."""
  return SpeculativeModel(model_of(target, LAYERS['target']), model_of(draft, LAYERS['draft']))


def config_of(folder, mode='specific', dtype=None, step=9):
  path = folder / f'checkpoint_{step}' if mode == 'specific' else folder
  return utils.RestoreCheckpointConfig(str(path), mode, dtype=dtype)


def assert_is_pair(state, target, draft):
  """Whether every parameter is the saved one of step 9, and nothing else is there."""
  assert set(state.params) == {'target', 'draft'}
  assert_same(state.params['target'], variables_of(target, LAYERS['target'], 1)['params'])
  assert_same(state.params['draft'], variables_of(draft, LAYERS['draft'], 1)['params'])
  assert int(state.step) == 9


@pytest.mark.parametrize('mode', ['specific', 'latest'])
@pytest.mark.parametrize('draft_layout', FORMATS)
@pytest.mark.parametrize('target_layout', FORMATS)
@pytest.mark.parametrize('target, draft', PAIRS)
def test_every_parameter(saved, target, draft, target_layout, draft_layout, mode):
  model = pair_of(target, draft)
  config = PairRestoreCheckpointConfig(
      target=config_of(saved('target', target_layout, target), mode),
      draft=config_of(saved('draft', draft_layout, draft), mode))
  assert_is_pair(restore(model, config), target, draft)


@pytest.mark.parametrize('target, draft', PAIRS)
def test_without_orbax(saved, target, draft):
  config = PairRestoreCheckpointConfig(
      target=config_of(saved('target', 'native', target)),
      draft=config_of(saved('draft', 'native', draft), 'latest'))
  assert_is_pair(restore(pair_of(target, draft), config, use_orbax=False), target, draft)


def test_orbax_checkpoints_need_use_orbax(saved):
  target = saved('target', 'orbax', 'minimal')
  config = PairRestoreCheckpointConfig(
      target=config_of(target), draft=config_of(saved('draft', 'native', 'minimal')))
  with pytest.raises(ValueError, match=str(target)):
    restore(pair_of('minimal', 'minimal'), config, use_orbax=False)


@pytest.mark.parametrize('use_orbax', [True, False])
def test_what_we_save(tmp_path, use_orbax):
  for side, layers in LAYERS.items():
    save(tmp_path / side, 'ours', 'own', layers, step=9, seed=1)
  config = PairRestoreCheckpointConfig(
      target=config_of(tmp_path / 'target', 'latest'), draft=config_of(tmp_path / 'draft'))
  assert_is_pair(restore(pair_of('own', 'own'), config, use_orbax=use_orbax), 'own', 'own')


def test_checkpoints_of_tensorflow(tmp_path):
  # T5's public checkpoints before T5X; they hold no state of an optimizer that T5X would know.
  for side, layers in LAYERS.items():
    save_tensorflow(tmp_path / side / 'model.ckpt-9', variables_of('minimal', layers, 1)['params'])
  config = PairRestoreCheckpointConfig(**{
      side: utils.RestoreCheckpointConfig(str(tmp_path / side / 'model.ckpt-9'), 'specific')
      for side in LAYERS})
  assert_is_pair(restore(pair_of('minimal', 'minimal'), config), 'minimal', 'minimal')


def save_tensorflow(path, params):
  """Writes parameters of the minimal network as Mesh TensorFlow names them."""
  norms = {
      'encoder': ['pre_attention_layer_norm', 'pre_mlp_layer_norm'],
      'decoder': ['pre_self_attention_layer_norm', 'pre_cross_attention_layer_norm',
                  'pre_mlp_layer_norm'],
  }
  projections = {'query': 'q', 'key': 'k', 'value': 'v', 'out': 'o'}
  named = {'global_step': np.int64(9)}
  for names, value in flax.traverse_util.flatten_dict(params).items():
    stack, *rest = names
    match [name.removeprefix('layers_') for name in rest]:
      case ['embedding']:
        name = 'shared/embedding'
      case ['relpos_bias', _]:
        name = f'{stack}/block_000/layer_000/SelfAttention/relative_attention_bias'
      case ['encoder_norm' | 'decoder_norm', _]:
        name = f'{stack}/final_layer_norm/scale'
      case ['logits_dense', _]:
        name = f'{stack}/logits/kernel'
      case [layer, 'mlp', dense, _]:
        last = len(norms[stack]) - 1
        name = f'{stack}/block_00{layer}/layer_00{last}/DenseReluDense/{dense}/kernel'
      case [layer, norm, 'scale']:
        name = f'{stack}/block_00{layer}/layer_00{norms[stack].index(norm)}/layer_norm/scale'
      case [layer, attention, projection, _]:
        kind = 'EncDecAttention' if attention.startswith('encoder') else 'SelfAttention'
        name = f'{stack}/block_00{layer}/layer_000/{kind}/{projections[projection]}'
    named[name] = value
  path.parent.mkdir()
  tf.raw_ops.SaveV2(
      prefix=str(path), tensor_names=[*named], shape_and_slices=[''] * len(named),
      tensors=[tf.constant(value) for value in named.values()])


@pytest.mark.parametrize('layout', FORMATS)
def test_each_side_has_its_own_dtype(saved, tmp_path, layout):
  model = pair_of('minimal', 'minimal')
  target = config_of(saved('target', layout, 'minimal'), dtype='float32')
  expected = {side: variables_of('minimal', layers, 1)['params'] for side, layers in LAYERS.items()}
  state = restore(model, PairRestoreCheckpointConfig(
      target=target, draft=config_of(saved('draft', layout, 'minimal'), dtype='bfloat16')))
  assert_same(state.params['target'], expected['target'])
  assert_same(state.params['draft'], expected['draft'], jnp.bfloat16)
  # Without a dtype, parameters are as they were saved.
  save(tmp_path, layout, 'minimal', LAYERS['draft'], step=9, seed=1, dtype='bfloat16')
  state = restore(model, PairRestoreCheckpointConfig(target=target, draft=config_of(tmp_path)))
  assert_same(state.params['draft'], expected['draft'], jnp.bfloat16)


@pytest.mark.parametrize('layout', FORMATS)
def test_relative_paths(saved, monkeypatch, layout):
  folders = {side: saved(side, layout, 'minimal') for side in LAYERS}
  monkeypatch.chdir(folders['target'].parent.parent)
  config = PairRestoreCheckpointConfig(**{
      side: config_of(folder.relative_to(folders['target'].parent.parent))
      for side, folder in folders.items()})
  assert_is_pair(restore(pair_of('minimal', 'minimal'), config), 'minimal', 'minimal')


def refused(folders, **changed):
  """The message of refusing a pair of minimal networks, `changed` in place of a side's config."""
  config = {side: config_of(folder) for side, folder in folders.items()} | changed
  with pytest.raises(UserError) as error:
    restore(pair_of('minimal', 'minimal'), PairRestoreCheckpointConfig(**config))
  message = str(error.value)
  assert '\n' not in message
  return message


@pytest.mark.parametrize('side', ['target', 'draft'])
def test_missing_checkpoints_are_named(saved, tmp_path, side):
  folders = {name: saved(name, 'native', 'minimal') for name in LAYERS}
  missing = tmp_path / 'nothing'
  for mode in ('specific', 'latest'):
    message = refused(folders, **{side: config_of(missing, mode)})
    assert message.startswith(f'{side} checkpoint: expected') and str(missing) in message
  missing.mkdir()
  message = refused(folders, **{side: config_of(missing, 'latest')})
  assert message.startswith(f'{side} checkpoint: expected') and str(missing) in message
  assert refused(folders, **{side: None}).startswith(f'{side} checkpoint: expected')
  everything = utils.RestoreCheckpointConfig(str(folders[side]), 'all')
  assert 'found' in refused(folders, **{side: everything})


@pytest.mark.parametrize('layout', FORMATS)
@pytest.mark.parametrize('side', ['target', 'draft'])
def test_checkpoints_of_another_size_are_named(saved, tmp_path, side, layout):
  folders = {name: saved(name, 'native', 'minimal') for name in LAYERS}
  path = tmp_path / 'other'
  save(path, layout, 'wide', LAYERS[side], step=9, seed=1)
  message = refused(folders, **{side: config_of(path)})
  assert message.startswith(f'{side} checkpoint') and str(path) in message
  assert '(16,' in message and '(24,' in message


@pytest.mark.parametrize('layout', FORMATS)
def test_the_folder_of_checkpoints_is_no_checkpoint(saved, layout):
  folders = {name: saved(name, 'native', 'minimal') for name in LAYERS}
  draft = saved('draft', layout, 'minimal')
  message = refused(folders, draft=utils.RestoreCheckpointConfig(str(draft), 'specific'))
  assert message.startswith('draft checkpoint') and str(draft) in message
