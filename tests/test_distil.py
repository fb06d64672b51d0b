"""Divergences against enumeration, their gradients, what counts, and what the draft samples."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import toy
from speculative_t5x import inputs as inputs_lib
from speculative_t5x import training
from speculative_t5x.distil import divergences, evaluation, examples, generation, trainer
from speculative_t5x.distil.recipe import Recipe, distillation_loss
from speculative_t5x.errors import UserError
from speculative_t5x.network import T5Config, Transformer
from speculative_t5x.sampling import SamplingRule

NAMES = sorted(divergences.DIVERGENCES)


class Digits:
  """A vocabulary of five ids."""

  size, eos_id, pad_id = 5, 1, 0

  def encode(self, text):
    return [int(c) for c in text]


def enumerated(name, p, q):
  """The divergence of two distributions, term by term in float64."""
  total = 0.0
  for a, b in zip(p, q, strict=True):
    if name == 'total_variation':
      total += abs(a - b) / 2
      continue
    a, b = (a, b) if name == 'forward_kl' else (b, a)
    if a > 0:
      total += a * (np.log(a) - np.log(b)) if b > 0 else np.inf
  return total


def softmax(logits):
  exp = np.exp(np.asarray(logits, np.float64) - np.max(logits))
  return exp / exp.sum()


@pytest.mark.parametrize('name', NAMES)
def test_divergences_equal_enumeration(name):
  rng = np.random.default_rng(0)
  target, draft = rng.normal(size=(2, 60, 7)).astype(np.float32) * 4
  # Exact zeros: of both, of the target, of the draft.
  target[:20, 2] = draft[:20, 2] = -np.inf
  target[20:30, 3] = -np.inf
  draft[30:40, 4] = -np.inf
  target[40:43], draft[40:43] = -np.inf, -np.inf
  target[40:43, 1] = draft[40:43, 1] = 0.0  # One-hot both.
  found = divergences.DIVERGENCES[name](jnp.asarray(target), jnp.asarray(draft))
  expected = [enumerated(name, softmax(t), softmax(d)) for t, d in zip(target, draft, strict=True)]
  np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
  assert np.isinf(expected).sum() == (0 if name == 'total_variation' else 10)


def test_total_variation_is_one_minus_acceptance():
  target, draft = jax.random.normal(jax.random.key(0), (2, 9, 6)) * 3
  accepted = jnp.sum(jnp.minimum(jax.nn.softmax(target), jax.nn.softmax(draft)), -1)
  np.testing.assert_allclose(divergences.total_variation(target, draft), 1 - accepted, atol=1e-6)


def closed_form(name, p, q):
  """The gradient of a divergence by the draft's logits."""
  if name == 'forward_kl':
    return q - p
  if name == 'reverse_kl':
    ratio = np.log(q) - np.log(p)
    return q * (ratio - np.sum(q * ratio))
  sign = np.sign(q - p) / 2
  return q * (sign - np.sum(q * sign))


def gradient(name, target, draft):
  return jax.grad(divergences.DIVERGENCES[name], argnums=1)(
      jnp.asarray(target), jnp.asarray(draft))


