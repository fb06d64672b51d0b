"""Layers of T5, with the parameter names, shapes and logical axes of T5X's minimal network.

`B` is the batch, `M` the query length, `S` the key length, `H` the heads, `K` the width of a head,
`E` the width of the residual stream.
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import partitioning as nn_partitioning

param_with_axes = nn_partitioning.param_with_axes
with_sharding_constraint = nn_partitioning.with_sharding_constraint

# The additive mask of T5X: finite, so that a row with nothing to attend to stays finite.
MASKED = -1e10


class Dense(nn.Module):
  """A linear map without bias, whose kernel is stored as one matrix.

  Attributes:
    features: shape of the output axes that replace the contracted ones.
    num_contracted: how many trailing axes of the input are contracted.
    kernel_axes: logical axis names of the kernel's two axes.
    kernel_init: initializer of the kernel `[prod(contracted), prod(features)]`.
    dtype: dtype of the product.
  """

  features: Sequence[int]
  kernel_axes: tuple[str, str]
  num_contracted: int = 1
  kernel_init: Any = nn.initializers.variance_scaling(1.0, 'fan_in', 'truncated_normal')
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Maps `inputs` `[..., contracted]` to `[..., features]`."""
    kept = inputs.shape[: inputs.ndim - self.num_contracted]
    fan_in = math.prod(inputs.shape[inputs.ndim - self.num_contracted :])
    kernel = param_with_axes(
        'kernel', self.kernel_init, (fan_in, math.prod(self.features)), jnp.float32,
        axes=self.kernel_axes,
    )
    # Tokens of all rows as one axis: the layout that the outputs are wanted in would otherwise be
    # asked of the product, which a TPU then takes a row at a time.
    outputs = jnp.dot(
        inputs.reshape(-1, fan_in).astype(self.dtype), kernel.astype(self.dtype)
    )
    return outputs.reshape(*kept, *self.features)


class LayerNorm(nn.Module):
  """T5's layer norm: a scale by the root mean square, no mean and no bias."""

  epsilon: float = 1e-6
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Normalises `inputs` `[..., E]` in float32 and returns them in `dtype`."""
    inputs = inputs.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(inputs), axis=-1, keepdims=True)
    normed = (inputs * jax.lax.rsqrt(mean_square + self.epsilon)).astype(self.dtype)
    scale = param_with_axes(
        'scale', nn.initializers.ones, (inputs.shape[-1],), jnp.float32, axes=('embed',)
    )
    return normed * scale.astype(self.dtype)


class Embed(nn.Module):
  """The token embedding, which also serves as the output projection when logits are tied."""

  num_embeddings: int
  features: int
  dtype: Any = jnp.float32

  def setup(self):
    self.embedding = param_with_axes(
        'embedding', nn.initializers.normal(stddev=1.0),
        (self.num_embeddings, self.features), jnp.float32, axes=('vocab', 'embed'),
    )

  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Looks up `tokens` `[B, M]` int32; returns `[B, M, E]` in `dtype`."""
    return jnp.asarray(self.embedding)[tokens].astype(self.dtype)

  def attend(self, x: jax.Array) -> jax.Array:
    """Multiplies `x` `[..., E]` by the embedding's transpose; returns float32 `[..., V]`."""
    return float32_dot(x, self.embedding.T)


