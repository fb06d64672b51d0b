"""A draft model that is itself drafted for: speculative decoding within a round."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from speculative_t5x import sampling, verification
from speculative_t5x.drafters.base import Drafter
from speculative_t5x.rounds import Proposal, fill_prompt, judge
from speculative_t5x.rows import read_rows, write_rows
from speculative_t5x.step import TokensToLogits


@dataclasses.dataclass(frozen=True)
class CascadeDrafter(Drafter):
  """Drafts with a model that decodes speculatively, a smaller drafter guessing for it.

  The tokens follow the model's own law, so that law is the q that the target judges them by: the
  cascade is exact because each of its stages is.

  Attributes:
    tokens_to_logits: the model's decode step.
    rule: the sampling rule that its tokens follow.
    drafter: guesses for the model.
    gamma: its drafts an inner round.
    first_positions: as in `ModelDrafter`.
    verify: how the model judges them; exact.
  """

  tokens_to_logits: TokensToLogits
  rule: sampling.SamplingRule
  drafter: Drafter
  gamma: int
  first_positions: jax.Array | int = 0
  verify: verification.VerificationRule = verification.VerificationRule()  # noqa: RUF009 - frozen

  @property
  def is_deterministic(self) -> bool:
    """Greedy drafts need no randomness."""
    return self.rule.is_greedy

  def num_uniforms(self, gamma: int) -> int:
    """Every inner round settles a token at least."""
    return gamma * self._uniforms_a_round

  @property
  def _uniforms_a_round(self) -> int:
    return self.drafter.num_uniforms(self.gamma) + self.gamma + 1

  def propose(
      self, state: tuple[Any, Any], sequences: jax.Array, positions: jax.Array, forced: jax.Array,
      uniforms: jax.Array, active: jax.Array,
  ) -> Proposal:
    """See `Drafter.propose`; `state` is the model's and the inner drafter's.

    Both caches need `cache_slots(L, gamma + self.gamma)` places.
    """
    batch, gamma = forced.shape
    inner = self.gamma
    # Room for late writes.
    widen = lambda x: jnp.pad(x, ((0, 0), (0, inner + 1)))
    prompts = widen(forced)

    def cond(carry):
      return jnp.any(active & (carry[1] < gamma))

    def body(carry):
      index, settled, sequences, q, (model_state, inner_state) = carry
      is_open = active & (settled < gamma)
      at = positions + settled
      now_forced = read_rows(prompts, settled, inner + 1)
      now_uniforms = jax.lax.dynamic_slice_in_dim(
          uniforms, index * self._uniforms_a_round, self._uniforms_a_round, axis=1)
      proposal = fill_prompt(self.drafter.propose(
          inner_state, sequences, at, now_forced[:, :inner], now_uniforms[:, : -inner - 1], is_open,
      ), now_forced[:, :inner])
      # The model reads the token before last as well: one may be new to it, as in `ModelDrafter`.
      start = jnp.maximum(at - 1, self.first_positions)
      drafted = write_rows(sequences, proposal.tokens, at + 1)
      logits, model_state = self.tokens_to_logits(
          read_rows(drafted, start, inner + 2), start, model_state)
      places = (at - start)[:, None] + jnp.arange(inner + 1)
      logits = jnp.take_along_axis(logits, places[..., None], axis=1)
      verdict = judge(
          logits, proposal, now_forced, now_uniforms[:, -inner - 1 :], self.rule, self.verify)
      if q is not None:
        q = write_rows(q, verdict.law, settled)
      settled = jnp.minimum(settled + jnp.where(is_open, verdict.accepted + 1, 0), gamma)
      return (index + 1, settled, write_rows(sequences, verdict.tokens, at + 1), q,
              (model_state, proposal.state))

    q = None
    if not self.rule.is_greedy:
      vocab_size = jax.eval_shape(
          self.tokens_to_logits, sequences[:, :1], positions, state[0])[0].shape[-1]
      q = jnp.zeros((batch, gamma + inner + 1, vocab_size))
    start = (jnp.int32(0), jnp.zeros(batch, jnp.int32), widen(sequences), q, state)
    _, _, sequences, q, state = jax.lax.while_loop(cond, body, start)
    tokens = read_rows(sequences, positions + 1, gamma)
    return Proposal(tokens, None if q is None else q[:, :gamma], state)
