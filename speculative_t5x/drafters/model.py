"""A smaller model as drafter, for a fixed number of drafts or for as long as it is confident."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from speculative_t5x import sampling
from speculative_t5x.drafters.base import Drafter, draw
from speculative_t5x.rounds import Proposal
from speculative_t5x.rows import read_rows
from speculative_t5x.step import TokensToLogits
from speculative_t5x.verification import at_position


@dataclasses.dataclass(frozen=True)
class ModelDrafter(Drafter):
  """Drafts with a model, one token after the other.

  With `min_confidence` above 0 a round drafts fewer than gamma tokens when the rest is unlikely to
  be accepted: it stops behind the place where, on average over the rows, the product of the model's
  highest probabilities from the first place on falls below it. Whether a place is drafted depends
  on the tokens before it alone, so that outputs stay exact.

  Attributes:
    tokens_to_logits: the draft model's decode step; its cache is the drafter's state.
    rule: the sampling rule that its tokens are drawn with.
    first_positions: int32 `[B]` or a scalar, index of the token that each row starts from. The
      cache is filled before it, maybe under another mask than the causal one, and stays as it is.
    min_confidence: in [0, 1); 0 always drafts gamma tokens.
  """

  tokens_to_logits: TokensToLogits
  rule: sampling.SamplingRule
  first_positions: jax.Array | int = 0
  min_confidence: float = 0.0

  @property
  def is_deterministic(self) -> bool:
    """Greedy drafts need no randomness."""
    return self.rule.is_greedy

  def propose(
      self, state: Any, sequences: jax.Array, positions: jax.Array, forced: jax.Array,
      uniforms: jax.Array, active: jax.Array,
  ) -> Proposal:
    """See `Drafter.propose`."""
    # The last round emitted one or two tokens that this model has not seen: the target's, and
    # before it the last draft if that was accepted.
    logits, state = self.ingest(state, sequences, positions, 2)
    return self.draft(state, logits, positions, forced, uniforms, active)

  def ingest(
      self, state: Any, sequences: jax.Array, positions: jax.Array, count: int
  ) -> tuple[jax.Array, Any]:
    """Reads the last `count` tokens of each row in one call.

    A token that was seen already is overwritten by itself; tokens before the first one are no
    model's own and are not read.

    Args:
      state: the model's cache.
      sequences: int32 `[B, T]`.
      positions: int32 `[B]`.
      count: at least as many as were emitted since the last call, and one.

    Returns:
      float32 logits `[B, V]` behind the last token, and the cache.
    """
    start = jnp.maximum(positions - (count - 1), self.first_positions)
    logits, state = self.tokens_to_logits(read_rows(sequences, start, count), start, state)
    return at_position(logits, positions - start), state

  def draft(
      self, state: Any, logits: jax.Array, positions: jax.Array, forced: jax.Array,
      uniforms: jax.Array, active: jax.Array, limit: jax.Array | None = None,
  ) -> Proposal:
    """Drafts behind what was ingested.

    Args:
      state: the cache.
      logits: float32 `[B, V]`, of the first draft.
      positions: as for `propose`, and so the rest.
      forced: likewise.
      uniforms: likewise.
      active: likewise.
      limit: int32 scalar of at least 1, drafts at most; None is gamma. What lies behind is 0.

    Returns:
      The proposal.
    """
    batch, gamma = forced.shape
    forced_at, uniform_at = forced.T, uniforms.T
    first, law = draw(self.rule, logits, forced_at[0], uniform_at[0])
    tokens = jnp.zeros((gamma, batch), jnp.int32).at[0].set(first)
    q = None if law is None else jnp.zeros((gamma, *law.shape), law.dtype).at[0].set(law)

    def body(carry):
      place, state, tokens, q, confidence = carry
      logits, state = self.tokens_to_logits(
          tokens[place - 1][:, None], positions + place, state)
      logits = logits[:, 0]
      token, law = draw(self.rule, logits, forced_at[place], uniform_at[place])
      return (
          place + 1, state, tokens.at[place].set(token),
          None if q is None else q.at[place].set(law),
          confidence * self._confidence(logits, law, forced_at[place]),
      )

    def goes_on(carry):
      place, confidence = carry[0], carry[-1]
      is_within = place < (gamma if limit is None else limit)
      if not self.min_confidence:
        return is_within
      is_sure = jnp.sum(jnp.where(active, confidence - self.min_confidence, 0.0)) >= 0
      return is_within & is_sure

    start = (jnp.int32(1), state, tokens, q, self._confidence(logits, law, forced_at[0]))
    count, state, tokens, q, _ = jax.lax.while_loop(goes_on, body, start)
    return Proposal(
        tokens.T, None if q is None else jnp.moveaxis(q, 0, 1), state,
        jnp.full(batch, count) if self.min_confidence else None)

  def _confidence(self, logits, law, forced):
    """The highest probability `[B]` at a place; 1 on a prompt, and where nobody asks."""
    if not self.min_confidence:
      return jnp.ones(logits.shape[0])
    if law is None:
      highest = jnp.exp(jnp.max(logits, -1) - jax.nn.logsumexp(logits, -1))
    else:
      highest = jnp.max(law, -1)
    return jnp.where(forced != 0, 1.0, highest)
