"""Training of T5 models: T5's recipe (Adafactor, parameter-scaled steps) on pairs of ids.

Batches hold sentences of similar length; the state is saved as it goes and resumes at the very
batch where it stopped. What is learnt is the loss function's choice: `reference_loss` here, a
target's distributions in `distil`.

`B` is the batch, `S` the input length, `M` the target length, `V` the vocabulary.
"""

import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from speculative_t5x.network import Transformer

# Longest input and longest target of a batch.
BUCKETS = tuple((size, size) for size in (16, 24, 32, 48, 64, 96, 128))
Example = tuple[Sequence[int], Sequence[int]]

# The files in the folder of a run: its `TrainState`, and what it reached when.
STATE, LOG = 'state.msgpack', 'log.jsonl'
# An earlier one, by its step.
KEPT = 'state_{}.msgpack'


class Batch(NamedTuple):
  """One training batch, padded with 0: `inputs` int32 `[B, S]`, `targets` int32 `[B, M]`."""

  inputs: np.ndarray
  targets: np.ndarray


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """How to train.

  Attributes:
    learning_rate: peak step size relative to each parameter's scale.
    warmup_steps: steps of linear warm-up.
    total_steps: steps after which the rate has decayed linearly to a twentieth.
    seed: of initialisation, order and dropout.
  """

  learning_rate: float = 0.02
  warmup_steps: int = 100
  total_steps: int = 2000
  seed: int = 0

  def optimizer(self) -> optax.GradientTransformation:
    """Adafactor with a warm-up and a linear decay."""
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, self.learning_rate, self.warmup_steps),
            optax.linear_schedule(
                self.learning_rate, self.learning_rate / 20, self.total_steps - self.warmup_steps
            ),
        ],
        [self.warmup_steps],
    )
    return optax.adafactor(schedule)


@flax.struct.dataclass
class TrainState:
  """Everything that a resumed run needs: `step` (scalar int32), `params`, `opt_state`."""

  step: jax.Array
  params: Any
  opt_state: Any


def batches(
    examples: Sequence[Example], rows_of: Callable[[tuple[int, int]], int], seed: int, epoch: int,
    *, buckets: Sequence[tuple[int, int]] = BUCKETS, fill: bool = False,
) -> list[Batch]:
  """One epoch in an order that depends on `seed` and `epoch` alone.

  Args:
    examples: `(input ids, target ids)`. Those longer than the last bucket on either side are left
      out.
    rows_of: rows of a batch of a bucket.
    seed: of the order.
    epoch: which epoch.
    buckets: `(S, M)` of each, growing on both sides.
    fill: whether what does not fill a batch goes to the next bucket; it is left out of the epoch
      otherwise, and always where the last one is not full.

  Returns:
    Batches whose sides are as long as a bucket.
  """
  rng = np.random.default_rng((seed, epoch))
  by_bucket: dict[tuple[int, int], list[int]] = {}
  for index in rng.permutation(len(examples)):
    bucket = bucket_of(examples[index], buckets)
    if bucket is not None:
      by_bucket.setdefault(bucket, []).append(index)
  if fill:
    by_bucket = _filled(by_bucket, rows_of, buckets)
  found = []
  for bucket, indices in by_bucket.items():
    rows = rows_of(bucket)
    # Incomplete batches are dropped so that a bucket has one compiled shape.
    for start in range(0, len(indices) - rows + 1, rows):
      chosen = [examples[i] for i in indices[start : start + rows]]
      found.append(Batch(*(pad([pair[side] for pair in chosen], bucket[side]) for side in (0, 1))))
  return [found[i] for i in rng.permutation(len(found))]


def bucket_of(
    example: Example, buckets: Sequence[tuple[int, int]]
) -> tuple[int, int] | None:
  """The first bucket that holds both sides of `example`; None when none does."""
  inputs, targets = map(len, example)
  return next((x for x in buckets if inputs <= x[0] and targets <= x[1]), None)


def _filled(by_bucket, rows_of, buckets):
  """`by_bucket` with what does not fill a batch moved to the next bucket."""
  found, rest = {}, []
  for bucket in buckets:
    indices = rest + by_bucket.get(bucket, [])
    whole = len(indices) - len(indices) % rows_of(bucket)
    found[bucket], rest = indices[:whole], indices[whole:]
  return found


def pad(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
  """Stacks `rows` to int32 `[len(rows), length]`, padded with 0."""
  out = np.zeros((len(rows), length), np.int32)
  for i, row in enumerate(rows):
    out[i, : len(row)] = row
  return out


def stream(
    examples: Sequence[Example], rows_of: Callable[[tuple[int, int]], int], seed: int,
    first_step: int, **kwargs: Any,
) -> Iterator[Batch]:
  """Batches from step `first_step` on, without end.

  Args:
    examples: as of `batches`.
    rows_of: likewise.
    seed: likewise.
    first_step: how many batches were used before.
    **kwargs: of `batches`.

  Yields:
    The batches of one epoch after the other.

  Raises:
    ValueError: no bucket holds a whole batch.
  """
  step, epoch = 0, 0
  while True:
    found = batches(examples, rows_of, seed, epoch, **kwargs)
    if not found:
      raise ValueError(f'training: {len(examples)} examples do not fill one batch')
    for batch in found:
      if step >= first_step:
        yield batch
      step += 1
    epoch += 1


def shift_right(targets: jax.Array) -> jax.Array:
  """Decoder inputs of `targets` `[B, M]`: one place later, behind a 0."""
  return jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))


