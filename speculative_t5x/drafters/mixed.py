"""Copies where the text repeats itself, and a model where it does not."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from speculative_t5x.drafters.base import Drafter
from speculative_t5x.drafters.copying import CopyingDrafter
from speculative_t5x.drafters.model import ModelDrafter
from speculative_t5x.rounds import Proposal
from speculative_t5x.step import force_tokens


@dataclasses.dataclass(frozen=True)
class MixedDrafter(Drafter):
  """Rows with a match copy, the others are drafted by a model; both may happen in one batch.

  The model reads everything that was emitted in one call a round, and drafts only when some row
  needs it.

  Attributes:
    copying: decides which rows have a match.
    model: drafts for the others.
  """

  copying: CopyingDrafter
  model: ModelDrafter

  @property
  def is_deterministic(self) -> bool:
    """Greedy drafts need no randomness."""
    return self.model.is_deterministic

  def propose(
      self, state: tuple[Any, jax.Array], sequences: jax.Array, positions: jax.Array,
      forced: jax.Array, uniforms: jax.Array, active: jax.Array,
  ) -> Proposal:
    """See `Drafter.propose`; `state` is the model's and the copying drafter's."""
    model_state, inputs = state
    gamma = forced.shape[1]
    copied, match = self.copying.copy(inputs, sequences, positions, gamma)
    has_match = match > 0
    needs_model = active & ~has_match
    # After a copy up to gamma + 1 tokens are new to the model.
    logits, model_state = self.model.ingest(model_state, sequences, positions, gamma + 2)
    limit = jnp.where(jnp.any(needs_model), gamma, 1)
    proposal = self.model.draft(
        model_state, logits, positions, forced, uniforms, needs_model, limit)

    tokens = jnp.where(has_match[:, None], force_tokens(copied, forced), proposal.tokens)
    q = proposal.probabilities
    if q is not None:
      certain = jax.nn.one_hot(jnp.minimum(tokens, q.shape[-1] - 1), q.shape[-1], dtype=q.dtype)
      q = jnp.where(has_match[:, None, None], certain, q)
    lengths = proposal.lengths
    if lengths is not None:
      lengths = jnp.where(has_match, gamma, lengths)
    return Proposal(tokens, q, (proposal.state, inputs), lengths)
