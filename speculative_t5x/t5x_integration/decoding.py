"""Speculative decoding with the interface of T5X's decode functions."""

import jax
import jax.numpy as jnp
from t5x import decoding as t5x_decoding

from speculative_t5x import decoding
from speculative_t5x.errors import UserError
from speculative_t5x.sampling import SamplingRule, check_static
from speculative_t5x.step import TokensToLogits
from speculative_t5x.t5x_integration.adapters import expand_cache
from speculative_t5x.t5x_integration.callbacks import with_callbacks
from speculative_t5x.t5x_integration.drafts import Draft
from speculative_t5x.verification import VerificationRule


def speculative_decode(
    inputs: jax.Array,
    cache: object,
    tokens_to_logits: TokensToLogits,
    eos_id: int,
    num_decodes: int = 1,
    decode_rng: jax.Array | None = None,
    cache_offset: int = 0,
    *,
    draft: Draft | None = None,
    gamma: int = 0,
    temperature: float | jax.Array = 1.0,
    topk: int = 0,
    topp: float = 0.0,
    draft_temperature: float | None = None,
    draft_topk: int | None = None,
    draft_topp: float | None = None,
    verification: str | None = None,
    lenience: float = 1.0,
    initial_index: jax.Array | None = None,
    max_decode_steps: int | None = None,
    max_decode_steps_hard_limit: int | None = None,
    rescale_log_probs: bool = True,
    state_callback_fn: t5x_decoding.StateCallbackFn | None = None,
    logit_callback_fn: t5x_decoding.LogitCallbackFn | None = None,
) -> decoding.DecodeResult:
  """Decodes a batch; the arguments of T5X's `temperature_sample` have their meaning there.

  `topk` is 0 by default: `temperature_sample` takes 1, which is greedy.

  Args:
    inputs: int32 `[batch, L]`, prompts shifted right.
    cache: the target's cache, `speculative_t5x.decoding.cache_slots(L, gamma)` long.
    tokens_to_logits: the target's decode step, on `[batch * num_decodes]` rows: several tokens a
      call, see `speculative_t5x.step.TokensToLogits`.
    eos_id: the id that ends a row.
    num_decodes: independent outputs an example.
    decode_rng: a key; `PRNGKey(0)` when None.
    cache_offset: the axis of the batch in `cache`.
    draft: what guesses; needed unless `gamma` is 0.
    gamma: drafts a round.
    temperature: 0 is greedy. A float, or a float array `[batch]`.
    topk: keep the k largest logits; 0 keeps all.
    topp: keep the smallest set of tokens with at least this mass; 0 keeps all.
    draft_temperature: of the drafts, a float; None is `temperature`. The law of what is emitted is
      the target's whatever it is.
    draft_topk: likewise; None is `topk`.
    draft_topp: likewise; None is `topp`.
    verification: 'block', 'token_wise', or None for the better one.
    lenience: in (0, 1]; below 1 is lossy, see `VerificationRule`.
    initial_index: int32 `[batch]`, where decoding starts when the caches are prefilled.
    max_decode_steps: tokens behind the prompt at most.
    max_decode_steps_hard_limit: caps `max_decode_steps` when both are given.
    rescale_log_probs: whether scores are of the adjusted distribution; greedy scores are then 0.
    state_callback_fn: see `callbacks.with_callbacks`.
    logit_callback_fn: likewise.

  Returns:
    A `DecodeResult`; its `sequences` and `scores` are what `temperature_sample` returns.

  Raises:
    UserError: a value is out of range.
  """
  if gamma and draft is None:
    raise UserError(f'draft: expected one for gamma {gamma}, found None')
  check_static(max_decode_steps=max_decode_steps)
  if max_decode_steps is not None and max_decode_steps_hard_limit:
    max_decode_steps = min(max_decode_steps, max_decode_steps_hard_limit)
  rule = SamplingRule(temperature, topk, topp)
  if decode_rng is None:
    decode_rng = jax.random.PRNGKey(0)
  rows = lambda tree: decoding.expand_rows(tree, num_decodes)
  prompts = rows(inputs)
  first = jnp.zeros(prompts.shape[0], jnp.int32) if initial_index is None else rows(initial_index)

  def ready(tokens_to_logits, cache):
    if state_callback_fn is None and logit_callback_fn is None:
      return tokens_to_logits, cache
    return with_callbacks(
        tokens_to_logits, cache, prompts, first, decode_rng=decode_rng,
        num_slots=decoding.cache_slots(inputs.shape[1], gamma),
        state_callback_fn=state_callback_fn, logit_callback_fn=logit_callback_fn)

  drafter, draft_state = None, None
  if gamma:
    draft_rule = rule
    if jnp.ndim(temperature):
      draft_rule = rule.override(temperature=rows(jnp.asarray(temperature)))
    draft_rule = draft_rule.override(draft_temperature, draft_topk, draft_topp)
    drafter, draft_state = draft.start(draft_rule, first, num_decodes, ready)
  step, cache = ready(tokens_to_logits, expand_cache(cache, num_decodes, cache_offset))
  return decoding.speculative_decode(
      inputs, cache, step, eos_id, gamma=gamma, drafter=drafter, draft_state=draft_state,
      rule=rule, verify=VerificationRule(verification, lenience), num_decodes=num_decodes,
      decode_rng=decode_rng, initial_index=initial_index, max_decode_steps=max_decode_steps,
      rescale_log_probs=rescale_log_probs)
