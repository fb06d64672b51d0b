"""How far a draft's distributions are from a target's, token by token.

`B` is the batch, `M` the tokens of a text, `V` the vocabulary. p is the target's distribution, q
the draft's, both the softmax of logits. DistillSpec (Zhou et al. 2023, arXiv 2310.08461) compares
these divergences; the total variation is one minus the acceptance rate at a prefix.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def forward_kl(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
  """KL(p ‖ q) at each token.

  Args:
    target_logits: float32 `[..., V]`; -inf is a token of probability 0.
    draft_logits: float32 `[..., V]`, likewise.

  Returns:
    float32 `[...]`, in nats; infinite where q is 0 and p is not.
  """
  return _kl(target_logits, draft_logits)


def reverse_kl(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
  """KL(q ‖ p) at each token; see `forward_kl`."""
  return _kl(draft_logits, target_logits)


def total_variation(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
  """Half the sum of |p − q| at each token, which is 1 − Σ min(p, q); see `forward_kl`."""
  difference = jax.nn.softmax(target_logits) - jax.nn.softmax(draft_logits)
  return 0.5 * jnp.sum(jnp.abs(difference), axis=-1)


DIVERGENCES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    'forward_kl': forward_kl, 'reverse_kl': reverse_kl, 'total_variation': total_variation,
}


def _kl(from_logits: jax.Array, to_logits: jax.Array) -> jax.Array:
  from_log, to_log = jax.nn.log_softmax(from_logits), jax.nn.log_softmax(to_logits)
  # 0 log 0 is 0. The inner choice keeps -inf out of the gradient, where it would become NaN.
  is_zero = jnp.isneginf(from_log)
  difference = jnp.where(is_zero, 0.0, from_log) - jnp.where(is_zero, 0.0, to_log)
  return jnp.sum(jnp.exp(from_log) * difference, axis=-1)


def mean_divergence(
    name: str, target_logits: jax.Array, draft_logits: jax.Array, mask: jax.Array, *,
    vocab_size: int, temperature: float = 1.0,
) -> jax.Array:
  """The mean of a divergence over the tokens that count.

  The target gets no gradient. Nothing of the vocabulary's size is kept for the gradient but the
  logits themselves: distributions are computed anew on the way back.

  Args:
    name: one of `DIVERGENCES`.
    target_logits: float32 `[B, M, V_p]`.
    draft_logits: float32 `[B, M, V_q]`.
    mask: bool `[B, M]`, True where a token counts. Logits elsewhere may be anything.
    vocab_size: logits from here on belong to rows that pad an embedding; they get no probability.
    temperature: both logits are divided by it.

  Returns:
    float32 scalar; 0 when no token counts.
  """
  divergence = DIVERGENCES[name]

  @jax.checkpoint
  def total(target_logits, draft_logits):
    # Also keeps NaN out of the gradient: 0 times NaN is NaN.
    cut = lambda x: jnp.where(mask[..., None], x[..., :vocab_size] / temperature, 0.0)
    return jnp.sum(jnp.where(mask, divergence(cut(target_logits), cut(draft_logits)), 0.0))

  counted = jnp.maximum(jnp.sum(mask), 1)
  return total(jax.lax.stop_gradient(target_logits), draft_logits) / counted
