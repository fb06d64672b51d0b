"""Training of small T5 models: T5's recipe (Adafactor, parameter-scaled steps) on pairs of ids.

Batches hold sentences of similar length; the state is saved as it goes and resumes at the very
batch where it stopped. A draft may learn from a target's distributions instead of references
(forward KL, DistillSpec, arXiv 2310.08461).

`B` is the batch, `S` the input length, `M` the target length, `V` the vocabulary.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from speculative_t5x.network import Transformer

BUCKETS = (16, 24, 32, 48, 64, 96, 128)


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
    tokens_per_batch: tokens a side in one batch.
    seed: of initialisation, order and dropout.
  """

  learning_rate: float = 0.02
  warmup_steps: int = 100
  total_steps: int = 2000
  tokens_per_batch: int = 1024
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
    examples: Sequence[tuple[Sequence[int], Sequence[int]]], tokens_per_batch: int, seed: int,
    epoch: int,
) -> list[Batch]:
  """One epoch in an order that depends on `seed` and `epoch` alone.

  Args:
    examples: `(input ids, target ids)`, both ending in EOS. Pairs longer than the last bucket on
      either side are left out.
    tokens_per_batch: tokens a side.
    seed: of the order.
    epoch: which epoch.

  Returns:
    Batches whose two sides share the length of a bucket.
  """
  rng = np.random.default_rng((seed, epoch))
  by_bucket: dict[int, list[int]] = {}
  for index in rng.permutation(len(examples)):
    longest = max(map(len, examples[index]))
    if longest <= BUCKETS[-1]:
      bucket = next(size for size in BUCKETS if size >= longest)
      by_bucket.setdefault(bucket, []).append(index)
  found = []
  for size, indices in by_bucket.items():
    rows = max(1, tokens_per_batch // size)
    # Incomplete batches are dropped so that a bucket has one compiled shape.
    for start in range(0, len(indices) - rows + 1, rows):
      chosen = [examples[i] for i in indices[start : start + rows]]
      found.append(Batch(*(pad([pair[side] for pair in chosen], size) for side in (0, 1))))
  return [found[i] for i in rng.permutation(len(found))]


def pad(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
  """Stacks `rows` to int32 `[len(rows), length]`, padded with 0."""
  out = np.zeros((len(rows), length), np.int32)
  for i, row in enumerate(rows):
    out[i, : len(row)] = row
  return out


def stream(examples, config: TrainConfig, first_step: int) -> Iterator[Batch]:
  """Batches from step `first_step` on, without end.

  Raises:
    ValueError: no bucket holds a whole batch.
  """
  step, epoch = 0, 0
  while True:
    found = batches(examples, config.tokens_per_batch, config.seed, epoch)
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


def make_train_step(
    module: Transformer, config: TrainConfig, teacher: Callable[..., jax.Array] | None = None,
    teacher_weight: float = 0.9,
) -> Callable[..., tuple[TrainState, jax.Array]]:
  """Compiles one optimisation step.

  Args:
    module: the network to train.
    config: the recipe.
    teacher: None to learn from references alone, or `(teacher_params, inputs, decoder_inputs) →
      logits [B, M, V]` of the target model.
    teacher_weight: share of the loss that is the cross-entropy against the teacher.

  Returns:
    `(state, batch, teacher_params) → (state, mean loss a token)`.
  """
  optimizer = config.optimizer()

  def loss_fn(params, batch, rng, teacher_params):
    decoder_inputs = shift_right(batch.targets)
    logits = module.apply(
        {'params': params}, batch.inputs, decoder_inputs, enable_dropout=True,
        rngs={'dropout': rng},
    )
    loss, _ = cross_entropy(logits, batch.targets)
    if teacher is not None:
      wanted = jax.nn.softmax(teacher(teacher_params, batch.inputs, decoder_inputs))
      soft = optax.softmax_cross_entropy(logits, jax.lax.stop_gradient(wanted))
      soft = jnp.sum(soft * (batch.targets > 0))
      loss = teacher_weight * soft + (1 - teacher_weight) * loss
    return loss / jnp.sum(batch.targets > 0)

  def train_step(state, batch, teacher_params):
    rng = jax.random.fold_in(jax.random.key(config.seed), state.step)
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch, rng, teacher_params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(state.step + 1, params, opt_state), loss

  return jax.jit(train_step, donate_argnums=0)


def init_state(module: Transformer, config: TrainConfig) -> TrainState:
  """A fresh state with parameters drawn from `config.seed`."""
  tokens = jnp.ones((1, 1), jnp.int32)
  params = jax.jit(module.init)(jax.random.key(config.seed), tokens, tokens)['params']
  return TrainState(jnp.int32(0), params, config.optimizer().init(params))


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
) -> tuple[float, float]:
  """Mean loss a token and share of next tokens right over `found`, without dropout."""

  @jax.jit
  def score(params, batch):
    logits = module.apply({'params': params}, batch.inputs, shift_right(batch.targets))
    return *cross_entropy(logits, batch.targets), jnp.sum(batch.targets > 0)

  totals = np.sum([[float(x) for x in score(params, batch)] for batch in found], axis=0)
  return totals[0] / totals[2], totals[1] / totals[2]
