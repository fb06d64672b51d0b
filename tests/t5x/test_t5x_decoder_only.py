"""Our decoder-only network against T5X's own, and both front doors. Skipped without T5X."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seqio

import trees
from speculative_t5x import families, infer
from speculative_t5x import pair as pair_lib
from speculative_t5x.errors import UserError
from speculative_t5x.network import DecoderOnly, T5Config
from speculative_t5x.stored import in_memory
from trees import flatten

# Submodules: this folder itself would pass for a package `t5x` without T5X.
REASON = 'needs T5X, which is not on PyPI'
models = pytest.importorskip('t5x.models', reason=REASON)
t5x_decoding = pytest.importorskip('t5x.decoding', reason=REASON)

from test_t5x_infer import run_all  # noqa: E402 - these import T5X

from speculative_t5x.t5x_integration import decoder_only  # noqa: E402
from speculative_t5x.t5x_integration.model import SpeculativeModel  # noqa: E402

CONFIG = T5Config(
    vocab_size=50, emb_dim=24, num_heads=3, num_encoder_layers=0, num_decoder_layers=2, head_dim=7,
    mlp_dim=40)
CHOICES = pytest.mark.parametrize('activations, tied', [
    (('relu',), True), (('gelu', 'linear'), True), (('gelu', 'linear'), False),
])


def both(config, **choices):
  """T5X's network and ours."""
  config = dataclasses.replace(config, **choices)
  return decoder_only.module_of(config), DecoderOnly(config)


def random_params(theirs, config):
  """Parameters by T5X's names and shapes, none at its initial value."""
  tokens = np.ones((1, 2), np.int32)
  init = functools.partial(theirs.init, enable_dropout=False)
  return trees.random_params(
      jax.eval_shape(init, jax.random.key(0), tokens, tokens)['params'], config.head_dim)


@CHOICES
def test_tree_shapes_axes_and_initial_values(activations, tied):
  theirs, ours = both(CONFIG, mlp_activations=activations, logits_via_embedding=tied)
  tokens = np.ones((1, 2), np.int32)
  expected = theirs.init(jax.random.key(0), tokens, tokens, enable_dropout=False)
  found = ours.init(jax.random.key(0), tokens)
  assert flatten(found['params_axes']) == flatten(expected['params_axes'])
  expected, found = flatten(expected['params']), flatten(found['params'])
  assert found.keys() == expected.keys()
  for name, value in found.items():
    assert (value.shape, value.dtype) == (expected[name].shape, expected[name].dtype), name
    np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=1e-7, err_msg=name)
  arrays = {name: in_memory(np.asarray(value)) for name, value in expected.items()}
  recognised = families.config_of_shapes('here', arrays)
  assert recognised == ours.config


@CHOICES
def test_logits(activations, tied):
  theirs, ours = both(CONFIG, mlp_activations=activations, logits_via_embedding=tied)
  params = random_params(theirs, CONFIG)
  # Long enough for every bucket of the relative biases; the last row is padded.
  targets = np.random.default_rng(0).integers(1, 50, (3, 135)).astype(np.int32)
  targets[2, 40:] = 0
  shifted = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
  expected = theirs.apply({'params': params}, shifted, targets, enable_dropout=False)
  logits = ours.apply({'params': params}, shifted)
  assert logits.dtype == expected.dtype == jnp.float32
  assert np.asarray(expected).std() > 0.5
  real = targets > 0
  np.testing.assert_allclose(np.asarray(logits)[real], np.asarray(expected)[real], atol=1e-5)


VOCABULARY = seqio.PassThroughVocabulary(20, eos_id=1)
SMALL = T5Config(
    vocab_size=20, emb_dim=16, num_heads=2, num_encoder_layers=0, num_decoder_layers=2, head_dim=4,
    mlp_dim=24, logits_via_embedding=True)
DRAFT = dataclasses.replace(SMALL, num_decoder_layers=1)
LENGTHS = np.array([5, 1, 0, 7])
INPUTS = np.where(
    np.arange(7) < LENGTHS[:, None], np.random.default_rng(2).integers(2, 20, (4, 7)), 0,
).astype(np.int32)
ADDED = 9


