"""Speculative beam search held to T5X's `beam_search`, on toys and on T5X's networks.

Skipped where T5X is not installed.
"""

import functools
import zlib

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seqio

import toy
from speculative_t5x import decoding as core_decoding
from speculative_t5x.drafters import DrafterConfig
from speculative_t5x.errors import UserError

# Submodules: this folder itself would pass for a package `t5x` without T5X.
REASON = 'needs T5X, which is not on PyPI'
models = pytest.importorskip('t5x.models', reason=REASON)
t5x_decoding = pytest.importorskip('t5x.decoding', reason=REASON)
t5_network = pytest.importorskip('t5x.examples.t5.network', reason=REASON)
scalable_network = pytest.importorskip('t5x.examples.scalable_t5.network', reason=REASON)
lm_network = pytest.importorskip('t5x.examples.decoder_only.network', reason=REASON)

from speculative_t5x.t5x_integration import adapters, network  # noqa: E402 - they import T5X
from speculative_t5x.t5x_integration.beams import speculative_beam_search  # noqa: E402 - likewise
from speculative_t5x.t5x_integration.drafts import Draft  # noqa: E402 - likewise
from speculative_t5x.t5x_integration.model import SpeculativeModel  # noqa: E402 - likewise

# Nearly all the time of these tests is compilation.
jit = functools.partial(jax.jit, compiler_options={
    'xla_backend_optimization_level': 0, 'xla_cpu_use_fusion_emitters': False})

# Toys.

BATCH = 8


class Toys:
  """A toy model of its own for each example, which the caches name."""

  def __init__(self, tables):
    self.tables = tables

  @classmethod
  def drawn(cls, seed, vocab_size=9):
    """Some end sooner than others."""
    tables = np.stack([toy.Toy(vocab_size, seed + i, 2.0).table for i in range(BATCH)])
    tables[..., toy.EOS] += np.linspace(-3, 3, BATCH)[:, None, None]
    return cls(tables)

  def mixed_with(self, other, share):
    """Toys that are in part like `other`."""
    return Toys((1 - share) * self.tables + share * other.tables)

  def cache(self, slots, prompts=None):
    """Caches of one row an example."""
    tokens = np.full((BATCH, slots), self.tables.shape[-1] - 1, np.int32)
    if prompts is not None:
      tokens[:, : prompts.shape[1]] = prompts
    return {'tokens': jnp.asarray(tokens), 'example': jnp.arange(BATCH)}

  def __call__(self, tokens, positions, cache):
    """The decode step."""
    return toy.step_of_each(self.tables, tokens, positions, cache)


TARGET = Toys.drawn(0)
DRAFT = Toys.drawn(100).mixed_with(TARGET, 0.8)


def prompts_of(length=14):
  """Prompts of 0 to 4 tokens."""
  prompts = np.random.default_rng(0).integers(2, 9, (BATCH, length)).astype(np.int32)
  prompts *= np.arange(length) <= np.arange(BATCH)[:, None] % 5
  prompts[:, 0] = 0
  return prompts


def ours(inputs, *, gamma=3, **kwargs):
  """The decode function on toys."""
  prompts = None if kwargs.get('initial_index') is None else inputs
  slots = core_decoding.cache_slots(inputs.shape[1], gamma)
  draft = Draft(DrafterConfig(), jnp.zeros((BATCH, 0), jnp.int32),
                adapters.DecodingModel(DRAFT, DRAFT.cache(slots, prompts)))
  return jit(lambda: speculative_beam_search(
      jnp.asarray(inputs), TARGET.cache(slots, prompts), TARGET, toy.EOS,
      draft=draft if gamma else None, gamma=gamma, **kwargs))()


def theirs(inputs, *, num_decodes=4, **kwargs):
  """`beam_search` on the same step, one token a call."""
  first = kwargs.get('initial_index')
  cache = TARGET.cache(inputs.shape[1] + 2, None if first is None else inputs)
  first = jnp.repeat(np.zeros(BATCH, int) if first is None else first, num_decodes)

  def tokens_to_logits(state):
    logits, cache = TARGET(state.cur_token, first + state.cur_index, state.cache)
    return logits[:, 0], cache

  return jit(lambda: t5x_decoding.beam_search(
      jnp.asarray(inputs), cache, tokens_to_logits, toy.EOS, num_decodes=num_decodes, **kwargs))()


def assert_same(found, expected, atol=1e-4):
  sequences, scores = expected
  np.testing.assert_array_equal(found[0], sequences)
  np.testing.assert_allclose(found[1], scores, atol=atol, rtol=1e-6)


NOTHING = np.zeros((BATCH, 14), np.int32)


