"""Every drafter, and the rules of verification, through T5X models."""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seqio

from speculative_t5x import ngram, vocabularies
from speculative_t5x.demo import tasks as demo_tasks
from speculative_t5x.drafters import DrafterConfig
from speculative_t5x.errors import UserError

# Submodules: this folder itself would pass for a package `t5x` without T5X.
REASON = 'needs T5X, which is not on PyPI'
models = pytest.importorskip('t5x.models', reason=REASON)
t5x_decoding = pytest.importorskip('t5x.decoding', reason=REASON)
utils = pytest.importorskip('t5x.utils', reason=REASON)
minimal = pytest.importorskip('t5x.examples.t5.network', reason=REASON)
decoder_only = pytest.importorskip('t5x.examples.decoder_only.network', reason=REASON)

from speculative_t5x.t5x_integration import decoding, drafts, tasks  # noqa: E402
from speculative_t5x.t5x_integration.model import SpeculativeModel  # noqa: E402
from speculative_t5x.t5x_integration.restore import PairRestoreCheckpointConfig  # noqa: E402

VOCAB, BATCH, LENGTH = 20, 3, 14
VOCABULARY = seqio.PassThroughVocabulary(VOCAB, eos_id=1)
SIZES = {'vocab_size': VOCAB, 'emb_dim': 16, 'num_heads': 2, 'head_dim': 8, 'mlp_dim': 24,
         'dropout_rate': 0.0}


def target_of(kind):
  if kind == 'decoder-only':
    module = decoder_only.DecoderWrapper(decoder_only.TransformerConfig(**SIZES, num_layers=2))
    return models.DecoderOnlyModel(module, VOCABULARY, None)
  module = minimal.Transformer(
      minimal.T5Config(**SIZES, num_encoder_layers=1, num_decoder_layers=2))
  return models.EncoderDecoderModel(module, VOCABULARY, VOCABULARY, None)


def batch_of(kind):
  rng = np.random.default_rng(0)
  blank = np.zeros((BATCH, LENGTH), np.int32)
  if kind == 'decoder-only':
    tokens, causal = blank.copy(), blank.copy()
    for row, length in enumerate((4, 2, 6)):
      tokens[row, 1 : length + 1] = rng.integers(2, 6, length)
      causal[row, : length + 1] = 1
    return {'decoder_input_tokens': tokens, 'decoder_target_tokens': tokens,
            'decoder_causal_attention': causal}
  inputs = rng.integers(2, VOCAB, (BATCH, 8)).astype(np.int32)
  inputs[1, 5:] = 0
  return {'encoder_input_tokens': inputs, 'decoder_input_tokens': blank,
          'decoder_target_tokens': blank}


COPYING = DrafterConfig('copying')
TABLE = ngram.build([[2, 3, 4, 1], [5, 4, 3, 1]], VOCAB, 3)
DRAFTERS = {
    'copying': {'drafter': COPYING},
    'ngram': {'drafter': DrafterConfig('ngram'), 'ngram_table': TABLE},
    'model': {'draft': 'encoder-decoder'},
    'adaptive': {'drafter': DrafterConfig(min_confidence=0.2), 'draft': 'encoder-decoder'},
    'mixed': {'drafter': DrafterConfig('mixed'), 'draft': 'encoder-decoder'},
    'mixed language model': {'drafter': DrafterConfig('mixed'), 'draft': 'decoder-only'},
    'cascade': {'drafter': DrafterConfig('cascade'), 'draft': 'decoder-only'},
    'ngram cascade': {
        'drafter': DrafterConfig('cascade', cascade='ngram', cascade_gamma=3),
        'draft': 'encoder-decoder', 'ngram_table': TABLE},
}
GREEDY = {'temperature': 0.0, 'rescale_log_probs': False}


def predict(kind, seed=1, **settings):
  """Outputs and auxiliary values of a model, every parameter scaled to make texts that vary."""
  decode = settings.pop('decode', {})
  draft = settings.pop('draft', None)
  model = SpeculativeModel(
      target_of(kind), draft and target_of(draft), decode_fn=settings.pop(
          'decode_fn', functools.partial(decoding.speculative_decode, **GREEDY, **decode)),
      **settings)
  batch = batch_of(kind)
  variables = model.get_initial_variables(
      jax.random.key(seed), {name: x.shape for name, x in batch.items()},
      dict.fromkeys(batch, jnp.int32))
  assert set(variables['params']) == {'target', *(['draft'] if draft else [])}
  params = jax.tree.map(lambda x: x * 1.5, flax.core.unfreeze(variables['params']))
  return jax.jit(
      functools.partial(model.predict_batch_with_aux, num_decodes=2))(params, batch)


