"""T5X's decoding callbacks, at every drafted and every verified place.

A callback wants to know the sequence so far. A decode step knows its new tokens only, so the step
keeps what it was given beside the model's cache, addressed by position like the cache: a place is
overwritten when the loop comes back to it.

`B` is the number of rows, `M` the tokens of a call, `L` the length of the decoded sequences, `V`
the vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from t5x import decoding as t5x_decoding

from speculative_t5x import sampling
from speculative_t5x.rows import write_rows
from speculative_t5x.step import TokensToLogits


def with_callbacks(
    tokens_to_logits: TokensToLogits, cache: Any, prompts: jax.Array, initial_index: jax.Array, *,
    num_slots: int, decode_rng: jax.Array,
    state_callback_fn: t5x_decoding.StateCallbackFn | None,
    logit_callback_fn: t5x_decoding.LogitCallbackFn | None,
) -> tuple[TokensToLogits, Any]:
  """Wraps a decode step so that the callbacks act on its logits.

  Each sees T5X's `SamplingLoopState` as it would stand before the place is decoded one token at a
  time: `cur_index` `[B]`, `sequences` `[B, L + 2]`, `cur_token` `[B, 1]`, the model's cache, and
  `step` `[B]` where T5X has a scalar, for rows differ. It is called for drafts that are refused
  later as well. Of what a `state_callback_fn` returns, the next token it has put into `sequences`
  takes effect: that token is then certain.

  Args:
    tokens_to_logits: a model's decode step.
    cache: its cache, of `B` rows.
    prompts: int32 `[B, L]`, shifted right.
    initial_index: int32 `[B]`, where decoding starts.
    num_slots: places that are written.
    decode_rng: the key that the state shows.
    state_callback_fn: see T5X's `temperature_sample`.
    logit_callback_fn: see T5X's `temperature_sample`.

  Returns:
    The step, and the cache it starts from.
  """
  length = prompts.shape[1] + 2
  padded = jnp.pad(prompts, ((0, 0), (0, 2)))
  seen = jnp.pad(prompts, ((0, 0), (0, num_slots + 1 - prompts.shape[1])))

  def step(tokens, positions, carried):
    model_cache, seen = carried
    logits, model_cache = tokens_to_logits(tokens, positions, model_cache)
    seen = write_rows(seen, tokens, positions)
    changed = []
    for place in range(tokens.shape[1]):
      # Places that a late write alone reaches are shown as the last one.
      index = jnp.minimum(positions + place, prompts.shape[1])
      is_past = jnp.arange(length) <= index[:, None]
      state = t5x_decoding.SamplingLoopState(
          step=index - initial_index, cur_index=index,
          sequences=jnp.where(is_past, _cut(seen, length), padded), cache=model_cache,
          cur_token=tokens[:, place : place + 1],
          ended=jnp.zeros((tokens.shape[0], 1), bool), rng=decode_rng,
          log_prob=jnp.zeros(tokens.shape[0]),
      )
      changed.append(
          _call(logits[:, place], state, padded, state_callback_fn, logit_callback_fn))
    return jnp.stack(changed, axis=1), (model_cache, seen)

  return step, (cache, seen)


def _call(logits, state, prompts, state_callback_fn, logit_callback_fn):
  """Logits `[B, V]` of one place after the callbacks."""
  if state_callback_fn is not None:
    state = state_callback_fn(state)
  if logit_callback_fn is not None:
    logits = logit_callback_fn(logits, state)
  if state_callback_fn is not None:
    following = jnp.minimum(state.cur_index + 1, prompts.shape[1] - 1)[:, None]
    token = jnp.take_along_axis(state.sequences, following, axis=1)
    # Prompt tokens are forced by the loop itself, and do not count as decoded.
    is_set = (token != 0) & (jnp.take_along_axis(prompts, following, axis=1) == 0)
    only = jnp.where(jax.nn.one_hot(token[:, 0], logits.shape[-1]) > 0, 0.0, sampling.NEG_INF)
    logits = jnp.where(is_set, only, logits)
  return logits


def _cut(rows: jax.Array, length: int) -> jax.Array:
  """`rows` `[B, T]` cut or padded with 0 to `[B, length]`."""
  return jnp.pad(rows, ((0, 0), (0, max(0, length - rows.shape[1]))))[:, :length]
