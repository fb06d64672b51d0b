"""Speculative beam search with the interface of T5X's decode functions.

`B` is the batch, `N` the decodes an example, `R` the rows that a call needs for each example.
"""

from typing import Any

import jax
import jax.numpy as jnp

from speculative_t5x import beams, decoding
from speculative_t5x.beam_tree import BeamModel, rows_of_calls
from speculative_t5x.errors import UserError
from speculative_t5x.sampling import NEG_INF
from speculative_t5x.step import TokensToLogits
from speculative_t5x.t5x_integration.adapters import WITHOUT_BATCH, DecodingModel
from speculative_t5x.t5x_integration.drafts import Draft


def speculative_beam_search(
    inputs: jax.Array,
    cache: Any,
    tokens_to_logits: TokensToLogits,
    eos_id: int,
    num_decodes: int = 4,
    decode_rng: jax.Array | None = None,
    cache_offset: int = 0,
    *,
    draft: Draft | None = None,
    gamma: int = 0,
    draft_width: int | None = None,
    target_rows: int | None = None,
    alpha: float | None = 0.6,
    max_decode_len: int | None = None,
    max_decode_step: int = -1,
    min_log_prob: float = NEG_INF,
    initial_index: jax.Array | None = None,
) -> decoding.DecodeResult:
  """Searches a batch; the arguments of T5X's `beam_search` have their meaning there.

  Args:
    inputs: int32 `[B, L]`, prompts shifted right.
    cache: the target's cache, `speculative_t5x.decoding.cache_slots(L, gamma)` long.
    tokens_to_logits: the target's decode step on `[B * N]` rows: several tokens a call, see
      `speculative_t5x.step.TokensToLogits`. One call scores `R` rows an example.
    eos_id: the id that ends a hypothesis.
    num_decodes: `N`, the width of the beam.
    decode_rng: not used.
    cache_offset: the axis of the batch in `cache`.
    draft: what drafts, a model alone; needed unless `gamma` is 0.
    gamma: drafted steps a round.
    draft_width: of the draft's beam; None is twice `num_decodes`.
    target_rows: `R`, see `speculative_t5x.beam_tree.rows_of_calls`.
    alpha: of the brevity penalty; None is T5X's default, .6.
    max_decode_len: tokens of the outputs; None is `L`.
    max_decode_step: steps at most, if above 0.
    min_log_prob: the search ends once no live beam has a higher log-probability.
    initial_index: int32 `[B]`, where decoding starts when the caches are prefilled.

  Returns:
    A `DecodeResult`; its `sequences` and `scores` are what `beam_search` returns for each example,
    see `speculative_t5x.beams.speculative_beam_search`.

  Raises:
    UserError: a value is out of range, or what drafts is no model.
  """
  del decode_rng
  num_rows = rows_of_calls(num_decodes, gamma, draft_width, target_rows)
  batch = inputs.shape[0]
  ready = lambda model, rows: grouped(model, batch, num_decodes, rows)
  draft_model = None
  if gamma and draft is not None:
    if draft.config.name != 'model':
      raise UserError(
          f"drafter: expected 'model' for a beam search, found {draft.config.name!r}")
    if draft.config.min_confidence:
      raise UserError('min_confidence: expected 0 for a beam search, found '
                      f'{draft.config.min_confidence}')
    draft_model = ready(draft.model, num_rows.draft)
  target = ready(DecodingModel(tokens_to_logits, cache, cache_offset), num_rows.target)
  return beams.speculative_beam_search(
      inputs, target, eos_id, gamma=gamma, draft=draft_model, draft_width=draft_width,
      target_rows=target_rows, num_decodes=num_decodes,
      alpha=0.6 if alpha is None else alpha, max_decode_len=max_decode_len,
      max_decode_step=max_decode_step, min_log_prob=min_log_prob, initial_index=initial_index)


def grouped(model: DecodingModel, batch: int, num_decodes: int, num_rows: int) -> BeamModel:
  """A model of `B * N` rows as one of `B * R`, which run in groups side by side.

  Row `r` of an example is row `r % N` of it in group `r // N`. What the groups have in common is
  kept once: variables without a batch, and keys and values of the encoder's outputs.

  Args:
    model: the model.
    batch: `B`.
    num_decodes: `N`.
    num_rows: `R`.

  Returns:
    The model, whose cache has the groups as leading axis.
  """
  num_groups = -(-num_rows // num_decodes)
  axis = model.cache_offset

  def to_groups(rows):
    """`[B * R, ...]` as `[G, B * N, ...]`; rows that fill the last group are 0."""
    rows = rows.reshape(batch, num_rows, *rows.shape[1:])
    extra = num_groups * num_decodes - num_rows
    rows = jnp.pad(rows, ((0, 0), (0, extra), *[(0, 0)] * (rows.ndim - 2)))
    rows = rows.reshape(batch, num_groups, num_decodes, *rows.shape[2:])
    return jnp.moveaxis(rows, 1, 0).reshape(num_groups, batch * num_decodes, *rows.shape[3:])

  def from_groups(rows):
    """`[G, B * N, ...]` as `[B * R, ...]`."""
    rows = jnp.moveaxis(rows.reshape(num_groups, batch, num_decodes, *rows.shape[2:]), 0, 1)
    rows = rows.reshape(batch, num_groups * num_decodes, *rows.shape[3:])[:, :num_rows]
    return rows.reshape(batch * num_rows, *rows.shape[2:])

  first = model.expanded_cache(num_decodes)
  axes = [None if is_common(path) else 0 for path, _ in jax.tree_util.tree_leaves_with_path(first)]
  structure = jax.tree.structure(first)

  def step(tokens, positions, leaves):
    logits, cache = model.tokens_to_logits(
        tokens, positions, jax.tree.unflatten(structure, leaves))
    return logits, jax.tree.leaves(cache)

  run = jax.vmap(step, in_axes=(0, 0, axes), out_axes=(0, axes))

  def tokens_to_logits(tokens, positions, leaves):
    logits, leaves = run(to_groups(tokens), to_groups(positions), leaves)
    return from_groups(logits), leaves

  def gather_rows(leaves, rows):
    # Rows that fill the last group stay those of their own example.
    example = jnp.arange(batch * num_decodes) // num_decodes
    row = to_groups(rows % num_rows)
    group, place = row // num_decodes, example * num_decodes + row % num_decodes

    def gather(leaf, leaf_axis):
      if leaf_axis is None:
        return leaf
      rows = jnp.moveaxis(leaf, axis + 1, 1)[group, place]
      return jnp.moveaxis(rows, 1, axis + 1)

    return [gather(*pair) for pair in zip(leaves, axes, strict=True)]

  leaves = [
      leaf if leaf_axis is None else jnp.broadcast_to(leaf, (num_groups, *leaf.shape))
      for leaf, leaf_axis in zip(jax.tree.leaves(first), axes, strict=True)
  ]
  return BeamModel(tokens_to_logits, leaves, gather_rows)


def is_common(path: tuple[Any, ...]) -> bool:
  """Whether a cached variable is the same for all decodes of an example, or has no batch."""
  names = [str(getattr(key, 'key', getattr(key, 'name', ''))) for key in path]
  return names[-1] in WITHOUT_BATCH or any(name.startswith('cross_') for name in names)
