"""Decoder-only networks: the decode step, checkpoints, pairs by enumeration, the commands."""

import dataclasses
import functools
import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import toy
import trees
from speculative_t5x import (
    checkpoints,
    convert,
    families,
    huggingface_config,
    infer,
    ngram,
    verification,
)
from speculative_t5x import pair as pair_lib
from speculative_t5x.drafters import DrafterConfig
from speculative_t5x.errors import UserError
from speculative_t5x.inputs import Example
from speculative_t5x.measure.run import measure
from speculative_t5x.measure.subject import PairSubject
from speculative_t5x.network import (
    DecoderOnly,
    T5Config,
    Transformer,
    network_of,
    tokens_to_logits,
    transformer,
)
from speculative_t5x.sampling import SamplingRule
from speculative_t5x.tpu import __main__ as tpu_command

CONFIG = T5Config(
    vocab_size=23, emb_dim=16, num_heads=3, num_encoder_layers=0, num_decoder_layers=2, head_dim=6,
    mlp_dim=20, mlp_activations=('gelu', 'linear'), logits_via_embedding=True,
)
UNTIED = dataclasses.replace(
    CONFIG, num_decoder_layers=1, mlp_activations=('relu',), logits_via_embedding=False)
BATCHES = pytest.mark.parametrize('batch', [1, 4])

LENGTHS = np.array([3, 0, 6, 1])
NUM_SLOTS = 24
# The chance that a right sampler fails one test; seeds are fixed.
ERROR_RATE = 1e-4


def random_params(config, seed=0):
  """Parameters for `config`, none at its initial value."""
  tokens = jnp.ones((1, 2), jnp.int32)
  shapes = jax.eval_shape(network_of(config).init, jax.random.key(0), tokens, tokens)['params']
  params = trees.random_params(shapes, config.head_dim)
  return jax.tree.map(lambda x: np.roll(x, seed, axis=-1), params)


@functools.cache
def compiled(config, method):
  """A compiled method of the network: `(params, *args) -> ...`; the slots of a cache are static."""
  run = lambda params, *args: DecoderOnly(config).apply({'params': params}, *args, method=method)
  return jax.jit(run, static_argnums=2 if method == 'init_cache' else ())


def ragged(batch, vocab_size=CONFIG.vocab_size, seed=0):
  """Inputs `[batch, 7]` of `LENGTHS` tokens each, the longest shorter than the array."""
  tokens = np.random.default_rng(seed).integers(2, vocab_size, (batch, 7))
  return np.where(np.arange(7) < LENGTHS[:batch, None], tokens, 0).astype(np.int32)


def assert_chunks_match(config, batch, seed):
  """Decodes texts behind ragged inputs in chunks, some of whose tails are wrong and taken back.

  Raises:
    AssertionError: a logit of a right prefix is not the teacher-forced one of inputs and text.
  """
  random = np.random.default_rng(seed)
  params, inputs = random_params(config), ragged(batch)
  texts = random.integers(1, config.vocab_size, (batch, 12)).astype(np.int32)
  whole = np.zeros((batch, 20), np.int32)
  for row, length in enumerate(LENGTHS[:batch]):
    whole[row, 1 : 1 + length] = inputs[row, :length]
    whole[row, 1 + length : 13 + length] = texts[row]
  forced = np.asarray(compiled(config, '__call__')(params, whole))
  expected = np.stack([
      forced[row, length : length + 12] for row, length in enumerate(LENGTHS[:batch])])
  cache = compiled(config, 'init_cache')(params, inputs, NUM_SLOTS)
  # What is read at position 0 is the input's last token, whatever is given.
  padded = np.pad(texts, ((0, 0), (1, 6)), constant_values=1)
  positions = np.zeros(batch, np.int32)
  for _ in range(14):
    chunk = np.take_along_axis(padded, positions[:, None] + np.arange(4), axis=1)
    right = random.integers(1, 5, batch)
    chunk = np.where(np.arange(4) < right[:, None], chunk, (chunk + 1) % config.vocab_size)
    logits, cache = compiled(config, 'decode_step')(
        params, chunk.astype(np.int32), positions, cache)
    for row, start in enumerate(positions):
      count = min(right[row], 12 - start)
      np.testing.assert_allclose(
          logits[row, :count], expected[row, start : start + count], rtol=0, atol=1e-5,
          err_msg=f'row {row}, position {start}')
    positions = np.minimum(positions + right, 11)
    positions = np.where(random.random(batch) < 0.3, np.maximum(positions - 5, 0), positions)
    positions = positions.astype(np.int32)