@pytest.mark.parametrize('name', NAMES)
def test_gradients_equal_closed_forms(name):
  target, draft = np.random.default_rng(1).normal(size=(2, 6)).astype(np.float32) * 2
  found = gradient(name, target, draft)
  np.testing.assert_allclose(
      found, closed_form(name, softmax(target), softmax(draft)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('name', NAMES)
def test_gradients_are_finite_beside_exact_zeros(name):
  target, draft = np.random.default_rng(2).normal(size=(2, 6)).astype(np.float32)
  target[2] = draft[2] = -np.inf
  if name == 'forward_kl':
    target[3] = -np.inf
  found = gradient(name, target, draft)
  assert np.all(np.isfinite(found)) and found[2] == 0 and np.any(found != 0)


@pytest.mark.parametrize('name', NAMES)
def test_only_what_counts_counts(name):
  rng = np.random.default_rng(3)
  target = rng.normal(size=(2, 4, 9)).astype(np.float32)
  draft = rng.normal(size=(2, 4, 7)).astype(np.float32)
  mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0]], bool)
  mean = functools.partial(divergences.mean_divergence, name, vocab_size=5, temperature=0.5)
  by_hand = np.mean([
      enumerated(name, softmax(target[i][:5] / 0.5), softmax(draft[i][:5] / 0.5))
      for i in zip(*np.nonzero(mask), strict=True)])
  assert float(mean(target, draft, mask)) == pytest.approx(by_hand, rel=1e-5)
  # Neither padding nor rows beyond the vocabulary can change the value or the gradient.
  spoilt_target, spoilt_draft = target.copy(), draft.copy()
  for spoilt in (spoilt_target, spoilt_draft):
    spoilt[..., 5:] = 50.0
    spoilt[~mask] = np.nan
  for x, y in [(target, draft), (spoilt_target, spoilt_draft)]:
    value, (by_target, by_draft) = jax.value_and_grad(mean, argnums=(0, 1))(
        jnp.asarray(x), jnp.asarray(y), mask)
    assert float(value) == pytest.approx(by_hand, rel=1e-5)
    assert not np.any(by_target)
    assert np.all(np.any(by_draft[mask][:, :5], axis=-1))
    assert not np.any(by_draft[~mask]) and not np.any(by_draft[..., 5:])
  # With a token of padding counted, it would be another number.
  assert float(mean(target, draft, np.ones_like(mask))) != pytest.approx(by_hand, rel=1e-3)
  assert float(mean(target, draft, np.zeros_like(mask))) == 0.0


@pytest.mark.parametrize('name', NAMES)
def test_nothing_as_large_as_the_logits_is_kept_for_the_gradient_but_them(name):
  target, draft = jax.random.normal(jax.random.key(0), (2, 3, 4, 50))
  mask = jnp.ones((3, 4), bool)
  _, backward = jax.vjp(
      lambda x: divergences.mean_divergence(name, target, x, mask, vocab_size=50), draft)
  large = [leaf for leaf in jax.tree.leaves(backward) if leaf.size >= draft.size]
  assert 1 <= len(large) <= 2


def test_texts_count_up_to_eos():
  targets = np.array([[4, 1, 0, 0], [4, 0, 3, 1], [0, 0, 0, 0], [1, 1, 4, 0]])
  expected = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]], bool)
  np.testing.assert_array_equal(examples.counted(targets, 1), expected)
  np.testing.assert_array_equal(jax.jit(examples.counted)(jnp.asarray(targets), 1), expected)


def network(seed, vocab_size=7, **kwargs):
  config = T5Config(
      vocab_size=vocab_size, emb_dim=8, num_heads=2, head_dim=4, num_encoder_layers=1,
      num_decoder_layers=1, mlp_dim=8, **kwargs)
  module = Transformer(config)
  tokens = jnp.ones((1, 1), jnp.int32)
  return module, module.init(jax.random.key(seed), tokens, tokens)['params']


