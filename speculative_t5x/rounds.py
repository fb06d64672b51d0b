"""One round: what was drafted, and what the target makes of it under any sampling rule.

`B` is the number of rows, `V` the vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from speculative_t5x import sampling, verification
from speculative_t5x.step import force_distribution, force_tokens


class Proposal(NamedTuple):
  """Drafts of one round.

  Attributes:
    tokens: int32 `[B, gamma]`; prompt tokens where there are some.
    probabilities: float32 `[B, gamma, V]`, the law that each token was drawn from; None when every
      draft was certain (a greedy rule, a copy), where the token says it all.
    state: the drafter's state after drafting. Rolling back needs no call: what a drafter keeps is
      addressed by position, and later drafts overwrite it.
    lengths: int32 `[B]`, how many drafts each row has; None when all have gamma. Whether a place
      holds a draft may depend on the tokens before it, never on its own: the law would not be the
      target's.
  """

  tokens: jax.Array
  probabilities: jax.Array | None
  state: Any
  lengths: jax.Array | None = None


class Verdict(NamedTuple):
  """A round judged.

  Attributes:
    accepted: int32 `[B]`, leading drafts accepted.
    next_tokens: int32 `[B]`, the target's token behind them.
    tokens: int32 `[B, gamma + 1]`, the accepted drafts, then the target's token.
    law: float32 `[B, gamma + 1, V]`, the target's at each place; None when it is greedy.
  """

  accepted: jax.Array
  next_tokens: jax.Array
  tokens: jax.Array
  law: jax.Array | None


def fill_prompt(proposal: Proposal, forced: jax.Array) -> Proposal:
  """Drafts the prompt's next tokens also where a drafter has stopped before them.

  Args:
    proposal: the drafts.
    forced: int32 `[B, gamma]`, prompt tokens at these places, 0 where there is none.

  Returns:
    The proposal; unchanged when every row has gamma drafts.
  """
  if proposal.lengths is None:
    return proposal
  q = proposal.probabilities
  return Proposal(
      force_tokens(proposal.tokens, forced), None if q is None else force_distribution(q, forced),
      proposal.state,
      jnp.maximum(proposal.lengths, verification.leading_count(forced != 0)))


def judge(
    logits: jax.Array, proposal: Proposal, forced: jax.Array, uniforms: jax.Array,
    rule: sampling.SamplingRule, verify: verification.VerificationRule,
) -> Verdict:
  """Judges one round (paper, Algorithm 1).

  Args:
    logits: float32 `[B, gamma + 1, V]`, the target's at each draft and behind the last.
    proposal: the drafts.
    forced: int32 `[B, gamma + 1]`, prompt tokens at these places, 0 where there is none.
    uniforms: float32 `[B, gamma + 1]` in [0, 1).
    rule: the target's sampling rule.
    verify: how drafts are judged.

  Returns:
    The verdict.
  """
  draft_tokens, q = proposal.tokens, proposal.probabilities
  gamma, vocab_size = draft_tokens.shape[1], logits.shape[-1]
  places = jnp.arange(gamma + 1)
  is_drafted = None
  if proposal.lengths is not None:
    is_drafted = places[:gamma] < proposal.lengths[:, None]
  if rule.is_greedy:
    law, is_lenient = None, None
    if verify.lenience < 1.0:
      is_lenient = (forced[:, :gamma] == 0) & verification.near_argmax(
          logits[:, :gamma], draft_tokens, verify.lenience)
    target_tokens = force_tokens(jnp.argmax(logits, -1).astype(jnp.int32), forced)
    accepted, next_tokens = verification.greedy(
        draft_tokens, target_tokens, is_lenient, is_drafted)
  else:
    law = force_distribution(rule.distribution(logits), forced)
    # A prompt's id beyond V counts as the last one in every law.
    drawn = jnp.minimum(draft_tokens, vocab_size - 1)
    if q is None:
      q = jax.nn.one_hot(drawn, vocab_size, dtype=jnp.float32)
    if is_drafted is not None:
      q = jnp.where(is_drafted[..., None], q, 0.0)
    accepted, next_law = verify.sampled(drawn, q, law, uniforms[:, :gamma])
    next_tokens = sampling.sample(next_law, uniforms[:, -1])
  tokens = jnp.where(
      places < accepted[:, None], jnp.pad(draft_tokens, ((0, 0), (0, 1))), next_tokens[:, None])
  return Verdict(accepted, next_tokens, force_tokens(tokens, forced), law)