@pytest.mark.parametrize('config', [CONFIG, UNTIED], ids=['tied', 'untied'])
@BATCHES
@pytest.mark.parametrize('seed', [0, 1])
def test_chunks_behind_ragged_inputs_equal_teacher_forcing(config, batch, seed):
  assert_chunks_match(config, batch, seed)


@BATCHES
def test_the_chunk_test_detects_a_cache_that_adds(monkeypatch, batch):
  overwrite = transformer.write_slots
  monkeypatch.setattr(
      transformer, 'write_slots',
      lambda cache, new, positions: cache + overwrite(jnp.zeros_like(cache), new, positions))
  monkeypatch.setattr(sys.modules[__name__], 'compiled', functools.cache(compiled.__wrapped__))
  with pytest.raises(AssertionError, match='row'):
    assert_chunks_match(CONFIG, batch, 0)


def test_the_chunk_test_detects_inputs_that_are_taken_for_longer(monkeypatch):
  monkeypatch.setattr(sys.modules[__name__], 'compiled', functools.cache(compiled.__wrapped__))
  init_cache = DecoderOnly.init_cache
  monkeypatch.setattr(DecoderOnly, 'init_cache', lambda self, inputs, num_slots: (
      cache := init_cache(self, inputs, num_slots)).replace(lengths=cache.lengths + 1))
  with pytest.raises(AssertionError, match='row'):
    assert_chunks_match(CONFIG, 4, 0)


def test_padding_behind_inputs_changes_nothing():
  params, inputs = random_params(CONFIG), ragged(4)
  tokens, positions = np.ones((4, 3), np.int32), np.zeros(4, np.int32)
  step = lambda inputs: compiled(CONFIG, 'decode_step')(
      params, tokens, positions, compiled(CONFIG, 'init_cache')(params, inputs, NUM_SLOTS))[0]
  wider = np.pad(inputs, ((0, 0), (0, 5)))
  np.testing.assert_allclose(step(wider), step(inputs), rtol=0, atol=1e-5)


def test_each_network_refuses_the_other_ones_configuration():
  encoder_decoder = dataclasses.replace(CONFIG, num_encoder_layers=1)
  tokens = np.ones((1, 1), np.int32)
  with pytest.raises(ValueError, match='DecoderOnly: expected num_encoder_layers 0, found 1'):
    DecoderOnly(encoder_decoder).init(jax.random.key(0), tokens)
  with pytest.raises(ValueError, match='Transformer: expected num_encoder_layers of at least 1'):
    Transformer(CONFIG).init(jax.random.key(0), tokens, tokens)
  assert isinstance(network_of(CONFIG), DecoderOnly)
  assert isinstance(network_of(encoder_decoder), Transformer)


# Checkpoints.


@pytest.mark.parametrize('config', [CONFIG, UNTIED], ids=['tied', 'untied'])
def test_a_checkpoint_says_what_network_it_holds(tmp_path, config):
  params = random_params(config)
  checkpoints.save_params(tmp_path / 'checkpoint_3', params, step=3)
  found = families.describe(tmp_path / 'checkpoint_3')
  assert (found.family, found.config) == (families.DECODER_ONLY, config)
  assert families.drafts_for(found) == {}
  assert 'decoder-only' in convert.report(found)
  model = pair_lib.load_model(str(tmp_path / 'checkpoint_3'))
  assert isinstance(model.module, DecoderOnly)
  trees.assert_same(model.params, params)
  with pytest.raises(UserError, match=r'num_encoder_layers: expected 1 .*, found 0 in the check'):
    pair_lib.load_model(
        str(tmp_path / 'checkpoint_3'), dataclasses.replace(config, num_encoder_layers=1))


