"""What a checkpoint holds: its network from names and shapes, its family, its contradictions."""

import dataclasses
import math
import pathlib
import re
import weakref

import flax
import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trees
from speculative_t5x import checkpoints, convert, families, pair, reading, vocabularies
from speculative_t5x.errors import UserError
from speculative_t5x.network import T5Config, Transformer
from speculative_t5x.stored import StoredArray, minimal_tree
from trees import assert_same, flatten

GOLDENS = pathlib.Path(__file__).parent / 'goldens' / 'huggingface'
GIN = pathlib.Path(__file__).parents[1] / 'gin_configs' / 'models'

CONFIG = T5Config(
    vocab_size=29, emb_dim=16, num_heads=3, num_encoder_layers=1, num_decoder_layers=2, head_dim=6,
    mlp_dim=20, mlp_activations=('gelu', 'linear'),
)


def random_params(config):
  tokens = jnp.ones((1, 1), jnp.int32)
  shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens, tokens)['params']
  return trees.random_params(shapes, config.head_dim)


def stacked(params):
  """The tree of T5X's scalable network: heads have an axis, and layers are along axis 1."""
  flat = {}
  for name, value in flatten(params).items():
    if 'attention/' in name and name.endswith('out/kernel'):
      value = value.reshape(CONFIG.num_heads, CONFIG.head_dim, -1)
    elif 'attention/' in name and name.endswith('kernel'):
      value = value.reshape(-1, CONFIG.num_heads, CONFIG.head_dim)
    if match := re.fullmatch(r'(encoder|decoder)/layers_(\d+)/(.+)', name):
      flat.setdefault(f'{match[1]}/{match[1]}/{match[3]}', {})[int(match[2])] = value
    else:
      flat[name] = value
  return flax.traverse_util.unflatten_dict({
      name: np.stack([value[layer] for layer in range(len(value))], axis=1)
      if isinstance(value, dict) else value
      for name, value in flat.items()
  }, sep='/')


@pytest.mark.parametrize('activations', [('relu',), ('gelu', 'linear')])
@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize('per_layer', [False, True])
def test_network_from_names_and_shapes(tmp_path, activations, tied, per_layer):
  config = dataclasses.replace(
      CONFIG, mlp_activations=activations, logits_via_embedding=tied,
      relative_bias_per_layer=per_layer, relative_attention_num_buckets=16)
  params = random_params(config)
  checkpoints.save_params(tmp_path / 'checkpoint_0', params)
  found = families.describe(tmp_path / 'checkpoint_0')
  assert (found.layout, found.config, found.eos_id) == ('T5X', config, None)
  assert found.num_parameters == sum(x.size for x in jax.tree.leaves(params))
  assert found.dtypes == ('float32',)
  families.check_config(found, dataclasses.replace(config, dtype='bfloat16', dropout_rate=0.1))
  families.check_config(found, dataclasses.replace(config, layer_norm_epsilon=1e-5))


@pytest.mark.parametrize('per_layer', [False, True])
def test_scanned_layers_are_taken_apart(tmp_path, per_layer):
  config = dataclasses.replace(
      CONFIG, num_encoder_layers=3, num_decoder_layers=18, relative_bias_per_layer=per_layer)
  params = random_params(config)
  scanned = stacked(params)
  out = scanned['decoder']['decoder']['self_attention']['out']['kernel']
  assert out.shape == (3, 18, 6, 16) and 'layers_0' not in scanned['decoder']
  path = tmp_path / 'checkpoint_0'
  checkpoints.save_params(path, scanned)
  assert families.config_of(path) == config
  assert_same(checkpoints.load_params(path, like=params), params)
  assert_same(checkpoints.load_params(path), params)
  # T5X's own scanned module asks for them as they are.
  assert_same(checkpoints.load_params(path, like=scanned), scanned)
  checkpoints.check_params(path, scanned)
  with pytest.raises(UserError, match=r"'decoder/decoder/.*expected no such parameter"):
    checkpoints.check_params(path, params)
  del params['decoder']['layers_17']
  with pytest.raises(UserError, match=r"'decoder/layers_17/.*expected no such parameter"):
    checkpoints.load_params(path, like=params)


