"""A smaller model as drafter."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from speculative_t5x import sampling
from speculative_t5x.drafters.base import Proposal, draw
from speculative_t5x.rows import read_rows
from speculative_t5x.step import TokensToLogits


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
  """Drafts with a model, one token after the other.

  Attributes:
    tokens_to_logits: the draft model's decode step; its cache is the drafter's state.
    rule: the sampling rule that its tokens are drawn with.
    first_positions: int32 `[B]` or a scalar, index of the token that each row starts from. The
      cache is filled before it, maybe under another mask than the causal one, and stays as it is.
  """

  tokens_to_logits: TokensToLogits
  rule: sampling.SamplingRule
  first_positions: jax.Array | int = 0

  def propose(
      self, state: Any, sequences: jax.Array, positions: jax.Array, forced: jax.Array,
      uniforms: jax.Array,
  ) -> Proposal:
    """See `Drafter.propose`."""
    # The last round emitted one or two tokens that this model has not seen: the target's, and
    # before it the last draft if that was accepted. Both are ingested in one call; a token that
    # was seen already is overwritten by itself. The first token's predecessor is no draft's.
    start = jnp.maximum(positions - 1, self.first_positions)
    recent = read_rows(sequences, start, 2)
    logits, state = self.tokens_to_logits(recent, start, state)
    logits = jnp.where((positions > start)[:, None], logits[:, 1], logits[:, 0])
    first, first_q = draw(self.rule, logits, forced[:, 0], uniforms[:, 0])

    def draft(carry, later):
      state, token = carry
      offset, forced_token, uniform = later
      logits, state = self.tokens_to_logits(token[:, None], positions + offset, state)
      token, q = draw(self.rule, logits[:, 0], forced_token, uniform)
      return (state, token), (token, q)

    gamma = forced.shape[1]
    rest = (jnp.arange(1, gamma, dtype=jnp.int32), forced[:, 1:].T, uniforms[:, 1:].T)
    (state, _), (tokens, q) = jax.lax.scan(draft, (state, first), rest)
    tokens = jnp.concatenate([first[None], tokens]).T
    if q is not None:
      q = jnp.moveaxis(jnp.concatenate([first_q[None], q]), 0, 1)
    return Proposal(tokens, q, state)