def test_damaged_checkpoints_are_told(tmp_path):
  flat = trees.flatten(random_params(CONFIG))
  for name, value, message in [
      ('decoder/relpos_bias/rel_embedding', None, 'rel_embedding.*expected a matrix.*found none'),
      ('decoder/layers_1/mlp/wo/kernel', None, 'layers_1/mlp/wo/kernel.*found no such parameter'),
      ('decoder/layers_0/self_attention/query/kernel', np.zeros((16, 17), np.float32),
       'expected columns for 3 heads.*found 17'),
  ]:
    arrays = {key: x for key, x in flat.items() if key != name}
    if value is not None:
      arrays[name] = value
    with pytest.raises(UserError, match=message):
      families.config_of_shapes('here', arrays)


def test_transformers_has_no_such_network(tmp_path):
  checkpoints.save_params(tmp_path / 'checkpoint_0', random_params(CONFIG))
  with pytest.raises(UserError, match='num_encoder_layers: expected at least 1 for transformers'):
    convert.convert(tmp_path / 'checkpoint_0', tmp_path / 'there', 'huggingface')
  assert not (tmp_path / 'there').exists()
  with pytest.raises(UserError, match='num_layers: expected at least 1, found 0'):
    huggingface_config.parse(
        'here', {'model_type': 't5', 'vocab_size': 9, 'num_layers': 0}, {}, has_lm_head=False)


# Pairs.


class Letters:
  """A vocabulary of ids."""

  size, eos_id, pad_id = CONFIG.vocab_size, 1, 0

  def encode(self, text):
    return [ord(letter) - ord('a') + 2 for letter in text]

  def decode(self, ids):
    return ''.join(chr(i + ord('a') - 2) for i in ids if i > 1)


def model_of(config, seed):
  return pair_lib.Model(network_of(config), random_params(config, seed))


ENCODER_DECODER = dataclasses.replace(UNTIED, num_encoder_layers=1)
KINDS = {
    'target': (CONFIG, ENCODER_DECODER), 'draft': (ENCODER_DECODER, UNTIED),
}


def plain_by_hand(model, inputs, length):
  """The greedy continuation of each row, one teacher-forced call a token."""
  found = np.zeros((len(inputs), length), np.int32)
  call = compiled(model.module.config, '__call__')
  for row, tokens in enumerate(inputs):
    text = [0, *tokens[tokens > 0].tolist()]
    for place in range(length):
      padded = np.zeros((1, 20), np.int32)
      padded[0, : len(text)] = text
      found[row, place] = int(np.argmax(call(model.params, padded)[0, len(text) - 1]))
      text.append(int(found[row, place]))
      if text[-1] == Letters.eos_id:
        break
  return found


DRAFTERS = pytest.mark.parametrize('drafter', [
    DrafterConfig(), DrafterConfig(min_confidence=0.3), DrafterConfig('copying'),
    DrafterConfig('ngram'), DrafterConfig('mixed'), DrafterConfig('cascade'),
    DrafterConfig('cascade', cascade='ngram', cascade_gamma=1),
], ids=str)


def table():
  texts = np.random.default_rng(0).integers(2, Letters.size, (50, 6)).tolist()
  return jax.tree.map(jnp.asarray, ngram.build(texts, Letters.size, 2))


@DRAFTERS
def test_greedy_continuations_are_those_of_the_target_alone(drafter):
  pair = pair_lib.Pair(
      model_of(CONFIG, 0), model_of(UNTIED, 1), Letters(), drafter=drafter, ngram_table=table())
  inputs = ragged(4)
  expected = plain_by_hand(pair.target, inputs, 10)
  for gamma in (0, 1, 4):
    result = pair.predict(inputs, max_length=10, gamma=gamma)
    np.testing.assert_array_equal(result.sequences[:, 0], expected)
  assert np.sum(result.statistics.drafted) > 0
  alone = pair.predict(inputs[2:3], max_length=10, gamma=4)
  np.testing.assert_array_equal(alone.sequences[:, 0], expected[2:3])


@pytest.mark.parametrize('kinds', ['target', 'draft'])
def test_target_and_draft_may_be_of_different_kinds(kinds):
  pair = pair_lib.Pair(*map(model_of, KINDS[kinds], (0, 1)), Letters(), gamma=3)
  inputs = np.maximum(ragged(4), 1)
  plain = pair.plain(inputs, max_length=10)
  fast = pair.predict(inputs, max_length=10)
  np.testing.assert_array_equal(plain.sequences, fast.sequences)
  assert np.sum(fast.statistics.drafted) > 0


