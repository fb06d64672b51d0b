"""The decode step that models offer to the loop, and tokens that a prompt forces on it."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp


class TokensToLogits(Protocol):
  """One call of a model on `M` tokens of every row."""

  def __call__(
      self, tokens: jax.Array, positions: jax.Array, cache: Any
  ) -> tuple[jax.Array, Any]:
    """Runs the model.

    Args:
      tokens: int32 `[B, M]`.
      positions: int32 `[B]`, where `tokens[:, 0]` stands in its row. Keys and values overwrite
        slots `positions … positions + M - 1`; what lies beyond is masked.
      cache: the model's cache.

    Returns:
      float32 logits `[B, M, V]` of the token after each, and the cache.
    """
    ...


def run_leading(
    tokens_to_logits: TokensToLogits, tokens: jax.Array, count: jax.Array, positions: jax.Array,
    cache: Any,
) -> tuple[jax.Array, Any]:
  """Runs a model on no more of `tokens` than `count` calls for.

  The step is compiled for one token and for every quarter of them, and the narrowest that will do
  is run.

  Args:
    tokens_to_logits: the model's decode step.
    tokens: int32 `[B, M]`.
    count: int32 scalar in 1 … M, leading tokens that are needed.
    positions: int32 `[B]`.
    cache: the model's cache.

  Returns:
    float32 logits `[B, M, V]`, 0 behind what was run, and the cache.
  """
  length = tokens.shape[1]
  widths = sorted({1, *(-(-length * quarter // 4) for quarter in range(1, 5))})
  chosen = jnp.searchsorted(jnp.asarray(widths), count)
  out = jax.eval_shape(tokens_to_logits, tokens, positions, cache)[0]
  logits = jnp.zeros(out.shape, out.dtype)
  for index, width in enumerate(widths):
    # A loop of one turn or none: the branches of a conditional would copy the cache.
    def run(carry, width=width):
      _, _, cache = carry
      logits, cache = tokens_to_logits(tokens[:, :width], positions, cache)
      return jnp.int32(-1), jnp.pad(logits, ((0, 0), (0, length - width), (0, 0))), cache

    chosen, logits, cache = jax.lax.while_loop(
        lambda carry, index=index: carry[0] == index, run, (chosen, logits, cache))
  return logits, cache


def force_tokens(tokens: jax.Array, forced: jax.Array) -> jax.Array:
  """`forced` where it is not 0, otherwise `tokens`; both int32 of one shape."""
  return jnp.where(forced != 0, forced, tokens)


def force_distribution(probabilities: jax.Array, forced: jax.Array) -> jax.Array:
  """All mass on the forced token where there is one.

  Args:
    probabilities: float32 `[..., V]`.
    forced: int32 `[...]`, 0 where nothing is forced. An id beyond `V`, which a prompt may hold
      though it can never be decoded, counts as the last one.

  Returns:
    float32 `[..., V]`.
  """
  vocab_size = probabilities.shape[-1]
  one_hot = jax.nn.one_hot(
      jnp.minimum(forced, vocab_size - 1), vocab_size, dtype=probabilities.dtype)
  return jnp.where((forced != 0)[..., None], one_hot, probabilities)
