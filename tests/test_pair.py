"""The pair on real text: the embedded models, and models of random weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative_t5x import ngram, training
from speculative_t5x import pair as pair_lib
from speculative_t5x.demo import tasks
from speculative_t5x.demo.__main__ import load_demo_pair
from speculative_t5x.drafters import DrafterConfig
from speculative_t5x.errors import UserError
from speculative_t5x.network import T5Config, Transformer
from speculative_t5x.sampling import SamplingRule
from speculative_t5x.verification import VerificationRule


@pytest.fixture(scope='module')
def demo():
  return load_demo_pair()


@pytest.fixture(scope='module')
def held_out(demo):
  """Eight sentences of each task, `[16, 48]`."""
  texts = [text for task in tasks.PREFIXES
           for text, _ in tasks.examples(tasks.read_pairs(tasks.HELD_OUT), task)]
  ids = [[*demo.vocabulary.encode(text), demo.vocabulary.eos_id] for text in texts]
  short = [row for row in ids if len(row) <= 48]
  return training.pad(short[:8] + short[-8:], 48)


@pytest.mark.parametrize('gamma', [1, 4, 7])
def test_greedy_outputs_equal_plain_ones(demo, held_out, gamma):
  plain = demo.plain(held_out, max_length=48)
  fast = demo.predict(held_out, max_length=48, gamma=gamma)
  np.testing.assert_array_equal(plain.sequences, fast.sequences)
  np.testing.assert_allclose(plain.scores, fast.scores, atol=1e-3)
  assert np.sum(fast.statistics.rounds) < np.sum(plain.statistics.rounds)
  alone = demo.predict(held_out[3:4], max_length=48, gamma=gamma)
  np.testing.assert_array_equal(alone.sequences[0], fast.sequences[3])


@pytest.mark.parametrize('drafter', [
    DrafterConfig(min_confidence=0.3), DrafterConfig('copying'), DrafterConfig('mixed'),
    DrafterConfig('mixed', min_confidence=0.5), DrafterConfig('cascade'), DrafterConfig('ngram'),
    DrafterConfig('cascade', cascade='ngram', cascade_gamma=1),
], ids=str)
def test_the_drafter_does_not_change_greedy_outputs(demo, held_out, drafter):
  inputs = held_out[2:14:2]
  ids = [[*demo.vocabulary.encode('Open the file and click OK.'), demo.vocabulary.eos_id]]
  table = jax.tree.map(jnp.asarray, ngram.build(ids, demo.vocabulary.size, 2))
  pair = dataclasses.replace(demo, drafter=drafter, ngram_table=table)
  plain = demo.plain(inputs, max_length=32)
  fast = pair.predict(inputs, max_length=32, gamma=3)
  np.testing.assert_array_equal(plain.sequences, fast.sequences)
  assert np.sum(fast.statistics.drafted) > 0


def test_a_beam_search_is_the_same_at_every_gamma(demo, held_out):
  beams = dataclasses.replace(demo, num_decodes=3, beam_alpha=0.6)
  plain = beams.predict(held_out[2:6], max_length=24, gamma=0)
  fast = beams.predict(held_out[2:6], max_length=24, gamma=2)
  np.testing.assert_array_equal(plain.sequences, fast.sequences)
  np.testing.assert_allclose(plain.scores, fast.scores, atol=1e-4)
  assert np.sum(fast.statistics.rounds) < np.sum(plain.statistics.rounds)
  # Beams are wider than a greedy text, and never worse by their own measure.
  assert plain.sequences.shape == (4, 3, 24)
  assert np.all(np.diff(plain.scores, axis=1) >= 0)
  for changes, named in [
      ({'drafter': DrafterConfig('copying')}, 'drafter: expected'),
      ({'draft_width': 2}, 'draft_width: expected at least num_decodes 3, found 2'),
      ({'verification': VerificationRule(lenience=0.5)}, 'lenience: expected 1.0'),
      ({'max_decode_steps': 4}, 'max_decode_steps: expected None'),
  ]:
    with pytest.raises(UserError, match=named):
      dataclasses.replace(beams, **changes)


def test_prompts_begin_the_outputs(demo, held_out):
  prompt = np.array([demo.vocabulary.encode('The')] * 2 + [[0]], np.int32)
  result = demo.predict(held_out[:3], max_length=32, gamma=3, prompts=prompt)
  np.testing.assert_array_equal(result.sequences[:2, 0, : prompt.shape[1]], prompt[:2])


def test_a_temperature_a_row(demo, held_out):
  mixed = demo.predict(held_out[:2], max_length=48, temperature=np.array([0.0, 1.0]))
  greedy = demo.predict(held_out[:2], max_length=48, temperature=0.0)
  sampled = demo.predict(held_out[:2], max_length=48, temperature=1.0)
  np.testing.assert_array_equal(mixed.sequences[0], greedy.sequences[0])
  np.testing.assert_array_equal(mixed.sequences[1], sampled.sequences[1])


class Bytes:
  """A vocabulary of ten ids."""

  size, eos_id, pad_id = 10, 1, 0


def model(vocab_size, seed, scale=1.0):
  config = T5Config(
      vocab_size=vocab_size, emb_dim=8, num_heads=2, head_dim=4, num_encoder_layers=1,
      num_decoder_layers=1, mlp_dim=8)
  module = Transformer(config)
  tokens = jnp.ones((1, 1), jnp.int32)
  params = module.init(jax.random.key(seed), tokens, tokens)['params']
  return pair_lib.Model(module, jax.tree.map(lambda x: x * scale, params))


def test_padded_rows_of_the_embedding_get_no_probability():
  pair = pair_lib.Pair(model(16, 0), model(12, 1), Bytes(), gamma=2, sampling=SamplingRule(5.0))
  result = pair.predict(np.full((200, 3), 5), max_length=8)
  assert np.max(result.sequences) < Bytes.size


def test_several_decodes_and_seeds():
  pair = pair_lib.Pair(
      model(10, 0), model(10, 1), Bytes(), gamma=2, sampling=SamplingRule(1.0), num_decodes=3,
      max_decode_steps=4)
  inputs = np.full((4, 3), 5)
  first, again = (pair.predict(inputs, max_length=8, seed=1) for _ in range(2))
  assert first.sequences.shape == (4, 3, 8)
  assert not np.any(first.sequences[..., 4:])
  np.testing.assert_array_equal(first.sequences, again.sequences)
  other = pair.predict(inputs, max_length=8, seed=2)
  assert np.any(first.sequences != other.sequences)


def test_what_cannot_work_is_refused():
  with pytest.raises(UserError, match='vocab_size: expected at least'):
    pair_lib.Pair(model(8, 0), None, Bytes(), gamma=0)
  with pytest.raises(UserError, match='draft: expected a model for the drafter'):
    pair_lib.Pair(model(10, 0), None, Bytes(), gamma=2)
  pair = pair_lib.Pair(model(10, 0), None, Bytes(), gamma=0)
  with pytest.raises(UserError, match='gamma: expected at least 0, found -1'):
    pair.predict(np.ones((1, 2)), max_length=4, gamma=-1)
  with pytest.raises(UserError, match='prompts'):
    pair.predict(np.ones((1, 2)), max_length=4, prompts=np.ones((1, 4)))