def model_of(config, seed):
  """T5X's model and parameters of one network."""
  module = decoder_only.module_of(config)
  params = jax.tree.map(
      lambda x: jnp.asarray(np.roll(x, seed, axis=-1)), random_params(module, config))
  return models.DecoderOnlyModel(module, VOCABULARY, None), params


def t5x_batch():
  """`INPUTS` as T5X's feature converter makes a batch of them, with room for `ADDED` targets."""
  length = INPUTS.shape[1] + ADDED
  inputs = np.pad(INPUTS, ((0, 0), (1, ADDED - 1)))
  causal = (np.arange(length) <= LENGTHS[:, None]).astype(np.int32)
  return {
      'decoder_input_tokens': inputs, 'decoder_target_tokens': np.ones_like(inputs),
      'decoder_causal_attention': causal, 'decoder_loss_weights': 1 - causal,
  }


class Ids:
  """The vocabulary of the other door."""

  size, eos_id, pad_id = 20, 1, 0


@pytest.mark.parametrize('num_decodes', [1, 2])
def test_both_doors_and_t5x_itself_write_the_same(num_decodes):
  (target, target_params), (draft, draft_params) = model_of(SMALL, 0), model_of(DRAFT, 1)
  params = {'target': target_params, 'draft': draft_params}
  greedy = {'temperature': 0.0, 'topk': 0, 'rescale_log_probs': False}

  def t5x(**choices):
    model = SpeculativeModel(target, draft, gamma=3, **choices)
    found, aux = model.predict_batch_with_aux(
        params, t5x_batch(), num_decodes=num_decodes, decoder_params=dict(greedy))
    return np.asarray(found), np.asarray(aux['scores'])

  pair = pair_lib.Pair(
      pair_lib.Model(DecoderOnly(SMALL), target_params),
      pair_lib.Model(DecoderOnly(DRAFT), draft_params), Ids(), gamma=3, num_decodes=num_decodes)
  ours = pair.predict(INPUTS, max_length=ADDED)
  baseline, _ = t5x(decode_fn=t5x_decoding.temperature_sample)
  fast, scores = t5x()
  np.testing.assert_array_equal(fast, baseline)
  sequences = np.asarray(ours.sequences[:, -1])
  for row, length in enumerate(LENGTHS):
    # Those of T5X go on up to the sum of both lengths, in place of `ADDED` tokens behind any input.
    np.testing.assert_array_equal(sequences[row], fast[row, :ADDED], err_msg=str(length))
  is_whole = (LENGTHS == 7) | np.any(sequences == 1, axis=1)
  assert is_whole.any() and not is_whole.all()
  np.testing.assert_allclose(
      np.asarray(ours.scores)[is_whole, -1], scores[is_whole], rtol=0, atol=1e-4)


def test_what_t5x_lacks_is_refused():
  for change, message in [
      ({'num_encoder_layers': 1}, 'num_encoder_layers: expected 0 .*, found 1'),
      ({'layer_norm_epsilon': 1e-5}, 'layer_norm_epsilon: expected 1e-06 .*, found 1e-05'),
  ]:
    with pytest.raises(UserError, match=message):
      decoder_only.module_of(dataclasses.replace(CONFIG, **change))


LINES = ['Click the', 'To insert a', '', 'The']


def test_the_examples_of_both_doors_write_the_same(tmp_path):
  """The gin files as they stand, on the embedded pair."""
  settings = ['--gin.TEMPERATURE=0.0', '--gin.GAMMA=3']
  (tmp_path / 'in.txt').write_text('\n'.join(LINES) + '\n', encoding='utf-8')
  assert infer.main([
      '--gin_file=gin_configs/examples/demo_lm.gin', *settings, f'--input={tmp_path}/in.txt',
      f'--output_dir={tmp_path}/ours']) == 0
  lines = (tmp_path / 'ours' / 'inferences.jsonl').read_text(encoding='utf-8').splitlines()
  ours = [json.loads(line) for line in lines]
  theirs = run_all(tmp_path, {'t5x': [
      '--gin_file=gin_configs/examples/demo_lm_t5x.gin', *settings,
      '--gin.INPUT_PATH="in.txt"']})['t5x']
  assert [record['inputs'] for record in ours] == LINES
  for found, expected, line in zip(ours, theirs, LINES, strict=True):
    if line:
      assert found['prediction'] == expected['prediction'] != ''
      assert found['score'] == pytest.approx(expected['aux']['scores'], abs=1e-2)