@pytest.mark.parametrize('inputs, options', [
    (NOTHING, {}), (NOTHING, {'num_decodes': 1}), (NOTHING, {'num_decodes': 7}),
    (NOTHING, {'alpha': 0.0}), (NOTHING, {'alpha': 2.0}), (NOTHING, {'alpha': -1.0}),
    (NOTHING, {'max_decode_len': 6}), (NOTHING, {'max_decode_step': 5}),
    (prompts_of(), {}), (prompts_of(), {'num_decodes': 3, 'max_decode_step': 7}),
    (np.tile(prompts_of()[3], (BATCH, 1)), {'initial_index': np.full(BATCH, 3, np.int32)}),
], ids=lambda value: str(value) if isinstance(value, dict) else str(np.sum(value != 0)))
def test_toys_are_searched_as_by_t5x(inputs, options):
  result = ours(inputs, **options)
  assert_same((result.sequences, result.scores), theirs(inputs, **options))


@pytest.mark.parametrize('gamma, draft_width, target_rows', [
    (0, None, None), (1, 4, 4), (2, 9, None), (6, None, 30)])
def test_neither_the_draft_nor_its_rows_change_what_is_found(gamma, draft_width, target_rows):
  result = ours(NOTHING, gamma=gamma, draft_width=draft_width, target_rows=target_rows)
  assert_same((result.sequences, result.scores), theirs(NOTHING))
  assert result.statistics.rounds.shape == (BATCH, 4)
  assert (np.asarray(result.statistics.accepted) > 0).any() == (gamma > 0)


@pytest.mark.parametrize('config, message', [
    (DrafterConfig('copying'), "drafter: expected 'model' for a beam search, found 'copying'"),
    (DrafterConfig(min_confidence=0.5), 'min_confidence: expected 0 for a beam search, found 0.5'),
], ids=['copying', 'confidence'])
def test_drafters_that_are_no_model_are_refused(config, message):
  draft = Draft(config, jnp.zeros((BATCH, 0), jnp.int32),
                adapters.DecodingModel(DRAFT, DRAFT.cache(20)))
  with pytest.raises(UserError) as error:
    speculative_beam_search(NOTHING, TARGET.cache(20), TARGET, toy.EOS, draft=draft, gamma=2)
  assert str(error.value) == message


# Networks.

VOCABULARY = seqio.PassThroughVocabulary(20, eos_id=1)
SIZES = {
    'vocab_size': 20, 'emb_dim': 16, 'num_heads': 2, 'head_dim': 4, 'mlp_dim': 24,
    'dropout_rate': 0.0,
}
ENCODER_DECODER = {**SIZES, 'num_encoder_layers': 1, 'num_decoder_layers': 2}
MODULES = {
    'minimal': lambda: t5_network.Transformer(t5_network.T5Config(**ENCODER_DECODER)),
    'scan': lambda: scalable_network.Transformer(scalable_network.T5Config(
        **ENCODER_DECODER, scan_layers=True, remat_policy='minimal')),
    'own': lambda: network.Transformer(network.T5Config(**ENCODER_DECODER)),
}


def model_of(kind, **kwargs):
  """A T5X model of one kind, without parameters."""
  if kind == 'decoder-only':
    module = lm_network.DecoderWrapper(lm_network.TransformerConfig(**SIZES, num_layers=2))
    return models.DecoderOnlyModel(module, VOCABULARY, None, **kwargs)
  return models.EncoderDecoderModel(MODULES[kind](), VOCABULARY, VOCABULARY, None, **kwargs)


@functools.cache
def params_of(kind, seed=3):
  """Random parameters; the embedding is that of every kind and seed, so that models agree."""
  features = ('encoder_input_tokens', 'decoder_input_tokens')
  shapes = flax.core.unfreeze(jax.eval_shape(
      lambda key: model_of(kind).get_initial_variables(
          key, dict.fromkeys(features, (1, 2)), dict.fromkeys(features, jnp.int32)),
      jax.random.key(0)))['params']

  def draw(path, leaf):
    names = [key.key for key in path]
    common = {'token_embedder', 'logits_dense'} & {*names}
    name = '/'.join(names[-2:] if common else names)
    random = np.random.default_rng([0 if common else seed, zlib.crc32(name.encode())])
    value = random.normal(size=leaf.shape)
    if names[-1] == 'scale':
      value = random.uniform(0.5, 1.5, leaf.shape)
    if names[-1] == 'kernel':
      value *= leaf.shape[0] ** -0.5 * {'query': 0.5, 'out': 0.2, 'wo': 0.2}.get(names[-2], 1.0)
    return jnp.asarray(value, jnp.float32)

  with jax.ensure_compile_time_eval():
    return jax.tree_util.tree_map_with_path(draw, shapes)


