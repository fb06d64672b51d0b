"""Widens a trained T5 without changing what it computes: real text and acceptance at any size.

New units meet zeros or write zeros: new places of the residual stream are never written, new heads,
head dimensions, feed-forward units and layers write back through zero rows. Everything else that is
new is random, so that the network costs what one of its size does. Norms divide by the mean square
over a longer stream, which their scales make up for.

`E`, `H`, `K`, `F` are the widths of the residual stream, the heads, one head and the feed-forward
block; with a prime those of the wide network.
"""

import math
from collections.abc import Mapping
from typing import Any

import flax
import jax
import jax.numpy as jnp

from speculative_t5x.errors import UserError
from speculative_t5x.network import T5Config

# Of random weights: as small as trained ones, and far from overflow in bfloat16.
STANDARD_DEVIATION = 0.02


def widen(
    params: Mapping[str, Any], config: T5Config, wide: T5Config, key: jax.Array,
    dtype: Any = jnp.float32,
) -> dict[str, Any]:
  """Makes the parameters of a larger network that computes the same logits.

  Args:
    params: of a network of `config`.
    config: its sizes.
    wide: sizes none of which is smaller; activations are the same, and logits may be untied.
    key: of the random weights.
    dtype: of the result.

  Returns:
    The parameter tree of `wide`. In float32 the logits of the ids that `config` knows are within
    1e-4 of the original's.

  Raises:
    UserError: a size is smaller, or the activations differ.
  """
  _check(config, wide)
  flat = flax.traverse_util.flatten_dict(flax.core.unfreeze(params))
  found = {}
  for side, layers in (('encoder', wide.num_encoder_layers), ('decoder', wide.num_decoder_layers)):
    for path in (path for path in flat if path[0] == side and path[1] != 'logits_dense'):
      if path[1].startswith('layers_'):
        # Layers behind the trained ones have the first one's shapes, and write nothing.
        if path[1] != 'layers_0':
          continue
        for layer in range(layers):
          own = (side, f'layers_{layer}', *path[2:])
          found[own] = _leaf(own, flat.get(own), flat[path].shape, config, wide, key)
      else:
        found[path] = _leaf(path, flat[path], flat[path].shape, config, wide, key)
  embedding = flat['token_embedder', 'embedding']
  found['token_embedder', 'embedding'] = _pad(embedding, (wide.vocab_size, wide.emb_dim))
  if not wide.logits_via_embedding:
    kernel = embedding.T * config.emb_dim**-0.5
    if not config.logits_via_embedding:
      kernel = flat['decoder', 'logits_dense', 'kernel']
    kernel = _pad(kernel, (config.emb_dim, wide.vocab_size))
    found['decoder', 'logits_dense', 'kernel'] = _extend(
        kernel, (wide.emb_dim, wide.vocab_size), _key(key, ('logits_dense',)))
  return flax.traverse_util.unflatten_dict({
      path: leaf.astype(dtype) for path, leaf in found.items()})


def _check(config, wide):
  for name in ('vocab_size', 'emb_dim', 'num_heads', 'head_dim', 'mlp_dim', 'num_encoder_layers',
               'num_decoder_layers'):
    if getattr(wide, name) < getattr(config, name):
      raise UserError(f'{name}: expected at least {getattr(config, name)}, found '
                      f'{getattr(wide, name)}')
  if wide.mlp_activations != config.mlp_activations:
    raise UserError(f'mlp_activations: expected {config.mlp_activations}, found '
                    f'{wide.mlp_activations}')
  if wide.logits_via_embedding and not config.logits_via_embedding:
    raise UserError('logits_via_embedding: expected False as in the original, found True')


def _leaf(path, leaf, shape, config, wide, key):
  """One parameter of the wide network; `leaf` is None in a layer that is new."""
  key = _key(key, path)
  if path[-1] == 'rel_embedding':
    return _pad(leaf, (wide.num_heads, leaf.shape[1]))
  if path[-1] == 'scale':
    return _norm(path, leaf, config, wide)
  is_new = leaf is None
  if is_new:
    leaf = jnp.zeros(shape)
  module = path[-2]
  if module in ('wi', 'wi_0', 'wi_1'):
    return _extend(leaf, (wide.emb_dim, wide.mlp_dim), key, all_random=is_new)
  if module == 'wo':
    return _pad(leaf, (wide.mlp_dim, wide.emb_dim))
  heads = (config.num_heads, config.head_dim)
  wide_heads = (wide.num_heads, wide.head_dim)
  if module == 'out':
    leaf = _pad(leaf.reshape(*heads, -1), (*wide_heads, wide.emb_dim))
    return leaf.reshape(-1, wide.emb_dim)
  # Projections to heads: [E, H, K].
  leaf = leaf.reshape(-1, *heads)
  if module == 'key' and not is_new:
    # Old heads keep their products: what a longer query has more meets zeros.
    leaf = _pad(leaf, (config.emb_dim, config.num_heads, wide.head_dim))
  leaf = _extend(leaf, (wide.emb_dim, *wide_heads), key, all_random=is_new)
  if module == 'key' and not is_new:
    leaf = leaf.at[:, : config.num_heads, config.head_dim :].set(0)
  return leaf.reshape(wide.emb_dim, -1)


def _norm(path, leaf, config, wide):
  """A norm's scale [E']: the mean square is taken over more places, of which the new are 0."""
  scale = jnp.ones(config.emb_dim) if leaf is None else leaf
  factor = math.sqrt(config.emb_dim / wide.emb_dim)
  if path[1] == 'decoder_norm' and wide.logits_via_embedding:
    # Tied logits are scaled by E ** -.5 behind it.
    factor = 1.0
  return jnp.concatenate([scale * factor, jnp.ones(wide.emb_dim - config.emb_dim)])


def _key(key, path):
  """A key of a parameter's own."""
  number = 0
  for letter in '/'.join(path):
    number = (number * 1000003 + ord(letter)) % 2**31
  return jax.random.fold_in(key, number)


def _pad(leaf, shape):
  """`leaf` with zeros behind it, to `shape`."""
  return jnp.pad(leaf, [(0, new - old) for old, new in zip(leaf.shape, shape, strict=True)])


def _extend(leaf, shape, key, all_random=False):
  """`leaf` with random numbers behind it, to `shape`; nothing but those if `all_random`."""
  noise = jax.random.normal(key, shape) * STANDARD_DEVIATION
  if all_random:
    return noise
  return noise.at[tuple(slice(size) for size in leaf.shape)].set(leaf)