@pytest.mark.parametrize('kind', ['encoder-decoder', 'decoder-only'])
@pytest.mark.parametrize('name', DRAFTERS)
def test_outputs_are_the_targets(kind, name):
  drafter = DRAFTERS[name]
  expected, scores = predict(
      kind, drafter=COPYING,
      decode_fn=functools.partial(t5x_decoding.temperature_sample, topk=0, **GREEDY))
  found, aux = predict(kind, gamma=3, **drafter)
  np.testing.assert_array_equal(found, expected)
  np.testing.assert_allclose(aux['scores'], scores['scores'], atol=1e-4)
  statistics = aux['statistics']
  assert int(statistics['drafted'].sum()) > 0
  np.testing.assert_array_equal(statistics['accepted_at_position'].sum(1), statistics['accepted'])
  assert 'lenience' not in aux


@pytest.mark.parametrize('kind, width', [('encoder-decoder', 8), ('decoder-only', 0)])
def test_copying_reads_the_input(kind, width, monkeypatch):
  """The encoder's input; a prefix stands in the decoded sequence already."""
  given, original = [], drafts.Draft
  monkeypatch.setattr(
      drafts, 'Draft',
      lambda config, inputs, *parts: given.append(inputs.shape) or original(config, inputs, *parts))
  predict(kind, drafter=COPYING, gamma=2)
  assert given == [(BATCH, width)]


@pytest.mark.parametrize('draft', ['encoder-decoder', 'decoder-only'])
def test_confidence_decides_how_long_a_model_drafts(draft):
  drafted = []
  for min_confidence in (0.0, 0.2, 0.99):
    _, aux = predict('encoder-decoder', draft=draft, gamma=5,
                     drafter=DrafterConfig(min_confidence=min_confidence))
    drafted.append(float(aux['statistics']['drafted'].sum() / aux['statistics']['rounds'].sum()))
  assert drafted[0] >= drafted[1] > drafted[2] >= 0.9


def test_lossy_outputs_say_so():
  _, aux = predict('encoder-decoder', drafter=COPYING, gamma=2, decode={'lenience': 0.5})
  np.testing.assert_array_equal(aux['lenience'], np.full(BATCH, 0.5, np.float32))


def test_settings_that_do_not_fit_are_named():
  target = target_of('encoder-decoder')
  with pytest.raises(UserError, match="draft: expected a model for the drafter 'model'"):
    SpeculativeModel(target)
  with pytest.raises(UserError, match="ngram_table: expected one for the drafter 'ngram'"):
    SpeculativeModel(target, drafter=DrafterConfig('ngram'))
  with pytest.raises(UserError, match="draft: expected a model for the drafter 'mixed'"):
    SpeculativeModel(target, drafter=DrafterConfig('mixed'))
  with pytest.raises(UserError, match='verification: expected one of'):
    predict('encoder-decoder', drafter=COPYING, decode={'verification': 'none'})
  with pytest.raises(UserError, match='draft checkpoint: expected a RestoreCheckpointConfig'):
    PairRestoreCheckpointConfig(target=_config())


def _config():
  return utils.RestoreCheckpointConfig(path='/none', mode='specific')


def test_only_a_model_has_a_checkpoint():
  config = PairRestoreCheckpointConfig(target=_config(), drafter=COPYING)
  assert config.sides == ('target',)
  with pytest.raises(UserError, match='draft checkpoint: expected a RestoreCheckpointConfig'):
    PairRestoreCheckpointConfig(target=_config(), drafter=DrafterConfig('cascade'))


def test_tables_are_loaded_by_the_macros_of_both_commands(tmp_path):
  path = str(demo_tasks.VOCABULARY)
  vocabulary = vocabularies.load_vocabulary(path)
  table = ngram.build([[2, 3, 1]], vocabulary.size, 2)
  ngram.save(tmp_path / 'table.npz', table, vocabulary)
  loaded = tasks.ngram_table(str(tmp_path / 'table.npz'), path)
  jax.tree.map(np.testing.assert_array_equal, loaded, table)
  assert tasks.ngram_table(None, path) is None
