"""Batches in their order, steps, and states that are gone on from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative_t5x import training
from speculative_t5x.network import T5Config, Transformer

CONFIG = training.TrainConfig(learning_rate=0.05, warmup_steps=2, total_steps=20)
NETWORK = T5Config(
    vocab_size=12, emb_dim=8, num_heads=2, head_dim=4, num_encoder_layers=1, num_decoder_layers=1,
    mlp_dim=8, dropout_rate=0.2)


def examples(count, longest=20, seed=0):
  """Token ids whose first id says which example they are."""
  rng = np.random.default_rng(seed)
  row = lambda i: [100 + i, *rng.integers(2, 12, rng.integers(1, longest)), 1]
  return [(row(i), row(i)) for i in range(count)]


def rows_of(bucket):
  return 4


def chosen(found):
  """The examples of batches, in order."""
  return [int(row[0]) - 100 for batch in found for row in batch.inputs]


def test_an_epoch_has_every_example_once_and_an_order_of_its_own():
  given = examples(50)
  first, again, second = (training.batches(given, rows_of, 3, epoch) for epoch in (0, 0, 1))
  np.testing.assert_equal(first, again)
  assert chosen(first) != chosen(second)
  assert len(set(chosen(first))) == len(chosen(first)) > 40
  for batch in first:
    assert batch.inputs.shape == batch.targets.shape
    assert batch.inputs.shape in {(4, 16), (4, 24)}
    for row, index in zip(batch.inputs, chosen([batch]), strict=True):
      np.testing.assert_array_equal(np.trim_zeros(row, 'b'), given[index][0])


def test_filling_loses_less_than_one_batch():
  given = examples(51)
  kept = chosen(training.batches(given, rows_of, 3, 0, fill=True))
  assert len(set(kept)) == len(kept) == 48
  lost = set(range(51)) - set(kept)
  # What is lost comes from the last bucket that is used, or moved there.
  assert len(lost) == 3


def test_buckets_hold_both_sides():
  buckets = [(4, 2), (8, 4)]
  assert training.bucket_of(([1] * 4, [1] * 2), buckets) == (4, 2)
  assert training.bucket_of(([1] * 4, [1] * 3), buckets) == (8, 4)
  assert training.bucket_of(([1] * 9, [1]), buckets) is None
  found = training.batches([([5] * 3, [6])] * 4, rows_of, 0, 0, buckets=buckets)
  assert [(batch.inputs.shape, batch.targets.shape) for batch in found] == [((4, 4), (4, 2))]


def test_the_stream_goes_on_where_it_was():
  given = examples(30)
  take = lambda first, count: [
      batch for batch, _ in zip(training.stream(given, rows_of, 1, first), range(count),
                                strict=False)]
  whole = take(0, 20)
  np.testing.assert_equal(take(9, 11), whole[9:])
  # Across epochs, which differ.
  assert chosen(whole[:5]) != chosen(whole[5:10])
  with pytest.raises(ValueError, match='2 examples do not fill one batch'):
    next(training.stream(examples(2), rows_of, 1, 0))


def run(state, step, first, last):
  losses = []
  given = [(x[1:], y[1:]) for x, y in examples(40)]
  stream = training.stream(given, rows_of, 0, first)
  for _ in range(first, last):
    state, loss = step(state, next(stream))
    losses.append(float(loss))
  return state, losses


def test_a_state_that_was_saved_gives_the_same_losses(tmp_path):
  module = Transformer(NETWORK)
  step = training.make_train_step(training.reference_loss(module), CONFIG)
  _, whole = run(training.init_state(module, CONFIG), step, 0, 12)
  assert whole[-1] < whole[0]
  state, before = run(training.init_state(module, CONFIG), step, 0, 5)
  training.save_state(tmp_path / 'state.msgpack', state)
  state = training.load_state(tmp_path / 'state.msgpack', training.init_state(module, CONFIG))
  assert int(state.step) == 5
  _, after = run(state, step, 5, 12)
  assert before + after == whole
  # Dropout is drawn anew at every step: with the step forgotten, losses differ.
  state = training.load_state(tmp_path / 'state.msgpack', training.init_state(module, CONFIG))
  _, forgotten = run(state.replace(step=jax.numpy.int32(0)), step, 5, 12)
  assert forgotten != after


def test_the_state_begins_at_given_parameters():
  module = Transformer(NETWORK)
  params = training.init_state(module, CONFIG).params
  given = jax.tree.map(lambda x: x + 1, params)
  state = training.init_state(module, CONFIG, given)
  jax.tree.map(np.testing.assert_array_equal, state.params, given)
  assert int(state.step) == 0


def test_the_loss_is_nats_a_token_and_padding_does_not_count():
  module = Transformer(NETWORK)
  params = training.init_state(module, CONFIG).params
  inputs = np.array([[5, 6, 1, 0]], np.int32)
  short, long = (np.array([row], np.int32) for row in ([7, 8, 1], [7, 8, 1, 0, 0]))
  logits = module.apply({'params': params}, inputs, training.shift_right(short))
  expected = -np.mean([float(jax.nn.log_softmax(logits)[0, i, t]) for i, t in enumerate(short[0])])
  plain = Transformer(T5Config(**{**vars(NETWORK), 'dropout_rate': 0.0}))
  loss = training.reference_loss(plain)
  for targets in (short, long):
    assert float(loss(params, training.Batch(inputs, targets), jax.random.key(0))) == pytest.approx(
        expected, rel=1e-5)


def test_evaluation_counts_every_token_alike_without_dropout():
  module = Transformer(NETWORK)
  params = training.init_state(module, CONFIG).params
  inputs = np.array([[5, 6, 1], [4, 1, 0]], np.int32)
  targets = np.array([[7, 8, 3, 1], [9, 1, 0, 0]], np.int32)
  log_probs = jax.nn.log_softmax(module.apply(
      {'params': params}, inputs, training.shift_right(targets)))
  places = np.argwhere(targets > 0)
  chosen = [float(log_probs[i, j, targets[i, j]]) for i, j in places]
  right = [int(jnp.argmax(log_probs[i, j])) == targets[i, j] for i, j in places]
  # In batches of four tokens and of two.
  found = [training.Batch(inputs[i : i + 1], targets[i : i + 1]) for i in range(2)]
  assert training.evaluate(module, params, found) == pytest.approx(
      {'loss': -np.mean(chosen), 'accuracy': np.mean(right)}, abs=1e-4)


def test_a_run_goes_on_from_what_it_saved(tmp_path):
  """State, log and evaluation of a run in two parts, of a step that adds up its batches."""
  state = training.TrainState(jnp.int32(0), {'sum': jnp.float32(0)}, ())
  add = lambda state, batch, factor: (training.TrainState(
      state.step + 1, {'sum': state.params['sum'] + factor * batch}, ()), batch)
  run = lambda state, found, steps: training.fit(
      state, tmp_path / 'run', add, iter(found), 2.0, total_steps=steps,
      evaluate_params=lambda params: {'seen': float(params['sum'])})
  run(state, [1.0, 2.0, 3.0], 3)
  saved = training.load_state(tmp_path / 'run' / training.STATE, state)
  assert int(saved.step) == 3 and float(saved.params['sum']) == 12
  assert float(run(saved, [4.0, 5.0], 5).params['sum']) == 30
  # A step that is run again is logged again, and counts once.
  run(saved, [6.0, 5.0], 5)
  log = training.read_log(tmp_path / 'run' / training.LOG)
  assert [(x['step'], x['train_loss'], x['seen']) for x in log] == [(3, 2.0, 12.0), (5, 5.5, 34.0)]


def test_the_last_states_are_kept(tmp_path):
  """They are ordered by step, and the earlier ones go."""
  state = training.TrainState(jnp.int32(0), {'sum': jnp.float32(0)}, ())
  add = lambda state, batch: (training.TrainState(
      state.step + 1, {'sum': state.params['sum'] + batch}, ()), batch)
  for last in (2, 9, 10):
    state = training.fit(state, tmp_path, add, iter([1.0] * 10), total_steps=last,
                         evaluate_params=lambda _: {}, keep=2)
  kept = training.kept_states(tmp_path)
  assert [path.name for path in kept] == ['state_9.msgpack', 'state_10.msgpack']
  assert float(training.load_state(kept[0], state).params['sum']) == 9
