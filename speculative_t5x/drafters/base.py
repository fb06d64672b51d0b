"""What a drafter is."""

import abc
from typing import Any

import jax
import jax.numpy as jnp

from speculative_t5x import sampling
from speculative_t5x.rounds import Proposal
from speculative_t5x.step import force_distribution, force_tokens


class Drafter(abc.ABC):
  """Guesses the next gamma tokens of every row."""

  def num_uniforms(self, gamma: int) -> int:
    """How many uniforms a row needs for `gamma` drafts."""
    return gamma

  @property
  @abc.abstractmethod
  def is_deterministic(self) -> bool:
    """Whether drafts do not depend on the uniforms; known before compilation."""
    ...

  @abc.abstractmethod
  def propose(
      self, state: Any, sequences: jax.Array, positions: jax.Array, forced: jax.Array,
      uniforms: jax.Array, active: jax.Array,
  ) -> Proposal:
    """Drafts one round.

    Args:
      state: from the caller at first, then from the last proposal; a pytree whose arrays have the
        rows as leading axis.
      sequences: int32 `[B, T]`, all tokens so far; index 0 holds the start token.
      positions: int32 `[B]`, index of the last token that is known in each row.
      forced: int32 `[B, gamma]`, prompt tokens at the drafted places, 0 where there is none. A
        forced token is proposed with probability 1.
      uniforms: float32 `[B, num_uniforms(gamma)]` in [0, 1).
      active: bool `[B]`, rows that have not ended; drafts of the others do not matter.

    Returns:
      The proposal.
    """
    ...


def draw(
    rule: sampling.SamplingRule, logits: jax.Array, forced: jax.Array, uniforms: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
  """Draws the draft at one place.

  Args:
    rule: the sampling rule.
    logits: float32 `[B, V]`.
    forced: int32 `[B]`, the prompt's token there, 0 where there is none.
    uniforms: float32 `[B]` in [0, 1).

  Returns:
    Tokens int32 `[B]`, and the law `[B, V]` that they were drawn from, None if the rule is greedy.
  """
  if rule.is_greedy:
    return force_tokens(jnp.argmax(logits, -1).astype(jnp.int32), forced), None
  q = force_distribution(rule.distribution(logits), forced)
  return force_tokens(sampling.sample(q, uniforms), forced), q
