"""What is measured: a pair's decoding of one batch, and its models' single steps.

`B` is the batch, `S` the input length, `L` the output length, `V` the vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from speculative_t5x.network import tokens_to_logits
from speculative_t5x.pair import Model, Pair
from speculative_t5x.sampling import SamplingRule


class ModelSteps(NamedTuple):
  """One model on one batch.

  Attributes:
    params: its parameters.
    encode: `params -> cache`, what comes before the first step; pure.
    step: `(params, tokens, positions, cache) -> (logits, cache)`, see `step.TokensToLogits`; pure.
  """

  params: Any
  encode: Callable[[Any], Any]
  step: Callable[..., tuple[jax.Array, Any]]


class Decoded(NamedTuple):
  """What a run of a program returns.

  Attributes:
    sequences: int32 `[B, L]`, 0 behind EOS.
    statistics: `decoding.Statistics`' counts by name, int32 `[B, …]`.
  """

  sequences: jax.Array
  statistics: dict[str, jax.Array]


class Subject(Protocol):
  """A pair of either front door.

  Attributes:
    rule: the target's sampling rule.
    draft_rule: the draft's.
    max_length: `L`.
    shapes: `(B, S)` of each batch.
  """

  rule: SamplingRule
  draft_rule: SamplingRule
  max_length: int
  shapes: list[tuple[int, int]]

  def program(self, batch: int, gamma: int) -> jax.stages.Compiled:
    """The compiled decoding of batch number `batch`; `run` calls it."""
    ...

  def run(self, program: jax.stages.Compiled, batch: int) -> Decoded:
    """Decodes batch number `batch`."""
    ...

  def models(self, batch: int, slots: int) -> dict[str, ModelSteps]:
    """The models `target` and, where there is one, `draft`, with caches of `slots` places."""
    ...


class PairSubject:
  """A `Pair` on tokenised inputs; see `Subject`."""

  def __init__(
      self, pair: Pair, batches: list[np.ndarray], max_length: int, seed: int = 0
  ):
    """See the class.

    Args:
      pair: target and draft.
      batches: int32 `[B, S]` each, padded with 0.
      max_length: `L`.
      seed: of the sampling.
    """
    self.pair = pair
    self.batches = batches
    self.shapes = [inputs.shape for inputs in batches]
    self.max_length = max_length
    self.rule = pair.sampling
    self.draft_rule = pair.draft_sampling or pair.sampling
    self._key = jax.random.key(seed)
    self._programs = {}

  def program(self, batch: int, gamma: int) -> jax.stages.Compiled:
    """See `Subject.program`."""
    shape = self.batches[batch].shape
    if (shape, gamma) not in self._programs:
      def decode(params, inputs, key):
        nothing = jnp.zeros((shape[0], self.max_length), jnp.int32)
        result = self.pair.decode_from(
            self.pair.start(params, inputs, self.max_length, gamma), params, nothing,
            gamma=gamma, rule=self.rule, decode_rng=key)
        return result.sequences[:, -1], {
            name: value[:, -1] for name, value in vars(result.statistics).items()}

      self._programs[shape, gamma] = jax.jit(decode).lower(
          self.pair.params, jnp.asarray(self.batches[batch]), self._key).compile()
    return self._programs[shape, gamma]

  def run(self, program: jax.stages.Compiled, batch: int) -> Decoded:
    """See `Subject.run`."""
    return Decoded(*program(self.pair.params, jnp.asarray(self.batches[batch]), self._key))

  def models(self, batch: int, slots: int) -> dict[str, ModelSteps]:
    """See `Subject.models`."""
    steps = lambda model: model_steps(
        model, jnp.asarray(self.batches[batch]), slots, self.pair.vocabulary.size)
    found = {'target': steps(self.pair.target)}
    if self.pair.draft is not None and self.pair.drafter.has_model:
      found['draft'] = steps(self.pair.draft)
    return found


def model_steps(model: Model, inputs: jax.Array, slots: int, vocab_size: int) -> ModelSteps:
  """A network's steps on one batch.

  Args:
    model: the network.
    inputs: int32 `[B, S]`, padded with 0.
    slots: places of its cache.
    vocab_size: logits beyond it are cut off.

  Returns:
    The steps.
  """
  step = lambda params, *args: tokens_to_logits(model.module, params, vocab_size)(*args)
  encode = lambda params: model.module.apply(
      {'params': params}, inputs, slots, method='init_cache')
  return ModelSteps(model.params, encode, step)