def cross_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Sums over the tokens that are not padding.

  Args:
    logits: float32 `[B, M, V]`.
    targets: int32 `[B, M]`.

  Returns:
    The negative log-likelihood and the number of tokens whose argmax is right.
  """
  mask = targets > 0
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
  right = (jnp.argmax(logits, -1) == targets) & mask
  return jnp.sum(losses * mask), jnp.sum(right)


def reference_loss(module: Transformer) -> Callable[..., jax.Array]:
  """The loss of learning from references alone, for `make_train_step`: nats a token."""

  def loss_fn(params, batch, rng):
    logits = module.apply(
        {'params': params}, batch.inputs, shift_right(batch.targets), enable_dropout=True,
        rngs={'dropout': rng},
    )
    return cross_entropy(logits, batch.targets)[0] / jnp.sum(batch.targets > 0)

  return loss_fn


def make_train_step(
    loss_fn: Callable[..., jax.Array], config: TrainConfig
) -> Callable[..., tuple[TrainState, jax.Array]]:
  """Compiles one optimisation step.

  Args:
    loss_fn: `(params, batch, rng, *args) → loss`, differentiable in `params`; pure.
    config: the recipe.

  Returns:
    `(state, batch, *args) → (state, loss)`; the state given is used up.
  """
  optimizer = config.optimizer()

  def train_step(state, batch, *args):
    rng = jax.random.fold_in(jax.random.key(config.seed), state.step)
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch, rng, *args)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(state.step + 1, params, opt_state), loss

  return jax.jit(train_step, donate_argnums=0)


def init_state(module: Transformer, config: TrainConfig, params: Any = None) -> TrainState:
  """A fresh state, of `params` or of parameters drawn from `config.seed`."""
  if params is None:
    tokens = jnp.ones((1, 1), jnp.int32)
    params = jax.jit(module.init)(jax.random.key(config.seed), tokens, tokens)['params']
  return TrainState(jnp.int32(0), params, config.optimizer().init(params))


def fit(
    state: TrainState, folder: os.PathLike, train_step: Callable[..., tuple[TrainState, jax.Array]],
    found: Iterator[Batch], *args: Any, total_steps: int,
    evaluate_params: Callable[[Any], dict[str, Any]], keep: int = 0,
) -> TrainState:
  """Trains up to `total_steps`, and keeps in `folder` what a later run goes on from.

  The state is saved and its parameters evaluated every 500 steps and at the end; the log gets a
  line (step, seconds, mean loss) every 100.

  Args:
    state: where to begin; used up.
    folder: made if need be.
    train_step: from `make_train_step`.
    found: batches from the state's step on.
    *args: of `train_step`, behind the batch.
    total_steps: the last step.
    evaluate_params: what the log says of parameters besides.
    keep: how many of the states saved last stay as `state_N.msgpack`, N the step, to be averaged.

  Returns:
    The last state.
  """
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  started, losses = time.time(), []
  for step in range(int(state.step) + 1, total_steps + 1):
    state, loss = train_step(state, next(found), *args)
    losses.append(loss)
    if step % 100 == 0 or step == total_steps:
      record = {'step': step, 'seconds': round(time.time() - started, 1),
                'train_loss': round(float(np.mean(losses)), 4)}
      losses = []
      if step % 500 == 0 or step == total_steps:
        if keep:
          save_state(folder / KEPT.format(step), state)
          for old in kept_states(folder)[:-keep]:
            old.unlink()
        save_state(folder / STATE, state)
        record |= evaluate_params(state.params)
      with (folder / LOG).open('a') as log:
        log.write(json.dumps(record) + '\n')
      print(record, flush=True)
  return state


def kept_states(folder: os.PathLike) -> list[pathlib.Path]:
  """The states that `fit` kept in `folder`, by step."""
  step = lambda path: int(path.stem.removeprefix('state_'))
  return sorted(pathlib.Path(folder).glob(KEPT.format('*')), key=step)


def read_log(path: os.PathLike) -> list[dict[str, Any]]:
  """Records of a log that `fit` wrote, by step; a step that was run again counts once."""
  lines = pathlib.Path(path).read_text(encoding='utf-8').splitlines()
  by_step = {record['step']: record for record in map(json.loads, lines)}
  return [by_step[step] for step in sorted(by_step)]


def save_state(path: os.PathLike, state: TrainState) -> None:
  """Writes `state` to the file `path`; an interruption leaves the earlier file whole."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_suffix('.partial')
  partial.write_bytes(flax.serialization.to_bytes(state))
  os.replace(partial, path)


def load_state(path: os.PathLike, like: TrainState) -> TrainState:
  """Reads what `save_state` wrote, in the structure of `like`."""
  return flax.serialization.from_bytes(like, pathlib.Path(path).read_bytes())


def evaluate(
    module: Transformer, params: Any, found: Sequence[Batch]
) -> dict[str, float]:
  """How well a network predicts texts, teacher-forced and without dropout.

  Args:
    module: the network.
    params: its parameters.
    found: the texts; a token counts alike in every batch, padding not at all.

  Returns:
    `loss`, mean nats a token, and `accuracy`, the share of next tokens right, to four decimals.
  """

  @jax.jit
  def score(params, batch):
    logits = module.apply({'params': params}, batch.inputs, shift_right(batch.targets))
    return *cross_entropy(logits, batch.targets), jnp.sum(batch.targets > 0)

  totals = np.sum([[float(x) for x in score(params, batch)] for batch in found], axis=0)
  return {'loss': round(float(totals[0] / totals[2]), 4),
          'accuracy': round(float(totals[1] / totals[2]), 4)}
