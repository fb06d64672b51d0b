"""From logits to the distribution that is sampled, and from a distribution to a token.

Temperature, top-k, nucleus and argmax all become plain sampling from an adjusted distribution
(the paper's "standardised sampling", section 2.2). Target and draft go through the same object, so
q is exactly the law that the draft's tokens were drawn from.

`V` is the vocabulary; leading axes are free.
"""

import dataclasses

import jax
import jax.numpy as jnp

from speculative_t5x.errors import UserError

# At or below this temperature decoding is greedy, as in T5X.
MIN_TEMPERATURE = 1e-4

# Logits are lowered to this where a token is excluded, as in T5X: exp of it is exactly 0.
NEG_INF = -1.0e7


@dataclasses.dataclass(frozen=True)
class SamplingRule:
  """How the next token is drawn, with the meaning of T5X's `temperature_sample`.

  Attributes:
    temperature: 0 is greedy, whatever `topk` and `topp` say. A float, or a float array `[B]` with
      one temperature a row.
    topk: keep the k largest logits (more on ties); 0 keeps all.
    topp: keep the smallest set of tokens with at least this mass; 0 keeps all.

  Raises:
    UserError: a value is out of range, `topk` and `topp` are both set, or one of them is traced.
  """

  temperature: float | jax.Array = 0.0
  topk: int = 0
  topp: float = 0.0

  def __post_init__(self):
    check_static(topk=self.topk, topp=self.topp)
    if isinstance(self.temperature, (int, float)) and not self.temperature >= 0:
      raise UserError(f'temperature: expected at least 0, found {self.temperature}')
    if self.topk < 0:
      raise UserError(f'topk: expected at least 0, found {self.topk}')
    if not 0.0 <= self.topp <= 1.0:
      raise UserError(f'topp: expected a number in [0, 1], found {self.topp}')
    if self.topk and self.topp:
      raise UserError(
          f'topk and topp: expected at most one to be non-zero, found topk={self.topk} and '
          f'topp={self.topp}'
      )

  def override(
      self, temperature: float | None = None, topk: int | None = None, topp: float | None = None
  ) -> 'SamplingRule':
    """This rule with what is not None in place of its own values."""
    given = {'temperature': temperature, 'topk': topk, 'topp': topp}
    given = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(self, **given)

  @property
  def is_greedy(self) -> bool:
    """True when it is known before compilation that every row is greedy."""
    return isinstance(self.temperature, (int, float)) and self.temperature <= MIN_TEMPERATURE

  def adjusted_logits(self, logits: jax.Array) -> jax.Array:
    """Logits whose softmax is sampled at a temperature above `MIN_TEMPERATURE`.

    Args:
      logits: float32 `[B, ..., V]`.

    Returns:
      float32 `[B, ..., V]`; `NEG_INF` where a token is excluded.
    """
    temperature = self._temperature(logits.ndim)
    scaled = logits / jnp.maximum(temperature, MIN_TEMPERATURE)
    if self.topk:
      k = min(self.topk, logits.shape[-1])
      threshold = jax.lax.top_k(scaled, k)[0][..., -1:]
      scaled = jnp.where(scaled >= threshold, scaled, NEG_INF)
    if self.topp:
      probabilities = jax.nn.softmax(scaled)
      descending = -jnp.sort(-probabilities)
      smaller_sets = jnp.sum(jnp.cumsum(descending, -1) < self.topp, axis=-1, keepdims=True)
      last_kept = jnp.minimum(smaller_sets, logits.shape[-1] - 1)
      threshold = jnp.take_along_axis(descending, last_kept, axis=-1)
      scaled = jnp.where(probabilities >= threshold, scaled, NEG_INF)
    return scaled

  def distribution(self, logits: jax.Array) -> jax.Array:
    """The adjusted distribution: one-hot in greedy rows.

    Args:
      logits: float32 `[B, ..., V]`.

    Returns:
      float32 probabilities `[B, ..., V]`.
    """
    def one_hot():
      return jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1], dtype=jnp.float32)

    if self.is_greedy:
      return one_hot()
    sampled = jax.nn.softmax(self.adjusted_logits(logits))
    if isinstance(self.temperature, (int, float)):
      return sampled
    return jnp.where(self._temperature(logits.ndim) > MIN_TEMPERATURE, sampled, one_hot())

  def _temperature(self, ndim: int) -> jax.Array:
    """The temperature, shaped to broadcast against `[B, ..., V]` of rank `ndim`."""
    temperature = jnp.asarray(self.temperature, jnp.float32)
    return temperature.reshape(temperature.shape + (1,) * (ndim - temperature.ndim))


def check_static(**values: object) -> None:
  """Refuses values that become known only when a compiled program runs.

  Args:
    **values: each by its name.

  Raises:
    UserError: a value is a tracer.
  """
  for name, value in values.items():
    if isinstance(value, jax.core.Tracer):
      raise UserError(
          f'{name}: expected a number that is known before compilation, found a traced '
          f'{value.aval.str_short()}'
      )


def sample(probabilities: jax.Array, uniforms: jax.Array) -> jax.Array:
  """Draws one token a row by inverting the cumulative distribution.

  A token of probability 0 is never drawn: its cumulative value does not exceed its predecessor's.

  Args:
    probabilities: float32 `[..., V]`, not necessarily normalised, with a positive sum.
    uniforms: float32 `[...]` in [0, 1).

  Returns:
    int32 tokens `[...]`.
  """
  cumulative = jnp.cumsum(probabilities, axis=-1)
  threshold = uniforms[..., None] * cumulative[..., -1:]
  drawn = jnp.sum(cumulative <= threshold, axis=-1).astype(jnp.int32)
  # u * total may round up to the total; the last token with mass is then meant.
  has_mass = probabilities > 0
  last = probabilities.shape[-1] - 1 - jnp.argmax(has_mass[..., ::-1], axis=-1)
  return jnp.minimum(drawn, last).astype(jnp.int32)