@pytest.mark.parametrize('weight', [0.0, 0.25, 1.0])
def test_the_loss_is_its_parts(weight):
  (draft, params), (target, target_params) = network(0), network(1, 9)
  batch = training.Batch(
      np.array([[3, 4, 1, 0], [2, 1, 0, 0]]), np.array([[4, 2, 1, 0, 0], [3, 1, 0, 0, 0]]))
  recipe = Recipe(divergence='reverse_kl', reference_weight=weight, distillation_temperature=2.0)
  loss_fn = distillation_loss(draft, target, recipe, Digits())
  given = target_params if recipe.needs_teacher else None
  loss = loss_fn(params, batch, jax.random.key(0), given, np.float32(weight))
  tokens = training.shift_right(batch.targets)
  p, q = (np.asarray(module.apply({'params': x}, batch.inputs, tokens))[..., :5]
          for module, x in ((target, target_params), (draft, params)))
  parts = []
  for row, length in enumerate([3, 2]):
    for place in range(length):
      divergence = enumerated(
          'reverse_kl', softmax(p[row, place] / 2), softmax(q[row, place] / 2))
      reference = -np.log(softmax(q[row, place])[batch.targets[row, place]])
      parts.append(weight * reference + (1 - weight) * divergence)
  assert float(loss) == pytest.approx(np.mean(parts), rel=1e-4)
  # More padding is no matter.
  wider = training.Batch(*(np.pad(x, ((0, 0), (0, 3))) for x in batch))
  again = loss_fn(params, wider, jax.random.key(0), given, np.float32(weight))
  assert float(again) == pytest.approx(float(loss), rel=1e-5)


def test_the_draft_samples_from_its_own_distribution():
  """Of 20,000 texts; a false alarm has probability 1e-4."""
  module, params = network(3)
  params = jax.tree.map(lambda x: x * 1.5, params)
  rule, length = SamplingRule(0.8), 3
  sample = generation.make_sampler(module, Digits(), rule, length)
  inputs = np.tile(np.array([[3, 4, 1]], np.int32), (20_000, 1))
  drawn = np.asarray(sample(params, inputs, jax.random.key(7)))

  def law(prefix, temperature):
    tokens = jnp.array([[0, *prefix]])
    logits = module.apply({'params': params}, inputs[:1], tokens)[0, -1, :5]
    return softmax(np.asarray(logits) / temperature)

  law = functools.cache(law)

  def exact(temperature):
    found = {}
    for index in np.ndindex(*[5] * length):
      ids, probability = [], 1.0
      for token in index:
        probability *= law(tuple(ids), temperature)[token]
        ids.append(token)
        if token == toy.EOS:
          break
      found[tuple(ids + [0] * (length - len(ids)))] = probability
    return found

  statistic, freedom = toy.chi_square(drawn, exact(0.8))
  limit = scipy.stats.chi2.isf(1e-4, freedom)
  assert statistic < limit
  # The same test tells another temperature, and other parameters, apart.
  assert toy.chi_square(drawn, exact(0.7))[0] > limit
  other = sample(jax.tree.map(lambda x: x * 1.1, params), inputs, jax.random.key(7))
  assert toy.chi_square(np.asarray(other), exact(0.8))[0] > limit
  again = sample(params, inputs, jax.random.key(7))
  np.testing.assert_array_equal(drawn, again)
  assert np.any(drawn != np.asarray(sample(params, inputs, jax.random.key(8))))


def test_batches_get_the_drafts_texts_for_their_own_inputs():
  batches = [training.Batch(np.array([[2, 1], [3, 1]]), np.zeros((2, 4), int)),
             training.Batch(np.array([[4, 4, 1], [2, 2, 1]]), np.zeros((2, 8), int))]

  def sample(inputs):
    # Each text says what it is of; one is padding throughout, which counts.
    texts = np.zeros((4, 8), int)
    texts[:, 0], texts[:, 1] = inputs[:, 0], 1
    texts[2] = 0
    return texts

  first, second = generation.on_policy(batches, sample, [(2, 2), (3, 4), (4, 8)], 1)
  np.testing.assert_array_equal(first.inputs, batches[0].inputs)
  np.testing.assert_array_equal(first.targets, [[2, 1], [3, 1]])
  np.testing.assert_array_equal(second.inputs, batches[1].inputs)
  assert second.targets.shape == (2, 8) and second.targets[1, 0] == 2


