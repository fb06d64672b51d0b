"""T5X models in the loop: decode steps, prefills, every mixture of kinds, the model itself.

Skipped where T5X is not installed.
"""

import functools
import pathlib
import zlib

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seqio
from flax import linen as nn
from flax.linen import partitioning as flax_partitioning

import speculative_t5x
from speculative_t5x.errors import UserError

# Submodules: this folder itself would pass for a package `t5x` without T5X.
REASON = 'needs T5X, which is not on PyPI'
models = pytest.importorskip('t5x.models', reason=REASON)
t5x_decoding = pytest.importorskip('t5x.decoding', reason=REASON)
t5x_partitioning = pytest.importorskip('t5x.partitioning', reason=REASON)
t5_network = pytest.importorskip('t5x.examples.t5.network', reason=REASON)
scalable_network = pytest.importorskip('t5x.examples.scalable_t5.network', reason=REASON)
lm_network = pytest.importorskip('t5x.examples.decoder_only.network', reason=REASON)

from speculative_t5x.t5x_integration import (  # noqa: E402 - they import T5X
  adapters,
  decoding,
  multi_token,
  network,
  partitioning,
)
from speculative_t5x.t5x_integration.model import SpeculativeModel  # noqa: E402

# Nearly all the time of these tests is compilation.
jit = functools.partial(jax.jit, compiler_options={
    'xla_backend_optimization_level': 0, 'xla_cpu_use_fusion_emitters': False})

VOCABULARY = seqio.PassThroughVocabulary(20, eos_id=1)
SIZES = {
    'vocab_size': 20, 'emb_dim': 16, 'num_heads': 2, 'head_dim': 4, 'mlp_dim': 24,
    'dropout_rate': 0.0,
}
ENCODER_DECODER = {**SIZES, 'num_encoder_layers': 1, 'num_decoder_layers': 2}


def modules(sizes=ENCODER_DECODER):
  """The networks of encoder-decoders, by name."""
  scalable = lambda **choices: scalable_network.Transformer(
      scalable_network.T5Config(**sizes, **choices))
  return {
      'minimal': lambda: t5_network.Transformer(t5_network.T5Config(**sizes)),
      'scan': lambda: scalable(scan_layers=True, remat_policy='minimal'),
      'unrolled': lambda: scalable(scan_layers=False, remat_policy='none'),
      'own': lambda: network.Transformer(network.T5Config(**sizes)),
  }


def model_of(kind, vocabulary=VOCABULARY, **kwargs):
  """A T5X model of one kind, without parameters."""
  if kind in ('decoder-only', 'prefix-lm'):
    module = lm_network.DecoderWrapper(lm_network.TransformerConfig(**SIZES, num_layers=2))
    return models.DecoderOnlyModel(
        module, vocabulary, None, inputs_bidirectional_attention=kind == 'prefix-lm', **kwargs)
  return models.EncoderDecoderModel(modules()[kind](), vocabulary, vocabulary, None, **kwargs)


KINDS = ['minimal', 'scan', 'own', 'decoder-only', 'prefix-lm']
ENCODER_DECODERS = ['minimal', 'scan', 'unrolled', 'own']
DECODERS = ['decoder-only', 'prefix-lm']


def initial_shapes(model):
  """Shapes of all variables of a model."""
  features = ('encoder_input_tokens', 'decoder_input_tokens')
  return flax.core.unfreeze(jax.eval_shape(
      lambda key: model.get_initial_variables(
          key, dict.fromkeys(features, (1, 2)), dict.fromkeys(features, jnp.int32)),
      jax.random.key(0)))


@functools.cache
def params_of(kind, seed=3):
  """Parameters, none at its initial value; what is drawn for a name is the same in every kind.

  All kinds and seeds have the same embedding and logits, so that their models often agree.
  """
  def draw(path, leaf):
    names = [key.key for key in path]
    common = {'token_embedder', 'logits_dense'} & {*names}
    name = '/'.join(names[-2:] if common else names)
    random = np.random.default_rng([0 if common else seed, zlib.crc32(name.encode())])
    match names[-1]:
      case 'scale':
        value = random.uniform(0.5, 1.5, leaf.shape)
      case 'kernel':
        value = random.normal(size=leaf.shape) * leaf.shape[0] ** -0.5
        # What layers add to the embedding is kept small for the agreement of models.
        value *= {'query': 0.5, 'out': 0.2, 'wo': 0.2}.get(names[-2], 1.0)
      case _:
        value = random.normal(size=leaf.shape)
    return jnp.asarray(value, jnp.float32)

  # Asked for inside of compiled functions first, they must not belong to those.
  with jax.ensure_compile_time_eval():
    return jax.tree_util.tree_map_with_path(draw, initial_shapes(model_of(kind))['params'])


def random_tokens(seed, *shape):
  """Tokens that are neither padding nor EOS."""
  return np.random.default_rng(seed).integers(2, 20, shape).astype(np.int32)


INPUT_LENGTHS = np.array([7, 4, 1])


def ragged_inputs(length=7):
  """An encoder's inputs `[3, S]`, padded with 0."""
  return np.where(np.arange(length) < INPUT_LENGTHS[:, None], random_tokens(1, 3, length), 0)


PREFIX_LENGTHS = np.array([5, 3, 6])