def test_a_model_that_drafts_for_itself_is_always_right():
  target = model_of(CONFIG, 0)
  pair = pair_lib.Pair(target, target, Letters(), gamma=3)
  inputs = ragged(4)
  for temperature in (0.0, 1.0):
    statistics = pair.predict(inputs, max_length=10, temperature=temperature).statistics
    assert np.sum(statistics.accepted) > 0 and np.sum(statistics.rejected) == 0


def test_prompts_stand_between_input_and_continuation():
  pair = pair_lib.Pair(model_of(CONFIG, 0), model_of(UNTIED, 1), Letters(), gamma=2)
  inputs = ragged(4)
  prompts = np.array([[5, 6], [7, 0], [8, 9], [4, 3]], np.int32)
  joined = np.zeros((4, 9), np.int32)
  for row, length in enumerate(LENGTHS):
    count = np.count_nonzero(prompts[row])
    joined[row, :length] = inputs[row, :length]
    joined[row, length : length + count] = prompts[row, :count]
  given = pair.predict(inputs, max_length=8, prompts=prompts)
  expected = pair.predict(joined, max_length=8)
  for row in range(4):
    count = np.count_nonzero(prompts[row])
    np.testing.assert_array_equal(given.sequences[row, 0, :count], prompts[row, :count])
    np.testing.assert_array_equal(
        given.sequences[row, 0, count:], expected.sequences[row, 0, : 8 - count])


def test_a_beam_search_is_the_same_at_every_gamma():
  pair = pair_lib.Pair(
      model_of(CONFIG, 0), model_of(UNTIED, 1), Letters(), num_decodes=2, beam_alpha=0.6)
  plain = pair.predict(ragged(4), max_length=8, gamma=0)
  fast = pair.predict(ragged(4), max_length=8, gamma=2)
  np.testing.assert_array_equal(plain.sequences, fast.sequences)
  np.testing.assert_allclose(plain.scores, fast.scores, atol=1e-4)


# The law of sampled continuations, against enumeration.

SMALL = dataclasses.replace(CONFIG, vocab_size=4, num_decoder_layers=1)
SMALL_DRAFT = dataclasses.replace(UNTIED, vocab_size=4)
PROMPTS = np.array([[2, 3, 3], [3, 0, 0], [0, 0, 0]], np.int32)


class FourIds:
  """A vocabulary of four ids."""

  size, eos_id, pad_id = 4, 1, 0


def exact(model, prompt, length, rule):
  """Probability of every continuation, 0 behind EOS: {tuple: probability}."""
  texts = np.array(list(itertools.product(range(4), repeat=length)), np.int32)
  start = [0, *prompt[prompt > 0].tolist()]
  tokens = np.concatenate([np.tile(start, (len(texts), 1)), texts[:, :-1]], axis=1)
  logits = compiled(model.module.config, '__call__')(model.params, tokens.astype(np.int32))
  laws = np.asarray(jax.jit(rule.distribution)(logits), np.float64)[:, len(start) - 1 :]
  found = {}
  for text, law in zip(texts.tolist(), laws, strict=True):
    length_of = text.index(1) + 1 if 1 in text else length
    probability = np.prod([law[place, text[place]] for place in range(length_of)])
    found[(*text[:length_of], *[0] * (length - length_of))] = probability
  assert sum(found.values()) == pytest.approx(1.0, abs=1e-5)
  return found


def p_values(drafter=DrafterConfig(), rule=SamplingRule(1.0), gamma=2, **settings):  # noqa: B008
  """Of the continuations of each prompt, 3,000 decodes of one call, against enumeration."""
  draft = model_of(SMALL_DRAFT, 1)
  table = jax.tree.map(jnp.asarray, ngram.build([[2, 3, 2, 1], [3, 3, 2, 3]], 4, 2))
  pair = pair_lib.Pair(
      model_of(SMALL, 0), draft, FourIds(), gamma=gamma, sampling=rule, drafter=drafter,
      ngram_table=table, num_decodes=3000, **settings)
  sequences = np.asarray(pair.predict(PROMPTS, max_length=4, seed=5).sequences)
  found = []
  for row, prompt in enumerate(PROMPTS):
    statistic, freedom = toy.chi_square(sequences[row], exact(pair.target, prompt, 4, rule))
    found.append(scipy.stats.chi2.sf(statistic, freedom))
  return found