def test_the_share_of_the_drafts_batches():
  recipe = Recipe(draft_fraction=0.3, sample_period=5, seed=4)
  drawn = [trainer.draft_writes(recipe, step) for step in range(20_000)]
  # Of 4,000 draws: five standard errors.
  assert np.mean(drawn) == pytest.approx(0.3, abs=5 * np.sqrt(0.3 * 0.7 / 4000))
  assert all(len(set(drawn[i : i + 5])) == 1 for i in range(0, 20_000, 5))
  always = dataclasses.replace(recipe, examples='draft', draft_fraction=0.0)
  assert all(trainer.draft_writes(always, step) for step in range(50))
  never = dataclasses.replace(recipe, draft_fraction=0.0)
  assert not any(trainer.draft_writes(never, step) for step in range(50))


def test_inputs_and_references_become_ids():
  lengths = {'inputs': 4, 'targets': 3}
  given = [inputs_lib.Example('34', {'targets': '2222'}), inputs_lib.Example(''),
           inputs_lib.Example('44444', {'targets': '2'})]
  found = examples.encode(given, Digits(), lengths, prefix='2', with_targets=True)
  # A text that is cut has no EOS: it does not end there.
  assert found == [([2, 3, 4, 1], [2, 2, 2]), ([2, 4, 4, 1], [2, 1])]
  assert [x for _, x in examples.encode(given, Digits(), lengths)] == [[], []]
  with pytest.raises(UserError, match=r"input 1: expected a text field 'targets'.*found None"):
    examples.encode([inputs_lib.Example('3')], Digits(), lengths, with_targets=True)
  with pytest.raises(UserError, match='line 7'):
    examples.encode([inputs_lib.Example('', error='line 7: broken')], Digits(), lengths)
  assert examples.buckets_of({'inputs': 16, 'targets': 8}) == [
      (2, 1), (4, 2), (6, 3), (8, 4), (12, 6), (16, 8)]


def test_held_out_texts_count_once_each():
  given = [([5] * n, [6] * n) for n in (1, 2, 3, 4, 3)]
  found = evaluation.held_out_batches(given, 2, [(2, 2), (4, 4)])
  assert [batch.inputs.shape for batch in found] == [(2, 2), (2, 4), (2, 4)]
  assert sum(np.count_nonzero(batch.targets) for batch in found) == 13


@pytest.mark.parametrize('changes, named', [
    ({'divergence': 'kl'}, r"DIVERGENCE: expected one of \('forward_kl'.*found 'kl'"),
    ({'examples': 'corpus'}, "EXAMPLES: expected one of .*'draft'.*found 'corpus'"),
    ({'draft_fraction': 1.5}, r'DRAFT_FRACTION: expected a number in \[0, 1\], found 1.5'),
    ({'reference_weight': '1'}, r"REFERENCE_WEIGHT: expected a number in \[0, 1\], found '1'"),
    ({'dropout_rate': 1.0}, r'DROPOUT_RATE: expected a number in \[0, 1\), found 1.0'),
    ({'distillation_temperature': 0}, 'DISTILLATION_TEMPERATURE: expected a number above 0'),
    ({'learning_rate': float('nan')}, 'LEARNING_RATE: expected a number above 0, found nan'),
    ({'train_steps': 2.5}, 'TRAIN_STEPS: expected a whole number from 1 on, found 2.5'),
    ({'warmup_steps': 10_000}, 'WARMUP_STEPS: expected less than TRAIN_STEPS 10000, found 10000'),
    ({'examples': 'draft', 'draft_fraction': 0.5}, 'DRAFT_FRACTION: expected 0.0 for EXAMPLES'),
    ({'examples': 'draft', 'reference_weight': 0.5}, 'REFERENCE_WEIGHT: expected 0.0'),
    ({'draft_fraction': 0.5, 'reference_weight': 1.0}, 'REFERENCE_WEIGHT: expected less than 1.0'),
], ids=str)
def test_a_recipe_that_cannot_be_is_refused(changes, named):
  with pytest.raises(UserError, match=named):
    Recipe(**changes)