class LogitsDense(nn.Module):
  """The output projection of an untied T5; its parameter is named as in T5X."""

  num_embeddings: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps `x` `[..., E]` to float32 logits `[..., V]`."""
    kernel = param_with_axes(
        'kernel', nn.initializers.variance_scaling(1.0, 'fan_in', 'truncated_normal'),
        (x.shape[-1], self.num_embeddings), jnp.float32, axes=('embed', 'vocab'),
    )
    return float32_dot(x, kernel)


def float32_dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """`x @ kernel` accumulated and returned in float32, without widening two bfloat16 operands."""
  dtype = jnp.promote_types(x.dtype, kernel.dtype)
  return jnp.dot(x.astype(dtype), kernel.astype(dtype), preferred_element_type=jnp.float32)


def relative_position_bucket(
    relative_position: jax.Array, *, bidirectional: bool, num_buckets: int = 32,
    max_distance: int = 128,
) -> jax.Array:
  """T5's bucket of a distance (Raffel et al. 2020, section 2.1).

  Args:
    relative_position: int32, key position minus query position, any shape.
    bidirectional: whether keys after the query have buckets of their own.
    num_buckets: how many there are.
    max_distance: distances from here on share the last bucket.

  Returns:
    int32 of the same shape, in `[0, num_buckets)`.
  """
  distance = -relative_position
  offset = 0
  if bidirectional:
    num_buckets //= 2
    offset = (distance < 0).astype(jnp.int32) * num_buckets
    distance = jnp.abs(distance)
  else:
    distance = jnp.maximum(distance, 0)
  max_exact = num_buckets // 2
  # The epsilon keeps log(0) finite; those entries are not selected.
  logarithmic = max_exact + (
      jnp.log(distance.astype(jnp.float32) / max_exact + jnp.finfo(jnp.float32).eps)
      / math.log(max_distance / max_exact)
      * (num_buckets - max_exact)
  ).astype(jnp.int32)
  logarithmic = jnp.minimum(logarithmic, num_buckets - 1)
  return offset + jnp.where(distance < max_exact, distance, logarithmic)


class RelativePositionBiases(nn.Module):
  """The bias that T5 adds to attention logits, by head and bucketed distance."""

  num_heads: int
  bidirectional: bool
  num_buckets: int = 32
  max_distance: int = 128

  @nn.compact
  def __call__(self, query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
    """Returns the float32 bias `[B, H, M, S]` of positions `[B, M]` and `[B, S]` int32."""
    embedding = param_with_axes(
        'rel_embedding', nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform'),
        (self.num_heads, self.num_buckets), jnp.float32, axes=('heads', 'relpos_buckets'),
    )
    bucket = relative_position_bucket(
        key_positions[:, None, :] - query_positions[:, :, None], bidirectional=self.bidirectional,
        num_buckets=self.num_buckets, max_distance=self.max_distance,
    )
    # [H, B, M, S] -> [B, H, M, S]
    return jnp.moveaxis(jnp.asarray(embedding, jnp.float32)[:, bucket], 0, 1)


class Attention(nn.Module):
  """Multi-head dot-product attention over keys and values that the caller holds.

  T5 does not scale by `K ** -0.5`; the query's initializer carries the factor.
  """

  num_heads: int
  head_dim: int
  emb_dim: int
  dropout_rate: float = 0.0
  dtype: Any = jnp.float32

  def setup(self):
    init = nn.initializers.variance_scaling(1.0, 'fan_in', 'normal')
    project = functools.partial(
        Dense, features=(self.num_heads, self.head_dim), kernel_axes=('embed', 'joined_kv'),
        dtype=self.dtype,
    )
    self.query = project(kernel_init=lambda *args: init(*args) / math.sqrt(self.head_dim))
    self.key = project(kernel_init=init)
    self.value = project(kernel_init=init)
    self.out = Dense(
        features=(self.emb_dim,), num_contracted=2, kernel_axes=('joined_kv', 'embed'),
        kernel_init=init, dtype=self.dtype,
    )
    self.dropout = nn.Dropout(rate=self.dropout_rate, broadcast_dims=(-2,))

  def keys_values(self, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Projects `inputs` `[B, S, E]` to keys and values, each `[B, H, S, K]`."""
    to_heads = lambda x: with_sharding_constraint(
        jnp.swapaxes(x, 1, 2), ('batch', 'heads', 'length', 'kv')
    )
    return to_heads(self.key(inputs)), to_heads(self.value(inputs))

  def __call__(
      self, inputs: jax.Array, keys: jax.Array, values: jax.Array, bias: jax.Array,
      *, deterministic: bool = True,
  ) -> jax.Array:
    """Attends from `inputs` to `keys`.

    Args:
      inputs: `[B, M, E]`.
      keys: `[B, H, S, K]`.
      values: `[B, H, S, K]`.
      bias: float32, broadcastable to `[B, H, M, S]`; holds the mask and the relative bias.
      deterministic: False applies dropout to the attention weights.

    Returns:
      `[B, M, E]` in `dtype`.
    """
    query = self.query(inputs)
    query = with_sharding_constraint(query, ('batch', 'length', 'heads', 'kv'))
    logits = jnp.einsum('bmhk,bhsk->bhms', query, keys, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(logits + bias).astype(self.dtype)
    weights = self.dropout(weights, deterministic=deterministic)
    # Heads before queries, or XLA's CPU backend transposes all values at every step.
    attended = jnp.einsum('bhms,bhsk->bhmk', weights, values)
    return self.out(jnp.swapaxes(attended, 1, 2))


class MlpBlock(nn.Module):
  """T5's feed-forward block: one activation (1.0) or a product of two branches (1.1)."""

  mlp_dim: int
  activations: Sequence[str]
  dropout_rate: float = 0.0
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, inputs: jax.Array, *, deterministic: bool = True) -> jax.Array:
    """Maps `[B, M, E]` to `[B, M, E]`."""
    branches = []
    for index, activation in enumerate(self.activations):
      name = 'wi' if len(self.activations) == 1 else f'wi_{index}'
      x = Dense((self.mlp_dim,), ('embed', 'mlp'), dtype=self.dtype, name=name)(inputs)
      branches.append(x if activation == 'linear' else getattr(nn, activation)(x))
    x = functools.reduce(operator.mul, branches)
    x = nn.Dropout(rate=self.dropout_rate, broadcast_dims=(-2,))(x, deterministic=deterministic)
    x = with_sharding_constraint(x, ('batch', 'length', 'mlp'))
    return Dense((inputs.shape[-1],), ('mlp', 'embed'), dtype=self.dtype, name='wo')(x)