@DRAFTERS
def test_sampled_continuations_follow_the_target(drafter):
  assert min(p_values(drafter)) > ERROR_RATE


@pytest.mark.parametrize('settings', [
    {'rule': SamplingRule(0.7, topk=3)}, {'rule': SamplingRule(1.0, topp=0.8)}, {'gamma': 0},
    {'gamma': 5}, {'draft_sampling': SamplingRule(0.3)},
    {'verification': verification.VerificationRule('token_wise')},
], ids=str)
def test_sampled_continuations_follow_the_target_under_any_setting(settings):
  assert min(p_values(**settings)) > ERROR_RATE


class Mutations:
  """Faults that the test of the law must find, in one prompt at least."""

  def no_residual(monkeypatch):
    monkeypatch.setattr(verification, 'residual', lambda p, q: p)
    return {'verification': verification.VerificationRule('token_wise')}

  def a_prompt_without_its_last_token(monkeypatch):
    init_cache = DecoderOnly.init_cache
    monkeypatch.setattr(DecoderOnly, 'init_cache', lambda self, inputs, num_slots: (
        cache := init_cache(self, inputs, num_slots)).replace(
            last_tokens=jnp.zeros_like(cache.last_tokens)))
    return {}

  def a_cache_that_adds(monkeypatch):
    overwrite = transformer.write_slots
    monkeypatch.setattr(
        transformer, 'write_slots',
        lambda cache, new, positions: cache + overwrite(jnp.zeros_like(cache), new, positions))
    return {}

  def drafts_of_another_law(monkeypatch):
    monkeypatch.setattr(
        'speculative_t5x.drafters.model.draw', lambda rule, logits, forced, uniform: (
            jnp.argmax(logits, -1).astype(jnp.int32), rule.distribution(logits)))
    return {}


@pytest.mark.parametrize('mutation', [x for x in dir(Mutations) if not x.startswith('_')])
def test_the_test_of_the_law_detects(mutation, monkeypatch):
  # The law to compare with is that of the whole network, which has no cache.
  settings = getattr(Mutations, mutation)(monkeypatch)
  assert min(p_values(**settings)) < ERROR_RATE


# Commands.


@pytest.fixture
def files(tmp_path):
  """Checkpoints of a pair of random weights, and gin lines that name them."""
  vocabulary = pair_lib.vocabularies.load_vocabulary('bytes')
  for name, seed in (('target', 0), ('draft', 1)):
    config = dataclasses.replace(CONFIG, vocab_size=vocabulary.size)
    checkpoints.save_params(tmp_path / name, random_params(config, seed))
  (tmp_path / 'pair.gin').write_text('\n'.join([
      "include 'gin_configs/models/pair.gin'", 'TARGET = None',
      f"CHECKPOINT_PATH = '{tmp_path}/target'", f"DRAFT_CHECKPOINT_PATH = '{tmp_path}/draft'",
      "VOCABULARY_PATH = 'bytes'", "include 'gin_configs/runs/infer_standalone.gin'",
      "TASK_FEATURE_LENGTHS = {'inputs': 12, 'targets': 9}", 'ADD_EOS = False']))
  (tmp_path / 'in.txt').write_text('open the file\nsave\n\nclick')
  return tmp_path


def test_the_command_goes_on_from_every_line(files):
  records = {}
  for gamma in (0, 3):
    assert infer.main([
        f'--gin_file={files}/pair.gin', f'--input={files}/in.txt',
        f'--output_dir={files}/out{gamma}', f'--gin.GAMMA={gamma}', '--gin.NUM_DECODES=2',
        '--gin.BATCH_SIZE=3']) == 0
    lines = (files / f'out{gamma}' / 'inferences.jsonl').read_text().splitlines()
    records[gamma] = [json.loads(line) for line in lines]
  assert [r['prediction'] for r in records[0]] == [r['prediction'] for r in records[3]]
  assert records[3][0]['truncated'] and records[3][2]['prediction'] == ''
  assert all(r['statistics']['emitted'] <= 9 for r in records[3])
  assert records[3][1]['statistics']['drafted'] > 0