@pytest.mark.parametrize('scan', [False, True])
@pytest.mark.parametrize('tied', [False, True])
def test_live_scalable_network_of_t5x(tmp_path, scan, tied):
  """umT5 as published: T5X's scalable network, with a relative bias in every layer."""
  scalable = pytest.importorskip('t5x.examples.scalable_t5.network', reason='needs T5X')

  module = scalable.Transformer(scalable.T5Config(
      vocab_size=29, emb_dim=16, num_heads=3, num_encoder_layers=3, num_decoder_layers=2,
      head_dim=6, mlp_dim=20, mlp_activations=('gelu', 'linear'), logits_via_embedding=tied,
      dropout_rate=0.0, scan_layers=scan))
  random = np.random.default_rng(0)
  inputs, tokens = (random.integers(1, 29, (2, length)).astype(np.int32) for length in (140, 136))
  inputs[1, 40:], tokens[:, 0] = 0, 0
  shapes = jax.eval_shape(
      lambda: module.init(jax.random.key(0), inputs, tokens, tokens, enable_dropout=False))
  params = trees.random_params(shapes['params'], 6)
  expected = module.apply({'params': params}, inputs, tokens, tokens + 1, enable_dropout=False)
  checkpoints.save_params(tmp_path / 'checkpoint_0', params)
  found = families.describe(tmp_path / 'checkpoint_0')
  assert found.family == families.UMT5 and found.config.logits_via_embedding == tied
  logits = Transformer(found.config).apply(
      {'params': checkpoints.load_params(tmp_path / 'checkpoint_0')}, inputs, tokens)
  print(f'largest difference of logits {np.abs(logits - expected).max():.2e}')
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize('chunk, times', [((2, 4, 3), 1), ((1, 4, 3), 2), ((1, 2, 1), 6)])
def test_scanned_array_is_read_once_and_let_go(monkeypatch, chunk, times):
  monkeypatch.setattr(reading, 'MIN_PIECE_BYTES', 1)
  value = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
  reads, parts = [], []

  def start(index, out):
    reads.append(index)
    parts.append(weakref.ref(out))
    out[...] = value[index]
    return lambda: None

  arrays = minimal_tree({
      'encoder/encoder/mlp/wi/kernel': StoredArray(value.shape, value.dtype, start, chunk)})
  for repeat in range(1, 3):
    found = dict(reading.read_all('x', arrays))
    assert list(found) == [f'encoder/layers_{i}/mlp/wi/kernel' for i in range(4)]
    for layer, kernel in enumerate(found.values()):
      np.testing.assert_array_equal(kernel, value[:, layer])
    # All layers of a piece at once.
    assert len(reads) == repeat * times
    assert all(index[1] == slice(0, 4) for index in reads)
    assert all(part() is None for part in parts)


@pytest.mark.parametrize('edit, message', [
    (lambda t: t.pop('encoder'), 'encoder/relpos_bias/rel_embedding.*found none'),
    (lambda t: t.pop('token_embedder'), "'token_embedder/embedding': expected a matrix"),
    (lambda t: t['encoder'].update(relpos_bias={'rel_embedding': np.ones((4, 32), np.float32)}),
     'columns for 4 heads, as the relative biases have, found 18'),
    (lambda t: t['encoder'].update(relpos_bias={'rel_embedding': np.ones((3, 30), np.float32)}),
     'relative_attention_num_buckets: expected a multiple of 4, found 30'),
    (lambda t: t['decoder']['layers_1']['mlp'].pop('wo'),
     "'decoder/layers_1/mlp/wo/kernel' differs: expected shape .20, 16., found no such"),
    (lambda t: t['decoder'].update(bias={'x': np.ones(3, np.float32)}),
     "'decoder/bias/x' differs: expected no such parameter"),
    (lambda t: t['decoder'].update(layers_5=t['decoder']['layers_1']), 'decoder/layers_2/'),
])
def test_trees_of_other_models(tmp_path, edit, message):
  params = random_params(CONFIG)
  edit(params)
  checkpoints.save_params(tmp_path / 'checkpoint_0', params)
  with pytest.raises(UserError, match=message) as caught:
    families.describe(tmp_path / 'checkpoint_0')
  assert '\n' not in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize('name, family', [
    ('t5_1_0', families.T5_1_0), ('t5_1_1', families.T5_1_1), ('mt5', families.MT5),
    ('umt5', families.UMT5), ('umt5_tied', families.UMT5), ('byt5', families.BYT5),
    ('unusual', families.OTHER),
])
def test_family_of_folders(name, family):
  assert families.describe(GOLDENS / name).family == family