def encoder_batch(length=10):
  """A batch of an encoder-decoder, padded inputs and a prompt in two rows."""
  random = np.random.default_rng(1)
  inputs = random.integers(2, 20, (3, 7)).astype(np.int32)
  inputs *= np.arange(7) < np.array([[7], [4], [1]])
  targets = np.zeros((3, length), np.int32)
  targets[0, :2], targets[2, :4] = (5, 9), (3, 3, 1, 8)
  return {
      'encoder_input_tokens': inputs,
      'decoder_input_tokens': np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
      'decoder_target_tokens': targets,
      'decoder_loss_weights': np.ones_like(targets),
  }


def predict(model, params, batch, **kwargs):
  """All decodes and what comes with them."""
  return jit(lambda params, batch: model.predict_batch_with_aux(
      params, batch, num_decodes=4, return_all_decodes=True, **kwargs))(params, batch)


@functools.cache
def found_by_t5x(kind, with_prompt=False):
  model = model_of(kind, decode_fn=t5x_decoding.beam_search)
  sequences, aux = predict(
      model, params_of(kind), encoder_batch(), prompt_with_targets=with_prompt)
  return sequences, aux['scores']


def pair_of(target, draft, **kwargs):
  return SpeculativeModel(
      model_of(target), model_of(draft),
      **{'gamma': 3, 'decode_fn': speculative_beam_search, **kwargs})


@pytest.mark.parametrize('target, draft, with_prompt', [
    ('minimal', 'scan', False), ('scan', 'minimal', True), ('own', 'own', False),
    ('minimal', 'decoder-only', True),
])
def test_networks_are_searched_as_by_t5x(target, draft, with_prompt):
  params = {'target': params_of(target), 'draft': params_of(draft, seed=1)}
  sequences, aux = predict(
      pair_of(target, draft), params, encoder_batch(), prompt_with_targets=with_prompt)
  # T5X's decode function needs a module that decodes one token a call.
  expected = found_by_t5x('minimal' if target == 'own' else target, with_prompt)
  assert_same((sequences, aux['scores']), expected)
  statistics = jax.tree.map(np.asarray, aux['statistics'])
  assert statistics['accepted'].sum() > 0 and statistics['rounds'].shape == (3, 4)


def test_one_decode_is_the_best():
  pair = pair_of('minimal', 'minimal')
  params = {'target': params_of('minimal'), 'draft': params_of('minimal', seed=1)}
  sequences, aux = jit(lambda params, batch: pair.predict_batch_with_aux(
      params, batch, num_decodes=4))(params, encoder_batch())
  expected, scores = found_by_t5x('minimal')
  assert_same((sequences, aux['scores']), (expected[:, -1], scores[:, -1]))
  assert aux['statistics']['rounds'].shape == (3,)


def prefix_batch(length=14):
  """A decoder-only batch as T5X's feature converter makes it, prefixes of one length."""
  lengths = np.full(3, 4)
  targets = np.random.default_rng(2).integers(2, 20, (3, length)).astype(np.int32)
  targets[np.arange(3), lengths - 1] = 1
  causal = (np.arange(length) <= lengths[:, None]).astype(np.int32)
  return {
      'decoder_input_tokens': np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
      'decoder_target_tokens': targets, 'decoder_causal_attention': causal,
      'decoder_loss_weights': 1 - causal,
  }


@pytest.mark.parametrize('draft', ['decoder-only', 'scan'])
def test_decoder_only_models_are_searched_by_t5xs_rules(draft):
  batch, params = prefix_batch(), params_of('decoder-only')
  found, aux = predict(pair_of('decoder-only', draft),
                       {'target': params, 'draft': params_of(draft, seed=1)}, batch)

  # T5X's search cannot run a decoder-only model: it leaves the cache index of one beam an example.
  # The step is ours here.
  @jit
  def expected(params):
    model = model_of('decoder-only')
    prompt = adapters.prompt_of(model, batch, False)
    target = adapters.prepare(model, params, prompt, num_slots=16, num_decodes=4, vocab_size=20)
    first = core_decoding.expand_rows(prompt.initial_index, 4)
    whole = flax.traverse_util.flatten_dict(flax.core.unfreeze(target.cache))
    with_rows = {path for path in whole if path[-1] not in adapters.WITHOUT_BATCH}

    def tokens_to_logits(state):
      cache = flax.traverse_util.unflatten_dict({**whole, **state.cache})
      logits, cache = target.tokens_to_logits(state.cur_token, first + state.cur_index, cache)
      cache = flax.traverse_util.flatten_dict(flax.core.unfreeze(cache))
      return logits[:, 0], {path: cache[path] for path in with_rows}

    return t5x_decoding.beam_search(
        prompt.decoder_inputs, {path: whole[path] for path in with_rows}, tokens_to_logits, 1,
        num_decodes=4, initial_index=prompt.initial_index)

  sequences, scores = expected(params)
  sequences = jax.vmap(lambda x: models.remove_prefix(x, jnp.full(4, 4)))(sequences)
  assert_same((found, aux['scores']), (sequences, scores))
  assert np.sum(aux['statistics']['accepted']) > 0
