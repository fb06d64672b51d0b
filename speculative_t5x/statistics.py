"""What is recorded of every round: counts a row, and the whole course on request.

`B` is the number of rows, `L` the longest decoded length.
"""

from typing import NamedTuple

import flax
import jax
import jax.numpy as jnp

from speculative_t5x import verification


class Outcome(NamedTuple):
  """One round of every row.

  Attributes:
    draft_tokens: int32 `[B, gamma]`.
    lengths: int32 `[B]`, how many of them are drafts; None when all are.
    next_tokens: int32 `[B]`, the target's token behind the accepted drafts.
    accepted: int32 `[B]`, drafts accepted by the verification.
    kept: int32 `[B]`, tokens that were written: cut at EOS and at the longest length.
    is_new: bool `[B, gamma + 1]`, written tokens that no prompt forced.
    is_forced: bool `[B, gamma + 1]`, places that a prompt forced.
    could_grow: bool `[B, gamma + 1]`, places within the longest length.
  """

  draft_tokens: jax.Array
  lengths: jax.Array | None
  next_tokens: jax.Array
  accepted: jax.Array
  kept: jax.Array
  is_new: jax.Array
  is_forced: jax.Array
  could_grow: jax.Array

  @property
  def active(self) -> jax.Array:
    """Bool `[B]`: whether the round emitted something."""
    return jnp.any(self.is_new, axis=1)

  @property
  def was_drafted(self) -> jax.Array:
    """Bool `[B, gamma]`: drafts that could have been emitted."""
    drafted = (self.could_grow & ~self.is_forced)[:, :-1] & self.active[:, None]
    if self.lengths is None:
      return drafted
    return drafted & (jnp.arange(drafted.shape[1]) < self.lengths[:, None])


@flax.struct.dataclass
class Statistics:
  """What happened in each row. Prompt tokens count nowhere. All int32, rows leading.

  Attributes:
    rounds: `[B]`, target runs that emitted something.
    drafted: `[B]`, draft tokens proposed at places where the row could still grow.
    accepted: `[B]`, drafts that were accepted and emitted.
    rejected: `[B]`, rounds in which a draft was judged and refused. The acceptance rate is
      accepted / (accepted + rejected): drafts behind the first refused one were never judged.
    emitted: `[B]`, tokens of the output, EOS included.
    accepted_at_position: `[B, gamma]`, rounds in which the draft at each place was accepted.
  """

  rounds: jax.Array
  drafted: jax.Array
  accepted: jax.Array
  rejected: jax.Array
  emitted: jax.Array
  accepted_at_position: jax.Array

  @classmethod
  def zeros(cls, rows: int, gamma: int) -> 'Statistics':
    """Of `rows` rows, nothing counted yet."""
    zeros = jnp.zeros(rows, jnp.int32)
    return cls(zeros, zeros, zeros, zeros, zeros, jnp.zeros((rows, gamma), jnp.int32))

  def add(self, outcome: Outcome) -> 'Statistics':
    """Counts one round."""
    gamma = outcome.draft_tokens.shape[1]
    was_accepted = (
        outcome.was_drafted & outcome.is_new[:, :gamma]
        & (jnp.arange(gamma) < outcome.accepted[:, None])
    )
    drafts = gamma if outcome.lengths is None else outcome.lengths
    was_rejected = (
        outcome.active & (outcome.accepted < drafts) & (outcome.kept == outcome.accepted + 1)
        & ~verification.at_position(outcome.is_forced, outcome.accepted)
    )
    count = lambda flags: jnp.sum(flags, axis=1, dtype=jnp.int32)
    return Statistics(
        rounds=self.rounds + outcome.active,
        drafted=self.drafted + count(outcome.was_drafted),
        accepted=self.accepted + count(was_accepted),
        rejected=self.rejected + was_rejected,
        emitted=self.emitted + count(outcome.is_new),
        accepted_at_position=self.accepted_at_position + was_accepted,
    )


@flax.struct.dataclass
class Trace:
  """Every round of every row; int32, -1 where there is nothing.

  Attributes:
    draft_tokens: `[B, L, gamma]`, the drafts of each round.
    accepted: `[B, L]`, how many of them were accepted and emitted; -1 is no such round.
    next_token: `[B, L]`, the target's token behind them; -1 where the text ended before it.
  """

  draft_tokens: jax.Array
  accepted: jax.Array
  next_token: jax.Array

  @classmethod
  def empty(cls, rows: int, max_decode_len: int, gamma: int) -> 'Trace':
    """Of `rows` rows, with room for a round a token."""
    nothing = lambda *shape: jnp.full((rows, max_decode_len, *shape), -1, jnp.int32)
    return cls(nothing(gamma), nothing(), nothing())

  def add(self, outcome: Outcome, round_index: jax.Array) -> 'Trace':
    """Records round number `round_index` (int32 scalar)."""
    set_round = lambda old, new, is_real: old.at[:, round_index].set(jnp.where(is_real, new, -1))
    accepted, active = outcome.accepted, outcome.active
    return Trace(
        draft_tokens=set_round(self.draft_tokens, outcome.draft_tokens, outcome.was_drafted),
        accepted=set_round(self.accepted, jnp.minimum(outcome.kept, accepted), active),
        next_token=set_round(
            self.next_token, outcome.next_tokens, active & (outcome.kept == accepted + 1)
        ),
    )