@pytest.mark.parametrize('family, vocab_size', families.VOCAB_SIZES.items())
def test_family_of_shapes(family, vocab_size):
  config = dataclasses.replace(
      CONFIG, vocab_size=vocab_size, relative_bias_per_layer=family == families.UMT5)
  if family == families.T5_1_0:
    config = dataclasses.replace(config, mlp_activations=('relu',), logits_via_embedding=True)
  assert families.family_of(config) == family
  assert families.default_eos_id(family) == (2 if family == families.MADLAD else 1)


@pytest.mark.parametrize('change', [
    {'vocab_size': 30}, {'emb_dim': 17}, {'num_heads': 9, 'head_dim': 2}, {'num_encoder_layers': 2},
    {'num_decoder_layers': 1}, {'mlp_dim': 21}, {'mlp_activations': ('relu',)},
    {'logits_via_embedding': True}, {'relative_bias_per_layer': True},
    {'relative_attention_num_buckets': 16},
])
def test_contradictions_are_refused(tmp_path, change):
  checkpoints.save_params(tmp_path / 'checkpoint_0', random_params(CONFIG))
  found = families.describe(tmp_path / 'checkpoint_0')
  families.check_config(found, CONFIG)
  name = next(iter(change))
  with pytest.raises(UserError) as caught:
    families.check_config(found, dataclasses.replace(CONFIG, **change))
  assert str(caught.value).endswith(
      f'checkpoint_0: {name}: expected {change[name]} as in the given T5Config, found '
      f'{getattr(CONFIG, name)} in the checkpoint')


@pytest.mark.parametrize('change', [
    {'layer_norm_epsilon': 1e-6}, {'relative_attention_max_distance': 128},
    {'mlp_activations': ('gelu', 'linear')}, {'scale_logits_via_embedding': True},
])
def test_a_folder_contradicts_in_what_only_it_tells(change):
  found = families.describe(GOLDENS / 'unusual')
  families.check_config(found, found.config)
  families.check_config(
      found, dataclasses.replace(found.config, mlp_activations=('swish', 'linear')))
  with pytest.raises(UserError, match=next(iter(change))):
    families.check_config(found, dataclasses.replace(found.config, **change))


def test_vocabulary_is_checked():
  found = families.describe(GOLDENS / 'byt5')
  families.check_vocabulary(found, vocabularies.ByteVocabulary())
  with pytest.raises(UserError, match='eos_token_id: expected 1 as in the vocabulary, found 2'):
    families.check_vocabulary(
        dataclasses.replace(found, eos_id=2), vocabularies.ByteVocabulary())
  with pytest.raises(UserError, match="vocab_size: expected at least the vocabulary's 559"):
    families.check_vocabulary(found, vocabularies.ByteVocabulary(extra_ids=300))


@pytest.fixture
def no_gin_bindings():
  """What earlier tests have bound to `load_pair` would count beside this one's arguments."""
  with gin.unlock_config():
    gin.clear_config()