def prefix_batch(length=18):
  """A decoder-only batch as T5X's feature converter makes it: EOS ends the prefix."""
  targets = random_tokens(2, 3, length)
  targets[np.arange(3), PREFIX_LENGTHS - 1] = 1
  shifted = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
  causal = (np.arange(length) <= PREFIX_LENGTHS[:, None]).astype(np.int32)
  return {
      'decoder_input_tokens': shifted, 'decoder_target_tokens': targets,
      'decoder_causal_attention': causal, 'decoder_loss_weights': 1 - causal,
  }


def encoder_batch(length=10):
  """A batch of an encoder-decoder, as T5X's feature converter makes it."""
  targets = random_tokens(3, 3, length)
  targets[0, 4], targets[0, 5:], targets[1, 2] = 1, 0, 1
  return {
      'encoder_input_tokens': ragged_inputs(),
      'decoder_input_tokens': np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
      'decoder_target_tokens': targets, 'decoder_loss_weights': (targets > 0).astype(np.int32),
  }


def batch_of(kind):
  return prefix_batch() if kind in DECODERS else encoder_batch()


# Decode steps against teacher forcing.

SLOTS = 16
LONGEST = 5  # Tokens a call.


def teacher_forced(model, params, sequences, inputs=None, causal_attention=None):
  """The module's own logits `[B, T, V]` of whole sequences that begin with the start token."""
  ones = np.ones_like(sequences)
  run = jit(functools.partial(model.module.apply, enable_dropout=False, decode=False))
  if inputs is None:
    return np.asarray(run(
        {'params': params}, sequences, ones, decoder_causal_attention=causal_attention))
  return np.asarray(run({'params': params}, inputs, sequences, ones))


