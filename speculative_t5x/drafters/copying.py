"""Drafts that copy what followed the same tokens earlier, in the output or in the input."""

import dataclasses

import jax
import jax.numpy as jnp

from speculative_t5x.drafters.base import Drafter
from speculative_t5x.rounds import Proposal
from speculative_t5x.step import force_tokens


@dataclasses.dataclass(frozen=True)
class CopyingDrafter(Drafter):
  """Looks for the last tokens of each row earlier in its context, and proposes what came next.

  The context is the encoder's input followed by the output so far. The longest match wins, and of
  equally long ones the latest. A row without a match has no drafts. The drafts
  are certain, so their law is one-hot (paper, section 3.6: cheap drafts).

  Attributes:
    max_ngram: tokens compared at most.
    min_ngram: tokens that a match has at least.
  """

  max_ngram: int = 4
  min_ngram: int = 1

  @property
  def is_deterministic(self) -> bool:
    """A copy is certain."""
    return True

  def propose(
      self, state: jax.Array, sequences: jax.Array, positions: jax.Array, forced: jax.Array,
      uniforms: jax.Array, active: jax.Array,
  ) -> Proposal:
    """See `Drafter.propose`; `state` is the encoder's input, int32 `[B, S]`, padded with 0."""
    del uniforms, active
    gamma = forced.shape[1]
    tokens, match = self.copy(state, sequences, positions, gamma)
    return Proposal(force_tokens(tokens, forced), None, state, jnp.where(match > 0, gamma, 0))

  def copy(
      self, inputs: jax.Array, sequences: jax.Array, positions: jax.Array, gamma: int
  ) -> tuple[jax.Array, jax.Array]:
    """What to copy.

    Args:
      inputs: int32 `[B, S]`, padded with 0.
      sequences: int32 `[B, T]`, the start token and the output; what lies behind `positions` is
        not read.
      positions: int32 `[B]`.
      gamma: tokens to copy.

    Returns:
      tokens int32 `[B, gamma]`, 0 without a match; the length of the match int32 `[B]`, 0 for none.
    """
    context = jnp.concatenate([inputs, sequences], axis=1)
    last = inputs.shape[1] + positions
    places = jnp.arange(context.shape[1])
    # [B, C]: how many tokens that end at a place are those that end the row.
    length = jnp.zeros(context.shape, jnp.int32)
    goes_on = (places < last[:, None]) & (context != 0)
    for back in range(self.max_ngram):
      wanted = jnp.take_along_axis(context, jnp.maximum(last - back, 0)[:, None], axis=1)
      found = jnp.pad(context, ((0, 0), (back, 0)))[:, : context.shape[1]]
      goes_on = goes_on & (found == wanted) & (found != 0)
      length = length + goes_on
    best = jnp.max(length, axis=1)
    has_match = best >= self.min_ngram
    start = jnp.max(jnp.where(length == best[:, None], places, -1), axis=1)
    # A match that reaches the end of the row repeats: the text goes round in a loop.
    period = jnp.maximum(last - start, 1)[:, None]
    source = start[:, None] + 1 + jnp.arange(gamma) % period
    tokens = jnp.take_along_axis(context, jnp.minimum(source, context.shape[1] - 1), axis=1)
    return jnp.where(has_match[:, None], tokens, 0), jnp.where(has_match, best, 0)