@pytest.mark.usefixtures('no_gin_bindings')
@pytest.mark.parametrize('layout, other', [('t5x', 'huggingface'), ('huggingface', 't5x')])
def test_a_pair_of_other_paddings_and_layouts(tmp_path, shared_data, layout, other):
  """32,128 rows and 32,100 of one vocabulary, the padded ones with the largest logits."""
  for name, rows, to, seed in (('target', 32128, layout, 0), ('draft', 32100, other, 1)):
    params = random_params(dataclasses.replace(CONFIG, vocab_size=rows))
    kernel = np.random.default_rng(seed).normal(size=(CONFIG.emb_dim, rows)).astype(np.float32)
    kernel[:, 32100:] *= 100
    params['decoder']['logits_dense']['kernel'] = kernel
    checkpoints.save_params(tmp_path / f'{name}_0', params)
    convert.convert(tmp_path / f'{name}_0', tmp_path / name, to)
  loaded = pair.load_pair(
      str(tmp_path / 'target'), str(tmp_path / 'draft'), extra_ids=100, gamma=2, temperature=1.0,
      vocabulary_path=str(shared_data / 't5_spiece.model'))
  assert loaded.vocabulary.size == 32100
  assert loaded.target.module.config.vocab_size == 32128
  assert loaded.draft.module.config.vocab_size == 32100
  inputs = np.array([[5, 6, 7, 1]] * 4, np.int32)
  sampled = loaded.predict(inputs, max_length=8, seed=3)
  greedy = loaded.predict(inputs[:1], max_length=8, temperature=0.0)
  plain = loaded.plain(inputs[:1], max_length=8, temperature=0.0)
  np.testing.assert_array_equal(greedy.sequences, plain.sequences)
  for found in (sampled, greedy):
    assert (np.asarray(found.sequences) < 32100).all()
  # The padded rows would have won.
  logits = loaded.target.module.apply(
      {'params': loaded.target.params}, inputs[:1], np.zeros((1, 1), np.int32))
  assert logits.argmax() >= 32100


def gin_sizes(file):
  """The sizes of a gin file of the project, by name, as `STANDARD_SIZES` has them."""
  found = {}
  scopes = re.split(r'^\w+?_(\w+)/speculative_t5x.T5Config:$', (GIN / file).read_text(), flags=re.M)
  for name, body in zip(scopes[1::2], scopes[2::2], strict=True):
    value = lambda key, body=body: int(re.search(rf'^  {key} = (\d+)$', body, flags=re.M)[1])
    found[name.removeprefix('1_1_')] = tuple(map(value, (
        'emb_dim', 'num_heads', 'head_dim', 'num_encoder_layers', 'num_decoder_layers', 'mlp_dim')))
  return found


@pytest.mark.parametrize('file, family', [
    ('t5_1_1.gin', families.T5_1_1), ('mt5.gin', families.MT5), ('byt5.gin', families.BYT5),
    ('umt5.gin', families.UMT5), ('madlad400.gin', families.MADLAD),
])
def test_sizes_are_those_of_the_gin_files(file, family):
  assert gin_sizes(file) == families.STANDARD_SIZES[family]


# Millions of parameters, as published with the models.
PUBLISHED = {
    families.T5_1_0: {'small': 60.5, 'base': 223, 'large': 738, '3b': 2850, '11b': 11300},
    families.T5_1_1: {'small': 77, 'base': 248, 'large': 783, 'xl': 2850, 'xxl': 11135},
    families.MT5: {'small': 300, 'base': 582, 'large': 1230, 'xl': 3740, 'xxl': 12900},
    families.BYT5: {'small': 300, 'base': 582, 'large': 1230, 'xl': 3740, 'xxl': 12900},
    # Of the last, 10.7 billion is what its paper says; of the others, the sizes of their files.
    families.MADLAD: {'3b': 2940, '7b': 8300, '10b': 10700},
}


@pytest.mark.parametrize('family', PUBLISHED)
def test_smaller_sizes_of_the_family_could_draft(family):
  choices = {'vocab_size': families.VOCAB_SIZES[family]}
  if family == families.T5_1_0:
    choices |= {'mlp_activations': ('relu',), 'logits_via_embedding': True}
  target = families.Description(
      'x', 'T5X', family, dataclasses.replace(CONFIG, **choices), None, {})

  def of_size(count):
    class Huge(families.Description):
      num_parameters = count
    return families.drafts_for(Huge(**vars(target)))

  found = of_size(10**12)
  assert found.keys() == PUBLISHED[family].keys()
  for name, count in found.items():
    assert math.isclose(count / 1e6, PUBLISHED[family][name], rel_tol=0.02), name
  # A model does not draft for itself or for a smaller one.
  largest = list(found)[-1]
  assert list(of_size(found[largest])) == list(found)[:-1]
  own = dataclasses.replace(target, config=dataclasses.replace(CONFIG, vocab_size=4096))
  assert families.drafts_for(own) == {}