def walk_error(model, sequences, expected, first, *, cache=None, lengths=(1, 2, 3, 4, 5)):
  """Largest error of logits along random steps with refused drafts.

  Args:
    model: a `DecodingModel`.
    sequences: int32 `[B, T]`, the right tokens.
    expected: `[B, T, V]`, their logits.
    first: int `[B]`, where decoding starts.
    cache: where it starts from; None is the model's.
    lengths: how many tokens the calls have.
  """
  random = np.random.default_rng(0)
  step = jit(model.tokens_to_logits)
  cache = model.cache if cache is None else cache
  last = sequences.shape[1] - LONGEST
  right = np.array(first)
  error = 0.0
  for length in lengths * (15 // len(lengths)):
    # From where everything before is right, or a little earlier.
    positions = np.minimum(right, last) - random.integers(0, 3, len(right))
    positions = np.maximum(positions, first).astype(np.int32)
    # The start token of another kind of model may stand at the first place only as it is.
    wrong = random.integers(2, 20, (len(right), max(lengths))).astype(np.int32)
    _, cache = step(wrong, positions, cache)
    rows, places = np.arange(len(right))[:, None], positions[:, None] + np.arange(length)
    logits, cache = step(sequences[rows, places], positions, cache)
    assert logits.dtype == jnp.float32 and logits.shape == (*places.shape, 20)
    error = max(error, np.abs(logits - expected[rows, places]).max())
    # Behind these stand wrong drafts.
    right = positions + length
  assert np.min(right) > np.max(first) + 3, 'the walk has not got anywhere'
  return error


def preparation(kind, prompt, *, num_decodes=1, num_slots=SLOTS):
  """A model and a function that prepares it; calling it takes long outside a compiled function."""
  model = model_of(kind)
  return model, lambda: adapters.prepare(
      model, params_of(kind), prompt, num_slots=num_slots, num_decodes=num_decodes, vocab_size=20)


def prepared(kind, prompt, **kwargs):
  """A model, and what `adapters.prepare` makes of it."""
  model, prepare = preparation(kind, prompt, **kwargs)
  offsets = []

  def cache():
    found = prepare()
    offsets.append(found.cache_offset)
    return found.cache

  cache = jit(cache)()
  return model, adapters.DecodingModel(
      lambda *args: prepare().tokens_to_logits(*args), cache, offsets[0])


def bare_prompt(kind, inputs):
  """Decoding from the start token."""
  nothing = np.zeros((len(inputs), SLOTS - 2), np.int32)
  if kind not in DECODERS:
    return adapters.Prompt(inputs, nothing)
  start = np.eye(1, SLOTS - 2, dtype=np.int32).repeat(len(inputs), 0)
  return adapters.Prompt(nothing[:, 1:], nothing, np.zeros(len(inputs), np.int32), start)


@pytest.mark.parametrize('kind', [*ENCODER_DECODERS, 'decoder-only'])
def test_steps_over_several_tokens_agree_with_teacher_forcing(kind):
  inputs = ragged_inputs()
  sequences = random_tokens(5, 6, SLOTS)
  sequences[:, 0] = 0
  model, found = prepared(kind, bare_prompt(kind, inputs), num_decodes=2)
  repeated = None if kind in DECODERS else inputs.repeat(2, 0)
  expected = teacher_forced(model, params_of(kind), sequences, repeated)
  assert expected.std() > 0.5
  error = walk_error(found, sequences, expected, np.zeros(6, int), cache=found.expanded_cache(2))
  assert error < 1e-5


def prefix_prompt(kind):
  """The prompt of a decoder-only batch, its whole sequences and their prefixes."""
  batch = prefix_batch()
  return (adapters.prompt_of(model_of(kind), batch, False), batch['decoder_input_tokens'],
          batch['decoder_causal_attention'])


@pytest.mark.parametrize('kind', DECODERS)
def test_steps_behind_a_prefix_agree_with_teacher_forcing(kind):
  prompt, sequences, causal = prefix_prompt(kind)
  np.testing.assert_array_equal(prompt.initial_index, PREFIX_LENGTHS)
  model, found = prepared(kind, prompt, num_decodes=2, num_slots=20)
  forced = functools.partial(teacher_forced, model, params_of(kind), sequences)
  expected = forced(causal_attention=causal if kind == 'prefix-lm' else None)
  if kind == 'prefix-lm':
    behind = np.arange(sequences.shape[1]) >= PREFIX_LENGTHS[:, None]
    assert np.abs(expected - forced())[behind].max() > 0.01, 'the two masks are alike here'
  repeat = lambda x: x.repeat(2, 0)
  error = walk_error(found, repeat(sequences), repeat(expected), repeat(PREFIX_LENGTHS),
                     cache=found.expanded_cache(2))
  assert error < 1e-5


@pytest.mark.parametrize('kind', ['minimal', 'scan', 'own'])
def test_an_encoder_decoder_encodes_the_prefix_of_a_decoder_only_batch(kind):
  prompt, sequences, causal = prefix_prompt('decoder-only')
  model, found = prepared(kind, prompt, num_slots=20)
  behind = np.full_like(sequences, 2)
  for row, length in enumerate(PREFIX_LENGTHS):
    behind[row, : -length] = sequences[row, length:]
  behind[:, 0] = 0
  logits = teacher_forced(model, params_of(kind), behind, (sequences * causal)[:, 1:])
  expected = np.stack([np.roll(x, n, 0) for x, n in zip(logits, PREFIX_LENGTHS, strict=True)])
  assert walk_error(found, sequences, expected, PREFIX_LENGTHS, lengths=(1, 3)) < 1e-5


@pytest.mark.parametrize('kind', DECODERS)
def test_a_decoder_only_model_reads_inputs_of_an_encoder_as_its_prefix(kind):
  inputs, sequences = ragged_inputs(), random_tokens(5, 6, SLOTS)
  sequences[:, 0] = 0
  model, found = prepared(kind, bare_prompt('minimal', inputs), num_decodes=2)
  lengths = INPUT_LENGTHS.repeat(2)
  whole = np.full((6, SLOTS + 7), 2, np.int32)
  for row, length in enumerate(lengths):
    whole[row, : length + SLOTS] = [0, *inputs[row // 2, :length], *sequences[row, 1:]]
  prefix = (np.arange(SLOTS + 7) <= lengths[:, None]).astype(np.int32)
  logits = teacher_forced(model, params_of(kind), whole,
                          causal_attention=prefix if kind == 'prefix-lm' else None)
  expected = np.stack([x[n : n + SLOTS] for x, n in zip(logits, lengths, strict=True)])
  error = walk_error(found, sequences, expected, np.zeros(6, int), lengths=(1, 3),
                     cache=found.expanded_cache(2))
  assert error < 1e-5


class Mutations:
  """Faults of a step. Each must show in the comparison with teacher forcing."""

  @staticmethod
  def adds_to_the_cache(monkeypatch):
    write = multi_token.Interceptor._write

    def added(self, attention, variable, new):
      before = attention.get_variable('cache', variable)
      attention.put_variable('cache', variable, jnp.zeros_like(before))
      write(self, attention, variable, new)
      total = before + attention.get_variable('cache', variable)
      attention.put_variable('cache', variable, total)
      return jnp.moveaxis(total, -1, -3)

    monkeypatch.setattr(multi_token.Interceptor, '_write', added)

  @staticmethod
  def _attention(monkeypatch, *, mask=lambda x: x, bias=lambda x: x):
    attend = multi_token.Interceptor._self_attention

    def changed(self, module, next_fun, args, kwargs):
      def attention(inputs_q, inputs_kv, its_mask, its_bias, **kwargs):
        return next_fun(inputs_q, inputs_kv, mask(its_mask), bias(its_bias), **kwargs)

      return attend(self, module, attention, args, kwargs)

    monkeypatch.setattr(multi_token.Interceptor, '_self_attention', changed)

  @staticmethod
  def bias_of_the_first_row(monkeypatch):
    Mutations._attention(monkeypatch, bias=lambda x: jnp.broadcast_to(x[:1], x.shape))

  @staticmethod
  def bias_of_the_first_token(monkeypatch):
    Mutations._attention(
        monkeypatch, bias=lambda x: jnp.broadcast_to(x[..., :1, :], x.shape))

  @staticmethod
  def mask_one_slot_short(monkeypatch):
    Mutations._attention(
        monkeypatch, mask=lambda x: jnp.concatenate([x[..., 1:], jnp.zeros_like(x[..., :1])], -1))

  @staticmethod
  def mask_one_slot_long(monkeypatch):
    Mutations._attention(
        monkeypatch, mask=lambda x: jnp.concatenate([jnp.ones_like(x[..., :1]), x[..., :-1]], -1))


@pytest.mark.parametrize('mutation', [x for x in dir(Mutations) if not x.startswith('_')])
@pytest.mark.parametrize('kind', ['minimal', 'decoder-only'])
def test_the_comparison_detects(mutation, kind, monkeypatch):
  inputs = ragged_inputs()
  sequences = random_tokens(5, 3, SLOTS)
  sequences[:, 0] = 0
  expected = teacher_forced(
      model_of(kind), params_of(kind), sequences, None if kind in DECODERS else inputs)
  getattr(Mutations, mutation)(monkeypatch)
  _, found = prepared(kind, bare_prompt(kind, inputs))
  assert walk_error(found, sequences, expected, np.zeros(3, int), lengths=(3,)) > 1e-3


# The cache.


def named(cache):
  """Leaves by their path's names."""
  leaves = jax.tree_util.tree_flatten_with_path(cache)[0]
  name = lambda key: str(getattr(key, 'key', getattr(key, 'name', key)))
  return {'/'.join(map(name, path)): leaf for path, leaf in leaves}


def cache_shapes(kind, **kwargs):
  """The cache before and after its rows are repeated, without running anything."""
  _, prepare = preparation(kind, bare_prompt(kind, ragged_inputs()), **kwargs)

  def both():
    found = prepare()
    return found.cache, found.expanded_cache(2)

  return map(named, jax.eval_shape(both))


@pytest.mark.parametrize('kind', ['minimal', 'scan', 'unrolled', 'decoder-only'])
def test_the_cache_is_t5xs_and_keys_and_values_of_the_encoder(kind):
  model = model_of(kind)
  tokens = np.ones((3, SLOTS), np.int32)
  inputs = () if kind in DECODERS else (ragged_inputs(),)
  theirs = named(jax.eval_shape(lambda: model.module.apply(
      {'params': params_of(kind)}, *inputs, tokens, tokens, decode=True, enable_dropout=False,
      mutable=['cache'])[1]['cache']))
  ours, _ = cache_shapes(kind)
  added = ours.keys() - theirs.keys()
  assert {name.rsplit('/')[-1] for name in added} == (
      set() if kind in DECODERS else {'cross_key', 'cross_value'})
  assert theirs.keys() <= ours.keys()
  for name, leaf in theirs.items():
    # A prefill leaves an index a row.
    if 'cache_index' not in name:
      assert (ours[name].shape, ours[name].dtype) == (leaf.shape, leaf.dtype), name


@pytest.mark.parametrize('kind', KINDS)
def test_rows_of_the_cache_are_repeated_where_they_have_a_batch(kind):
  cache, expanded = cache_shapes(kind, num_decodes=2)
  assert cache
  if kind in DECODERS:
    assert any('cached_bias' in name for name in cache)
  if kind == 'scan':
    assert all(leaf.shape[0] == 2 for leaf in cache.values()), 'two layers stand before the batch'
  for name, leaf in cache.items():
    shape = list(leaf.shape)
    if not {'cached_bias', 'cache_index'} & {*name.split('/')}:
      batch = 1 if kind == 'scan' else 0
      assert shape[batch] == 3, name
      shape[batch] = 6
    assert expanded[name].shape == tuple(shape), name


@pytest.mark.parametrize('kind', ['minimal', 'scan', 'unrolled'])
def test_steps_read_nothing_of_the_encoder_but_the_cache(kind):
  inputs = ragged_inputs()
  model, found = prepared(kind, bare_prompt(kind, inputs))
  tokens, positions = random_tokens(4, 3, 2), np.zeros(3, np.int32)

  @functools.partial(jit, static_argnames='fills')
  def without_encoder(tokens, positions, cache, fills=False):
    return multi_token.apply(
        model.module, params_of(kind), cache, positions, jnp.zeros((3, 7, 16)), inputs, tokens,
        tokens, max_decode_length=SLOTS, method=model.module.decode, fills_cross_attention=fills)

  expected, _ = jit(found.tokens_to_logits)(tokens, positions, found.cache)
  logits, cache = without_encoder(tokens, positions, found.cache)
  np.testing.assert_array_equal(logits, expected)
  for name, leaf in named(cache).items():
    if 'cross' in name:
      np.testing.assert_array_equal(leaf, named(found.cache)[name], name)
  filled, _ = without_encoder(tokens, positions, found.cache, fills=True)
  assert np.abs(filled - expected).max() > 0.01, 'the encoder has no weight here'


def products(jaxpr):
  """Shapes of the operands of all matrix products of a jaxpr, nested ones included."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      yield tuple(operand.aval.shape for operand in equation.invars)
    for value in equation.params.values():
      for nested in value if isinstance(value, (tuple, list)) else [value]:
        inner = getattr(nested, 'jaxpr', nested)
        if hasattr(inner, 'eqns'):
          yield from products(inner)


@pytest.mark.parametrize('kind', ['minimal', 'scan', 'unrolled', 'own'])
def test_a_step_projects_nothing_of_the_encoder(kind):
  _, prepare = preparation(kind, bare_prompt(kind, ragged_inputs()))
  # This package's network multiplies the tokens of all rows as one axis.
  of_encoder = lambda shapes: {(3, 7, 16), (21, 16)} & set(shapes)
  prefill = jax.make_jaxpr(lambda: prepare().cache)()
  assert any(map(of_encoder, products(prefill.jaxpr)))
  traced = []

  def step():
    found = prepare()
    tokens, positions = random_tokens(4, 3, 2), np.zeros(3, np.int32)
    traced.append(jax.make_jaxpr(found.tokens_to_logits)(tokens, positions, found.cache))

  jax.eval_shape(step)
  step, = traced
  shapes = list(products(step.jaxpr))
  assert len(shapes) > 10 - 5 * (kind == 'scan')
  assert not [both for both in shapes if of_encoder(both)]


# The model: greedy outputs.

GREEDY = {'temperature': 0.0, 'rescale_log_probs': False}
t5x_greedy = functools.partial(t5x_decoding.temperature_sample, topk=0, **GREEDY)
greedy = functools.partial(decoding.speculative_decode, **GREEDY)


def pair_of(target, draft, **kwargs):
  return SpeculativeModel(
      model_of(target), model_of(draft), **{'gamma': 3, 'decode_fn': greedy, **kwargs})


def predict(model, params, batch, **kwargs):
  """`predict_batch_with_aux` as one program; two decodes, all returned, unless told otherwise."""
  kwargs = {'num_decodes': 2, 'return_all_decodes': True, **kwargs}
  return jit(lambda params, batch: model.predict_batch_with_aux(params, batch, **kwargs))(
      params, batch)


@functools.cache
def greedy_by_t5x(kind):
  """What T5X decodes with the target alone."""
  return predict(model_of(kind, decode_fn=t5x_greedy), params_of(kind), batch_of(kind))


@functools.cache
def program(target, draft, gamma):
  """A mixture's compiled decoding, from its parameters."""
  model = pair_of(target, draft, gamma=gamma)
  return jit(lambda params: model.predict_batch_with_aux(
      params, batch_of(target), num_decodes=2, return_all_decodes=True))


def assert_outputs_are_t5xs(kind, sequences, aux):
  expected, expected_aux = greedy_by_t5x(kind)
  np.testing.assert_array_equal(sequences, expected)
  np.testing.assert_allclose(aux['scores'], expected_aux['scores'], atol=1e-4, rtol=0)


@pytest.mark.parametrize('draft', KINDS)
@pytest.mark.parametrize('target', KINDS)
def test_greedy_outputs_and_scores_are_t5xs(target, draft):
  run = program(target, draft, 3)
  sequences, aux = run({'target': params_of(target), 'draft': params_of(draft, seed=1)})
  assert_outputs_are_t5xs(target, sequences, aux)
  statistics = jax.tree.map(np.sum, aux['statistics'])
  assert statistics['accepted'] > 0 and statistics['rejected'] > 0
  if draft == target or {draft, target} == {'minimal', 'own'}:
    # One model twice, in two implementations maybe: the draft is always right.
    sequences, aux = run({'target': params_of(target), 'draft': params_of(draft)})
    assert_outputs_are_t5xs(target, sequences, aux)
    statistics = aux['statistics']
    assert np.sum(statistics['rejected']) == 0
    assert (statistics['rounds'] <= (statistics['emitted'] + 3) // 4).all()


@pytest.mark.parametrize('target, draft, gamma', [
    ('minimal', 'scan', 0), ('prefix-lm', 'decoder-only', 0), ('scan', 'prefix-lm', 5),
    ('decoder-only', 'minimal', 5), ('own', 'scan', 1),
])
def test_greedy_outputs_and_scores_are_t5xs_at_any_gamma(target, draft, gamma):
  sequences, aux = program(target, draft, gamma)(
      {'target': params_of(target), 'draft': params_of(draft, seed=1)})
  assert_outputs_are_t5xs(target, sequences, aux)


# The model beside greedy decoding.


def pair_params(target, draft):
  return {'target': params_of(target), 'draft': params_of(draft, seed=1)}


SAMPLE = t5x_decoding.temperature_sample
TOPK = functools.partial(SAMPLE, temperature=0.7, topk=5)


@pytest.mark.parametrize('kind, decode_fn', [
    # T5X searches no beams with a decoder-only model.
    ('minimal', SAMPLE), ('minimal', TOPK), ('minimal', t5x_decoding.beam_search),
    ('decoder-only', SAMPLE), ('decoder-only', TOPK),
], ids=['minimal-sample', 'minimal-topk', 'minimal-beam', 'decoder-only-sample',
        'decoder-only-topk'])
def test_t5xs_decode_functions_decode_with_the_target_alone(kind, decode_fn):
  params, key = pair_params(kind, 'scan'), jax.random.PRNGKey(7)
  pair = pair_of(kind, 'scan', decode_fn=decode_fn)
  found = predict(pair, params, batch_of(kind), rng=key)
  expected = predict(
      model_of(kind, decode_fn=decode_fn), params['target'], batch_of(kind), rng=key)
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  assert found[0].shape[:2] == (3, 2)


@pytest.mark.parametrize('kind', ['minimal', 'prefix-lm'])
def test_losses_and_scores_are_the_targets(kind):
  pair, target = pair_of(kind, 'scan'), model_of(kind)
  params, batch = pair_params(kind, 'scan'), batch_of(kind)

  @jit
  def both(params, batch):
    found = (pair.score_batch(params, batch), pair.loss_fn(params, batch, None)[0],
             pair.score_batch(params, batch, return_intermediates=True))
    params = params['target']
    return found, (target.score_batch(params, batch), target.loss_fn(params, batch, None)[0],
                   target.score_batch(params, batch, return_intermediates=True))

  found, expected = both(params, batch)
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  assert found[0].shape == (3,) and (found[0] < 0).all()


@pytest.mark.parametrize('kind', ['minimal', 'decoder-only'])
def test_shapes_of_outputs(kind):
  pair, params = pair_of(kind, 'minimal', gamma=2), pair_params(kind, 'minimal')
  batch = batch_of(kind)
  length = batch['decoder_input_tokens'].shape[1]

  def shapes(method=pair.predict_batch_with_aux, **kwargs):
    return jax.tree.map(
        lambda x: x.shape, jax.eval_shape(functools.partial(method, **kwargs), params, batch))

  for kwargs, rows in [
      ({}, (3,)), ({'num_decodes': 4}, (3,)), ({'return_all_decodes': True}, (3, 1)),
      ({'num_decodes': 4, 'return_all_decodes': True}, (3, 4)),
  ]:
    sequences, aux = shapes(**kwargs)
    assert sequences == (*rows, length)
    assert aux['scores'] == rows
    statistics = aux['statistics']
    assert statistics.pop('accepted_at_position') == (*rows, 2)
    assert {*statistics} == {'rounds', 'drafted', 'accepted', 'rejected', 'emitted'}
    assert {*statistics.values()} == {rows}
  assert shapes(pair.predict_batch) == (3, length)
  pair = pair_of(
      kind, 'minimal', default_decoder_params=models.DecoderParams(
          num_decodes=2, return_all_decodes=True))
  assert shapes(pair.predict_batch_with_aux)[0] == (3, 2, length)


def test_the_returned_decode_is_the_one_of_the_highest_score():
  pair = pair_of('minimal', 'scan', decode_fn=decoding.speculative_decode)
  run = functools.partial(predict, pair, pair_params('minimal', 'scan'), encoder_batch(),
                          rng=jax.random.PRNGKey(3), num_decodes=4)
  every, best = run(), run(return_all_decodes=False)
  assert (np.diff(every[1]['scores'], axis=1) > 0).all()
  np.testing.assert_array_equal(best[0], every[0][:, -1])
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[:, -1]), best[1], every[1])


def test_prompts_of_the_targets_are_t5xs():
  batch = encoder_batch()
  batch['decoder_input_tokens'][:, 4:] = 0
  kwargs = {'prompt_with_targets': True, 'num_decodes': 1}
  target = model_of('scan', decode_fn=t5x_greedy)
  params = pair_params('scan', 'minimal')
  expected, expected_aux = predict(target, params['target'], batch, **kwargs)
  found, aux = predict(pair_of('scan', 'minimal'), params, batch, **kwargs)
  np.testing.assert_array_equal(found, expected)
  np.testing.assert_allclose(aux['scores'], expected_aux['scores'], atol=1e-4, rtol=0)
  # Row 1 has an EOS in its prompt, which is stripped: that place is decoded.
  np.testing.assert_array_equal(found[0, 0, :3], batch['decoder_input_tokens'][0, 1:4])
  np.testing.assert_array_equal(found[1, 0, :2], batch['decoder_input_tokens'][1, 1:3])
  assert batch['decoder_input_tokens'][1, 3] == 1 != found[1, 0, 2]
  unprompted, _ = greedy_by_t5x('scan')
  assert (np.asarray(unprompted)[:, :1] != found).any()


def test_gamma_of_a_call():
  pair, params = pair_of('minimal', 'scan', gamma=2), pair_params('minimal', 'scan')
  params['draft'] = params_of('scan')
  for gamma in (0, 1):
    decoder_params = {'gamma': gamma}
    sequences, aux = predict(pair, params, encoder_batch(), decoder_params=decoder_params)
    assert_outputs_are_t5xs('minimal', sequences, aux)
    assert aux['statistics']['accepted_at_position'].shape == (3, 2, gamma)
    assert decoder_params == {'gamma': gamma}, 'the caller uses it again'
  with pytest.raises(UserError, match=r'^gamma: expected at least 0, found -1$'):
    pair.predict_batch_with_aux(params, encoder_batch(), decoder_params={'gamma': -1})
  with pytest.raises(UserError, match=r'^gamma: expected at least 0, found -2$'):
    pair_of('minimal', 'scan', gamma=-2)


def test_parameters_of_the_decoder():
  pair = pair_of('minimal', 'scan', decode_fn=decoding.speculative_decode)
  run = functools.partial(predict, pair, pair_params('minimal', 'scan'), encoder_batch())
  sequences, _ = run(decoder_params={'temperature': 0.0, 'max_decode_steps': 2})
  np.testing.assert_array_equal(sequences[:, :, :2], greedy_by_t5x('minimal')[0][:, :, :2])
  assert not np.any(sequences[:, :, 2:])
  # The first token of the first row as end.
  first = int(greedy_by_t5x('minimal')[0][0, 0, 0])
  sequences, _ = run(decoder_params={'temperature': 0.0, 'eos_id': first})
  np.testing.assert_array_equal(sequences[0, 0], [first, *[0] * 9])


def test_a_key_is_given_once():
  pair, params = pair_of('minimal', 'scan'), pair_params('minimal', 'scan')
  key = jax.random.PRNGKey(0)
  with pytest.raises(UserError, match=r"^rng: .* decoder_params\['decode_rng'\]$"):
    pair.predict_batch_with_aux(params, encoder_batch(), key, decoder_params={'decode_rng': key})


def test_a_key_may_be_given_either_way():
  pair = pair_of('minimal', 'scan', decode_fn=decoding.speculative_decode)
  run = functools.partial(predict, pair, pair_params('minimal', 'scan'), encoder_batch())
  sequences = [run(rng=jax.random.PRNGKey(5))[0],
               run(decoder_params={'decode_rng': jax.random.PRNGKey(5)})[0],
               run(rng=jax.random.PRNGKey(6))[0]]
  np.testing.assert_array_equal(sequences[0], sequences[1])
  assert (np.asarray(sequences[0]) != sequences[2]).any()


# Variables and their axes.


@pytest.mark.parametrize('target, draft', [
    ('minimal', 'scan'), ('minimal', 'decoder-only'), ('decoder-only', 'minimal'),
    ('prefix-lm', 'own'),
])
def test_initial_variables_are_both_models(target, draft):
  features = ['decoder_input_tokens', 'encoder_input_tokens'][: 1 + (target not in DECODERS)]
  pair = pair_of(target, draft)
  found = flax.core.unfreeze(jax.eval_shape(lambda key: pair.get_initial_variables(
      key, dict.fromkeys(features, (2, 5)), dict.fromkeys(features, jnp.int32)),
      jax.random.key(0)))
  assert {'params', 'params_axes'} <= {*found}
  shape = lambda leaf: (leaf.shape, leaf.dtype)
  for name, kind in (('target', target), ('draft', draft)):
    expected = initial_shapes(model_of(kind))
    for collection in found:
      assert {*found[collection]} == {'target', 'draft'}
    assert jax.tree.map(shape, found['params'][name]) == jax.tree.map(shape, expected['params'])
    assert named(found['params_axes'][name]).keys() == named(expected['params_axes']).keys()


def axis_names(axes):
  """Names of logical axes by parameter."""
  is_leaf = lambda x: isinstance(x, flax_partitioning.AxisMetadata)
  leaves, _ = jax.tree_util.tree_flatten_with_path(axes, is_leaf=is_leaf)
  return {'/'.join(key.key for key in path): leaf.names for path, leaf in leaves}


@pytest.mark.parametrize('rules', [None, (('batch', 'data'), ('mlp', 'model'))], ids=str)
def test_axes_of_the_draft(rules):
  pair = pair_of('minimal', 'own', draft_logical_axis_rules=rules)
  found = initial_shapes(pair)['params_axes']
  own = axis_names(initial_shapes(model_of('minimal'))['params_axes'])
  assert axis_names(found['target']) == own
  rename = (lambda name: f'draft/{name}') if rules else (lambda name: None)
  assert axis_names(found['draft']) == {
      key: tuple(map(rename, names)) for key, names in own.items()}
  # Nothing replicated may have lost its number of axes.
  drafts = axis_names(found['draft'])
  assert all(drafts[f'{name}_axes'] is not None and len(drafts[f'{name}_axes']) == leaf.ndim
             for name, leaf in named(params_of('own')).items())


def test_rules_of_a_pair():
  standard = t5x_partitioning.standard_logical_axis_rules()
  rules = partitioning.pair_logical_axis_rules()
  assert rules[: len(standard)] == list(standard)
  assert rules[len(standard) :] == [('draft/batch', 'data')]
  assert partitioning.pair_logical_axis_rules(
      [('embed', 'model')], [('embed', None), ('mlp', 'model')]
  ) == [('embed', 'model'), ('draft/embed', None), ('draft/mlp', 'model')]


# What is refused, in one line that names it.


def refusal(function, *args, **kwargs):
  """The message of a UserError."""
  with pytest.raises(UserError) as caught:
    jax.eval_shape(lambda: function(*args, **kwargs))
  message = str(caught.value)
  assert '\n' not in message
  return message


class Foreign(nn.Module):
  """An encoder-decoder whose decoder keeps its state under some name and shape."""

  state: str = 'hidden_state'

  def setup(self):
    self.embedder = nn.Embed(20, 20)

  def encode(self, encoder_input_tokens, enable_dropout=False):
    return self.embedder(encoder_input_tokens)

  @nn.compact
  def decode(self, encoded, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens,
             enable_dropout=False, decode=False, max_decode_length=None):
    if self.state:
      state = self.variable('cache', self.state, jnp.zeros, (len(encoded), 20, 1, 16))
      state.value += 1.0
    return self.embedder(decoder_input_tokens)

  def __call__(self, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens,
               enable_dropout=False, decode=False):
    encoded = self.encode(encoder_input_tokens)
    return self.decode(
        encoded, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens)


@pytest.mark.parametrize('state', ['hidden_state', 'cached_key'])
def test_a_module_with_another_cache_is_refused(state):
  # The second has the right name, but no attention that it belongs to.
  model = models.EncoderDecoderModel(Foreign(state), VOCABULARY, VOCABULARY, None)
  params = {'embedder': {'embedding': jnp.eye(20)}}
  pair = SpeculativeModel(model_of('minimal'), model)
  params = {'target': params_of('minimal'), 'draft': params}
  message = refusal(pair.predict_batch_with_aux, params, encoder_batch())
  assert message.startswith(f'module {__name__}.Foreign: expected attention called with')
  assert message.endswith(f'; found {state}')


def test_a_module_without_a_cache_is_refused():
  params = {'embedder': {'embedding': jnp.eye(20)}}
  tokens = jnp.ones((2, 1), jnp.int32)
  message = refusal(multi_token.apply, Foreign(''), params, {}, jnp.zeros(2, jnp.int32),
                    jnp.zeros((2, 3, 20)), tokens, tokens, tokens, method='decode')
  assert message.startswith(f'module {__name__}.Foreign: expected attention')
  assert message.endswith('; found no such attention')


def test_a_draft_without_a_cache_is_refused():
  model = models.EncoderDecoderModel(Foreign(''), VOCABULARY, VOCABULARY, None)
  pair = SpeculativeModel(model_of('minimal'), model)
  params = {'target': params_of('minimal'), 'draft': {'embedder': {'embedding': jnp.eye(20)}}}
  message = refusal(pair.predict_batch_with_aux, params, encoder_batch())
  assert message.startswith(f'module {__name__}.Foreign: expected attention')
  assert message.endswith('; found no cache')


@pytest.mark.parametrize(
    'decode_fn', [decoding.speculative_decode, t5x_decoding.temperature_sample])
def test_targets_are_no_prompt_of_a_decoder_only_model(decode_fn):
  pair = SpeculativeModel(
      model_of('decoder-only'), model_of('decoder-only'), decode_fn=decode_fn)
  batch = jax.tree.map(jnp.asarray, batch_of('decoder-only'))
  message = refusal(
      pair.predict_batch_with_aux, pair_params('decoder-only', 'decoder-only'), batch,
      prompt_with_targets=True)
  assert message == ('prompt_with_targets: expected False for a decoder-only target, whose inputs '
                     'are its prompt, found True')


class Masked(nn.Module):
  """A decoder that masks its attention while it decodes."""

  @nn.compact
  def __call__(self, inputs, enable_dropout=False, decode=False):
    mask = jnp.ones((2, 1, 1, 4))
    return t5_network.layers.MultiHeadDotProductAttention(2, 4, name='self_attention')(
        inputs, inputs, mask, decode=decode, deterministic=True)


def test_a_mask_of_the_modules_own_is_refused():
  inputs = jnp.ones((2, 4, 8))
  cache = jax.eval_shape(lambda: Masked().init(jax.random.key(0), inputs, decode=True))
  cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cache)
  message = refusal(multi_token.apply, Masked(), cache['params'], cache['cache'],
                    jnp.zeros(2, jnp.int32), inputs[:, :1])
  assert message == ('module self_attention: expected no mask while decoding, found one of shape '
                     '(2, 1, 1, 4)')


def test_a_model_of_another_class_is_refused():
  class Another(models.BaseTransformerModel):
    FEATURE_CONVERTER_CLS = None

    def predict_batch_with_aux(self, *args, **kwargs):
      raise NotImplementedError

    score_batch = get_initial_variables = _compute_logits = predict_batch_with_aux

  another = Another(modules()['minimal'](), VOCABULARY, VOCABULARY, None)
  pair = SpeculativeModel(model_of('minimal'), another)
  message = refusal(pair.predict_batch_with_aux, pair_params('minimal', 'minimal'), encoder_batch())
  assert message == (
      'model: expected a t5x.models.EncoderDecoderModel or DecoderOnlyModel, found '
      f'{__name__}.Another')


def test_a_module_smaller_than_the_vocabulary_is_refused():
  large = seqio.PassThroughVocabulary(21, eos_id=1)
  for target, draft, gamma, name in [('minimal', 'decoder-only', 0, 'Transformer'),
                                     ('scan', 'decoder-only', 2, 'DecoderWrapper'),
                                     ('decoder-only', 'minimal', 0, 'DecoderWrapper')]:
    pair = SpeculativeModel(model_of(target, large), model_of(draft, large), gamma=gamma)
    batch = jax.tree.map(jnp.asarray, batch_of(target))
    message = refusal(pair.predict_batch_with_aux, pair_params(target, draft), batch)
    assert message == f"{name} vocab_size: expected at least 21 (the vocabulary's), found 20"


def test_ids_beyond_the_vocabulary_are_never_decoded():
  small = seqio.PassThroughVocabulary(5, eos_id=1)
  run = jit(SpeculativeModel(model_of('minimal', small), model_of('scan', small), gamma=2,
                             decode_fn=decoding.speculative_decode).predict_batch_with_aux,
            static_argnames='num_decodes')
  sequences, _ = run(pair_params('minimal', 'scan'), encoder_batch(), num_decodes=20)
  assert np.max(sequences) == 4 and np.min(sequences) == 0


@pytest.mark.parametrize('target, missing', [
    ('decoder-only', 'decoder_causal_attention'), ('prefix-lm', 'decoder_input_tokens'),
    ('minimal', 'encoder_input_tokens'), ('scan', 'decoder_input_tokens'),
])
def test_a_missing_feature_is_named(target, missing):
  batch = batch_of(target)
  del batch[missing]
  message = refusal(
      pair_of(target, 'minimal').predict_batch_with_aux, pair_params(target, 'minimal'), batch)
  assert message.startswith(f'batch: expected the feature {missing}, found [')
  assert 'task_feature_lengths must have inputs and targets' in message


def test_vocabularies_that_differ_are_refused(shared_data):
  own = str(pathlib.Path(speculative_t5x.__file__).parent / 'demo' / 'vocabulary' / 'sp4k.model')
  t5 = seqio.SentencePieceVocabulary(str(shared_data / 't5_spiece.model'))
  demo = seqio.SentencePieceVocabulary(own)
  with pytest.raises(UserError) as caught:
    SpeculativeModel(model_of('minimal', t5), model_of('scan', demo))
  message = str(caught.value)
  assert '\n' not in message
  pieces = [[x.tokenizer.id_to_piece(i) for i in range(100)] for x in (t5, demo)]
  first = next(i for i in range(100) if pieces[0][i] != pieces[1][i])
  assert f'id {first}' in message
  assert repr(pieces[0][first]) in message and repr(pieces[1][first]) in message


def test_vocabularies_that_are_equal_pass(shared_data):
  path = str(shared_data / 't5_spiece.model')
  make = functools.partial(seqio.SentencePieceVocabulary, path)
  SpeculativeModel(model_of('minimal', make()), model_of('scan', make()))
  with pytest.raises(UserError, match='vocabulary'):
    SpeculativeModel(model_of('minimal', make()), model_of('scan', make(extra_ids=100)))


def test_vocabularies_of_other_kinds_that_differ_are_refused():
  message = refusal(SpeculativeModel, model_of('minimal'),
                    model_of('scan', seqio.PassThroughVocabulary(30, eos_id=1)))
  assert message == (
      'draft vocabulary: expected the PassThroughVocabulary of 20 ids of the target, found another '
      'PassThroughVocabulary of 30 ids')
