"""Which drafts are accepted, and what follows them: one round of Algorithm 1 as pure functions.

`B` is the number of rows, `V` the vocabulary. Randomness comes in as uniforms in [0, 1), each used
once, so that the rules can be enumerated.
"""

import jax
import jax.numpy as jnp

from speculative_t5x import sampling


def token_wise(
    draft_tokens: jax.Array, q: jax.Array, p: jax.Array, accept_uniforms: jax.Array,
    next_uniforms: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Accepts drafts one by one (Leviathan et al. 2023, Algorithm 1).

  Args:
    draft_tokens: int32 `[B, gamma]`, drawn from `q`.
    q: float32 `[B, gamma, V]`, the law each draft was drawn from.
    p: float32 `[B, gamma + 1, V]`, the target's law at each draft and after the last.
    accept_uniforms: float32 `[B, gamma]`.
    next_uniforms: float32 `[B]`.

  Returns:
    accepted: int32 `[B]`, the number of leading drafts accepted.
    next_tokens: int32 `[B]`, the target's token after them.
  """
  q_drafted = _at(q, draft_tokens)
  p_drafted = _at(p[:, :-1], draft_tokens)
  # Strict: a token with p = 0 is refused at r = 0 too.
  accepted = leading_count(accept_uniforms * q_drafted < p_drafted)
  p_next, q_next = at_position(p, accepted), at_position(pad_q(q), accepted)
  next_tokens = sampling.sample(residual(p_next, q_next), next_uniforms)
  return accepted, next_tokens


def greedy(draft_tokens: jax.Array, target_tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
  """`token_wise` for one-hot p and q, given by their tokens.

  Args:
    draft_tokens: int32 `[B, gamma]`.
    target_tokens: int32 `[B, gamma + 1]`, the target's argmax at each draft and after the last.

  Returns:
    accepted int32 `[B]` and next_tokens int32 `[B]`, as `token_wise`.
  """
  accepted = leading_count(draft_tokens == target_tokens[:, :-1])
  return accepted, at_position(target_tokens, accepted)


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
  """max(0, p - q), unnormalised; p itself where that has no mass (p = q up to rounding).

  Args:
    p: float32 `[B, V]`.
    q: float32 `[B, V]`; zeros where no draft was judged.

  Returns:
    float32 `[B, V]`.
  """
  difference = jnp.maximum(p - q, 0.0)
  return jnp.where(jnp.sum(difference, -1, keepdims=True) > 0, difference, p)


def leading_count(flags: jax.Array) -> jax.Array:
  """How many of the flags `[B, gamma]` are true before the first false; int32 `[B]`."""
  return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def pad_q(q: jax.Array) -> jax.Array:
  """`q` `[B, gamma, V]` with a zero distribution after the last draft: `[B, gamma + 1, V]`."""
  return jnp.pad(q, ((0, 0), (0, 1), (0, 0)))


def at_position(values: jax.Array, index: jax.Array) -> jax.Array:
  """Picks `values[b, index[b]]` of `[B, M, ...]`; `index` is int32 `[B]`."""
  index = index.reshape(index.shape + (1,) * (values.ndim - 1))
  return jnp.take_along_axis(values, index, axis=1)[:, 0]


def _at(probabilities: jax.Array, tokens: jax.Array) -> jax.Array:
  """Probability of each of `tokens` `[B, M]` under `[B, M, V]`."""
  return jnp.take_along_axis(probabilities, tokens[..., None], axis=-1)[..., 0]
