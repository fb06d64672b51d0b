"""Several tokens a call through T5X's own modules, as they are.

T5X's attention decodes one token a call, at one position for the whole batch, and adds to its
cache. Here a call of its module is intercepted (`flax.linen.intercept_methods`): attention runs its
ordinary code on `M` queries, and what its `key` and `value` projections return is the cache with
those of the new tokens written over the slots they belong to. Parameters and cached variables keep
their names and layouts; scan, remat and partitioning work as before.

`B` is the number of rows, `M` the tokens of a call, `T` the slots of the cache, `H` heads, `K` the
size of a head, `E` the embedding's.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax import linen as nn

from speculative_t5x.errors import UserError
from speculative_t5x.rows import write_rows

# What T5X's modules keep in the collection `cache`.
SELF_ATTENTION = {'cached_key', 'cached_value', 'cache_index', 'cached_bias'}
# Keys and values of the encoder's output, added to it: they are the same in every step.
CROSS_ATTENTION = {'key': 'cross_key', 'value': 'cross_value'}


@dataclasses.dataclass
class Interceptor:
  """Makes attention decode `M` tokens of every row; give it to `nn.intercept_methods`.

  Attributes:
    positions: int32 `[B]`, where the first token of the call stands in its row.
    fills_cross_attention: whether cross-attention computes its keys and values and caches them, or
      reads what it cached.
    handled: paths of the self-attention modules that were run.
  """

  positions: jax.Array
  fills_cross_attention: bool = False
  handled: set[tuple[str, ...]] = dataclasses.field(default_factory=set)

  def __call__(self, next_fun: Callable[..., Any], args, kwargs, context) -> Any:
    """Runs one method of one module."""
    module = context.module
    if context.method_name != '__call__':
      return next_fun(*args, **kwargs)
    parent = module.parent
    if isinstance(parent, nn.Module) and module.name in CROSS_ATTENTION and _is_attention(parent):
      return self._project(parent, module.name, lambda: next_fun(*args, **kwargs))
    if _is_attention(module) and module.has_variable('cache', 'cached_key'):
      return self._self_attention(module, next_fun, args, kwargs)
    return next_fun(*args, **kwargs)

  def _self_attention(self, module, next_fun, args, kwargs):
    """T5X's attention outside its decode mode, under a mask and a bias by position."""
    call = inspect.signature(type(module).__call__).bind(module, *args, **kwargs)
    call.apply_defaults()
    arguments = call.arguments
    length = arguments['inputs_q'].shape[-2]
    # [B, M] and [B, 1, M, T]
    queries = self.positions[:, None] + jnp.arange(length, dtype=jnp.int32)
    slots = module.get_variable('cache', 'cached_key').shape[-1]
    visible = jnp.arange(slots) <= queries[:, None, :, None]
    if arguments['mask'] is not None:
      raise UserError(
          f'module {"/".join(module.path)}: expected no mask while decoding, found one of shape '
          f'{arguments["mask"].shape}'
      )
    arguments.update(mask=visible.astype(jnp.int32), decode=False)
    if arguments['bias'] is not None:
      # [1, H, T, T] to [B, H, M, T]
      bias = jnp.take(arguments['bias'][0], queries, axis=1)
      arguments['bias'] = jnp.moveaxis(bias, 0, 1)
    self.handled.add(module.path)
    return next_fun(*call.args[1:], **call.kwargs)

  def _project(self, attention, name, project):
    """What an attention's `key` or `value` projection returns: `[B, T or S, H, K]`."""
    if attention.has_variable('cache', 'cached_key'):
      return self._write(attention, f'cached_{name}', project())
    variable = CROSS_ATTENTION[name]
    if not self.fills_cross_attention:
      return attention.get_variable('cache', variable)
    projected = project()
    attention.put_variable('cache', variable, projected)
    return projected

  def _write(self, attention, variable, new):
    """Overwrites slots of a cached variable `[B, H, K, T]` by `new` `[B, M, H, K]`."""
    # Compact modules are run again by some transformations; the cache must be read afresh.
    cached = attention.get_variable('cache', variable)
    new = jnp.moveaxis(new, -3, -1).astype(cached.dtype)
    cached = write_rows(cached, new, self.positions, axis=-1)
    attention.put_variable('cache', variable, cached)
    return jnp.moveaxis(cached, -1, -3)


def _is_attention(module: nn.Module) -> bool:
  """Whether a module is called as T5X's `MultiHeadDotProductAttention` is."""
  return {'inputs_q', 'inputs_kv', 'mask', 'bias'} <= {
      *inspect.signature(type(module).__call__).parameters
  }


def apply(
    module: nn.Module, params: Any, cache: Any, positions: jax.Array, *args: Any,
    fills_cross_attention: bool = False, **kwargs: Any,
) -> tuple[jax.Array, Any]:
  """`module.apply` in decode mode, on several tokens at each row's own position.

  Args:
    module: one of T5X's networks.
    params: its parameters.
    cache: its collection `cache`, `T` slots long.
    positions: int32 `[B]`.
    *args: of the module's method.
    fills_cross_attention: see `Interceptor`.
    **kwargs: of the module's method, and `method`.

  Returns:
    float32 logits `[B, M, V]` and the cache.

  Raises:
    UserError: the module decodes in a way that is not understood here.
  """
  interceptor = Interceptor(positions, fills_cross_attention)
  with nn.intercept_methods(interceptor):
    logits, variables = module.apply(
        {'params': params, 'cache': cache}, *args, enable_dropout=False, decode=True,
        mutable=['cache'], **kwargs,
    )
  _check_handled(module, cache, interceptor.handled)
  return logits, variables['cache']


def unknown_module(module: nn.Module, found: str) -> UserError:
  """The error for a module that decodes in a way that is not understood here.

  Args:
    module: the module.
    found: what it has in place of what is needed.

  Returns:
    The error, to be raised.
  """
  return UserError(
      f'module {type(module).__module__}.{type(module).__name__}: expected attention called with '
      "(inputs_q, inputs_kv, mask, bias) whose projections are named 'key' and 'value' and whose "
      "cache is 'cached_key' and 'cached_value'; or methods init_cache and decode_step as of "
      f'speculative_t5x.network.Transformer; found {found}'
  )


def _check_handled(module: nn.Module, cache: Any, handled: set[tuple[str, ...]]) -> None:
  """Refuses a module whose state was not all run by the interceptor."""
  paths = {tuple(path) for path in flax.traverse_util.flatten_dict(flax.core.unfreeze(cache))}
  for path in sorted(paths):
    known = path[-1] in {*SELF_ATTENTION, *CROSS_ATTENTION.values()}
    if not known or (path[-1] == 'cached_key' and path[:-1] not in handled):
      raise unknown_module(module, '/'.join(path))
  if not handled:
    raise unknown_module(module, 'no such attention')
