"""What a drafter is."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from speculative_t5x import sampling
from speculative_t5x.errors import UserError
from speculative_t5x.step import force_distribution, force_tokens

# The drafters that can be named in gin: a smaller model, copying from the context, an n-gram table.
DRAFTERS = ('model', 'copying', 'ngram')


def check_drafter(name: str) -> None:
  """Refuses a name that is not one of `DRAFTERS`.

  Raises:
    UserError: it is not.
  """
  if name not in DRAFTERS:
    raise UserError(f'drafter: expected one of {", ".join(DRAFTERS)}, found {name}')


class Proposal(NamedTuple):
  """Drafts of one round.

  Attributes:
    tokens: int32 `[B, gamma]`.
    probabilities: float32 `[B, gamma, V]`, the law that each token was drawn from; None when the
      sampling rule is greedy, where the token says it all.
    state: the drafter's state after drafting. Rolling back needs no call: what a drafter keeps is
      addressed by position, and later drafts overwrite it.
  """

  tokens: jax.Array
  probabilities: jax.Array | None
  state: Any


class Drafter(Protocol):
  """Guesses the next gamma tokens of every row."""

  def propose(
      self, state: Any, sequences: jax.Array, positions: jax.Array, forced: jax.Array,
      uniforms: jax.Array,
  ) -> Proposal:
    """Drafts one round.

    Args:
      state: from the caller at first, then from the last proposal; a pytree whose arrays have the
        rows as leading axis.
      sequences: int32 `[B, T]`, all tokens so far; index 0 holds the start token.
      positions: int32 `[B]`, index of the last token that is known in each row.
      forced: int32 `[B, gamma]`, prompt tokens at the drafted places, 0 where there is none. A
        forced token is proposed with probability 1.
      uniforms: float32 `[B, gamma]` in [0, 1), one for each draft.

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