def test_the_embedded_pair_goes_on_from_beginnings(tmp_path):
  (tmp_path / 'in.txt').write_text('Click the\nTo insert a\nIf you\n', encoding='utf-8')

  def continued(name, *settings):
    assert infer.main([
        '--gin_file=gin_configs/examples/demo_lm.gin', f'--input={tmp_path}/in.txt',
        f'--output_dir={tmp_path}/{name}', *(f'--gin.{setting}' for setting in settings)]) == 0
    lines = (tmp_path / name / 'inferences.jsonl').read_text(encoding='utf-8').splitlines()
    return [json.loads(line) for line in lines]

  plain = continued('plain', 'GAMMA=0', 'TEMPERATURE=0.0')
  fast = continued('fast', 'TEMPERATURE=0.0')
  assert all(record['prediction'] for record in plain)
  assert [r['prediction'] for r in fast] == [r['prediction'] for r in plain]
  rounds = lambda records: sum(record['statistics']['rounds'] for record in records)
  assert rounds(fast) < rounds(plain)
  sampled = continued('sampled', 'NUM_DECODES=4')
  assert all(len({*record['predictions']}) > 1 for record in sampled)


def test_inputs_end_in_eos_only_when_asked_for():
  asked = []

  class Listening:
    vocabulary, num_decodes, gamma = Letters(), 1, 0
    verification = verification.VerificationRule()

    def predict(self, tokens, **kwargs):
      asked.append(tokens)
      model = model_of(CONFIG, 0)
      return pair_lib.Pair(model, None, Letters(), gamma=0).predict(tokens, **kwargs)

  for add_eos in (True, False):
    infer.decode_batch(
        Listening(), [(0, Example('abcdefgh')), (1, Example('abc'))], batch_size=3,
        lengths={'inputs': 5, 'targets': 4}, prefix='', seed=0, on_long_input='truncate',
        add_eos=add_eos)
  # The row that fills the batch is the first.
  np.testing.assert_array_equal(asked[0], [[2, 3, 4, 5, 1], [2, 3, 4, 1, 0], [2, 3, 4, 5, 1]])
  np.testing.assert_array_equal(asked[1], [[2, 3, 4, 5, 6], [2, 3, 4, 0, 0], [2, 3, 4, 5, 6]])


def test_a_measurement_predicts_the_rounds_of_continuations():
  """Greedy acceptance is certain, so that the rounds along plain texts are those that are run."""
  pair = pair_lib.Pair(model_of(CONFIG, 0), model_of(UNTIED, 1), Letters(), gamma=2)
  inputs = np.maximum(ragged(4), 3)
  # A padding id inside of a text would be counted as no token.
  texts = np.asarray(pair.plain(inputs, max_length=6).sequences[:, 0])
  assert np.all((texts > 0) | (np.cumsum(texts == 1, axis=1) > 0)) and np.any(texts > 1)
  found = measure(PairSubject(pair, [inputs[:2], inputs[2:]], 6), [1, 2], 1)
  for at in found.gammas[1:]:
    assert at.tokens_a_round == pytest.approx(at.predicted_tokens_a_round, abs=1e-6)
    assert at.identical == 4


def test_the_measurement_reads_texts_behind_their_inputs():
  """The logits along a text are those of the whole: inputs, then text."""
  model, inputs = model_of(CONFIG, 0), ragged(4)
  cache = model.module.apply({'params': model.params}, inputs, 9, method='init_cache')
  text = np.array([[0, 4, 5, 6]] * 4, np.int32)
  logits, _ = tokens_to_logits(model.module, model.params, Letters.size)(
      text, jnp.zeros(4, jnp.int32), cache)
  for row, length in enumerate(LENGTHS):
    whole = np.array([[0, *inputs[row, :length], 4, 5, 6]], np.int32)
    expected = model.module.apply({'params': model.params}, whole)[0, length:]
    np.testing.assert_allclose(logits[row], expected, rtol=0, atol=1e-5)


def test_a_plan_refuses_what_has_no_encoder(capsys):

  code = tpu_command.main(
      ['--topology=v5p:2x2x1', '--gin_file=gin_configs/models/demo_lm.gin'])
  assert code == 2
  assert capsys.readouterr().err == (
      'error: TARGET: expected a network with an encoder to plan, found num_encoder_layers 0\n')
