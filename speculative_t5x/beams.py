"""Speculative beam search as one compiled loop, one round an iteration.

A round drafts a tree: from the target's live beams the draft runs a beam of its own, `U` wide, for
`gamma` steps. One call of the target scores the nodes of the tree. The steps of T5X's `beam_search`
are then taken with the target's own log-probabilities for as long as all live beams are nodes of
the tree, and one step behind that (Leviathan et al. 2023, appendix A.4). What is found does not
depend on the draft.

`B` is the number of examples, `W` num_decodes, `U` the draft's width, `R` the rows of a target call
an example, `L` the longest decoded length, `V` the vocabulary.
"""

from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp

from speculative_t5x.beam_rules import Beams, Search, pick
from speculative_t5x.beam_tree import BeamModel, Tree, draft_tree, flat_rows, rows_of_calls
from speculative_t5x.decoding import DecodeResult
from speculative_t5x.errors import UserError
from speculative_t5x.rows import read_rows
from speculative_t5x.sampling import NEG_INF, check_static
from speculative_t5x.statistics import Outcome, Statistics


class Replay(NamedTuple):
  """The steps of one round.

  Attributes:
    beams: the search behind them.
    homes: int32 `[B, W]`, the row of the target call that each live beam continues.
    accepted: int32 `[B]`, steps whose live beams all were nodes.
    goes_on: bool `[B]`.
  """

  beams: Beams
  homes: jax.Array
  accepted: jax.Array
  goes_on: jax.Array


def replay(
    search: Search, beams: Beams, tree: Tree, logits: jax.Array, forced: jax.Array,
    goes_on: jax.Array,
) -> Replay:
  """Takes the target's steps for as long as its live beams are nodes, and one step behind that.

  Args:
    search: the rules.
    beams: the search, the live beams being layer 0 of `tree`.
    tree: what was drafted.
    logits: float32 `[B, R, gamma + 1, V]`, the target's at each token of `tree.row_tokens`.
    forced: int32 `[B, gamma + 1]`, the prompt's tokens, 0 where there is none.
    goes_on: bool `[B]`, searches that have not ended.

  Returns:
    The steps.
  """
  batch, width = beams.live_log_probs.shape
  examples = jnp.arange(batch)[:, None]

  def step(carry):
    layer, is_stepping, nodes, done = carry
    rows = jnp.minimum(pick(tree.rows[:, layer], nodes), logits.shape[1] - 1)
    beams, parents, tokens = search.advance(
        done.beams, logits[examples, rows, layer], forced[:, layer])
    nodes, is_node = tree.find(layer + 1, pick(nodes, parents), tokens)
    is_accepted = are_nodes(is_node)
    keep = lambda new, old: jnp.where(
        is_stepping.reshape(-1, *[1] * (new.ndim - 1)), new, old)
    beams = jax.tree.map(keep, beams, done.beams)
    goes_on = keep(search.goes_on(beams), done.goes_on)
    done = Replay(
        beams, keep(pick(rows, parents), done.homes),
        done.accepted + (is_stepping & is_accepted), goes_on)
    return layer + 1, is_stepping & is_accepted & goes_on, nodes, done

  none = jnp.zeros((batch, width), jnp.int32)
  nodes = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
  done = Replay(beams, none, jnp.zeros(batch, jnp.int32), goes_on)
  # No node is found in the layer behind the last, where this ends by itself.
  return jax.lax.while_loop(
      lambda carry: jnp.any(carry[1]), step, (jnp.int32(0), goes_on, nodes, done))[-1]


def are_nodes(is_node: jax.Array) -> jax.Array:
  """Bool `[B]`: whether a step is accepted, given which live beams `[B, W]` are nodes."""
  return jnp.all(is_node, axis=1)


@flax.struct.dataclass
class LoopState:
  """The loop's state.

  Attributes:
    beams: the search.
    goes_on: bool `[B]`.
    homes: int32 `[B, W]`, the row of the target's cache that each live beam continues.
    origins: int32 `[B, W]`, likewise of the draft's cache, up to where the last round began.
    cache: the target's cache.
    draft_cache: the draft's cache.
    statistics: see `Statistics`; a token of it is a step here.
  """

  beams: Beams
  goes_on: jax.Array
  homes: jax.Array
  origins: jax.Array
  cache: Any
  draft_cache: Any
  statistics: Statistics


def speculative_beam_search(
    inputs: jax.Array,
    target: BeamModel,
    eos_id: int,
    *,
    gamma: int,
    draft: BeamModel | None = None,
    draft_width: int | None = None,
    target_rows: int | None = None,
    num_decodes: int = 4,
    alpha: float | jax.Array = 0.6,
    max_decode_len: int | None = None,
    max_decode_step: int = -1,
    min_log_prob: float | jax.Array = NEG_INF,
    initial_index: jax.Array | None = None,
) -> DecodeResult:
  """Searches a batch; see T5X's `beam_search`, whose names and meanings these are.

  What is found is what T5X finds for each example alone. In a batch T5X goes on with an example
  until all have ended, which can only exchange hypotheses of equal scores, unless `min_log_prob` is
  set or `initial_index` differs between examples.

  Args:
    inputs: int32 `[B, L]`, prompts shifted right: index 0 is the start token and ignored, other
      entries that are not 0 are kept in the output, 0 is decoded.
    target: the target; its cache has `R` rows an example, see `rows_of_calls`, and
      `decoding.cache_slots(L, gamma)` slots.
    eos_id: the id that ends a hypothesis.
    gamma: drafted steps a round; static.
    draft: the draft model, whose cache has `U` rows an example; not needed when `gamma` is 0.
    draft_width: `U`, see `rows_of_calls`; static, as the next two are.
    target_rows: `R`, likewise.
    num_decodes: `W`, the width of the target's beam.
    alpha: of the brevity penalty.
    max_decode_len: tokens of the outputs; None is `L`.
    max_decode_step: steps at most, if above 0.
    min_log_prob: the search ends once no live beam has a higher log-probability.
    initial_index: int32 `[B]`, index in `inputs` of the token to start from in each example, the
      caches being filled before it; None starts from the start token.

  Returns:
    A `DecodeResult` of `[B, W]` hypotheses with T5X's scores, the best one last. In its statistics,
    which are the same for all hypotheses of an example, a step of the search is one token.

  Raises:
    UserError: a number is out of range, the draft is missing, or the vocabularies differ in size.
  """
  num_rows = rows_of_calls(num_decodes, gamma, draft_width, target_rows)
  if gamma and draft is None:
    raise UserError(f'draft: expected one for gamma {gamma}, found None')
  inputs = jnp.asarray(inputs, jnp.int32)
  batch, length = inputs.shape
  check_static(max_decode_len=max_decode_len, max_decode_step=max_decode_step)
  if max_decode_len is None:
    max_decode_len = length
  if not 0 < max_decode_len <= length:
    raise UserError(
        f'max_decode_len: expected 1 to {length} (the length), found {max_decode_len}')
  _check_vocabularies(target, draft if gamma else None, batch, num_rows, num_decodes)

  first, prompts = jnp.zeros(batch, jnp.int32), inputs.at[:, 0].set(0)
  if initial_index is not None:
    first = jnp.asarray(initial_index, jnp.int32)
    prompts = jnp.zeros_like(inputs)
  # T5X reads the last place again behind it.
  prompts = jnp.pad(prompts, ((0, 0), (0, gamma + 2)), mode='edge')
  limits = max_decode_len - first
  if max_decode_step > 0:
    limits = jnp.minimum(limits, max_decode_step)
  search = Search(eos_id, alpha, max_decode_len, limits, first, min_log_prob)
  places = jnp.arange(gamma + 1)

  def body(state: LoopState) -> LoopState:
    beams, draft_cache = state.beams, state.draft_cache
    forced = read_rows(prompts, beams.steps + 1, gamma + 1)
    tree = Tree.plant(beams, gamma, num_rows)
    if gamma:
      tree, draft_cache = draft_tree(
          draft, draft_cache, tree, beams, state.origins, first, forced[:, :gamma], eos_id)

    cache = target.gather_rows(
        state.cache, flat_rows(pick(state.homes, tree.row_roots), num_rows.target))
    logits, cache = target.tokens_to_logits(
        tree.row_tokens.reshape(-1, gamma + 1),
        jnp.repeat(first + beams.steps, num_rows.target), cache)
    logits = logits.reshape(batch, num_rows.target, gamma + 1, -1).astype(jnp.float32)
    done = replay(search, beams, tree, logits, forced, state.goes_on)

    kept = done.beams.steps - beams.steps
    outcome = Outcome(
        draft_tokens=jnp.zeros((batch, gamma), jnp.int32), lengths=None,
        next_tokens=jnp.zeros(batch, jnp.int32), accepted=done.accepted, kept=kept,
        is_new=(places < kept[:, None]) & (forced == 0), is_forced=forced != 0,
        could_grow=beams.steps[:, None] + 1 + places <= limits[:, None],
    )
    return LoopState(
        beams=done.beams, goes_on=done.goes_on, homes=done.homes,
        origins=pick(tree.row_roots, done.homes), cache=cache, draft_cache=draft_cache,
        statistics=state.statistics.add(outcome),
    )

  beams = Beams.start(
      jnp.take_along_axis(inputs, first[:, None], axis=1)[:, 0] * (first > 0), num_decodes,
      max_decode_len + gamma + 2)
  nowhere = jnp.zeros((batch, num_decodes), jnp.int32)
  final = jax.lax.while_loop(lambda state: jnp.any(state.goes_on), body, LoopState(
      beams=beams, goes_on=search.goes_on(beams), homes=nowhere, origins=nowhere,
      cache=target.cache, draft_cache=draft.cache if gamma else None,
      statistics=Statistics.zeros(batch, gamma),
  ))

  has_found = jnp.any(final.beams.finished_flags, axis=1)
  sequences = jnp.where(has_found[:, None, None], final.beams.finished, final.beams.live)
  scores = jnp.where(has_found[:, None], final.beams.finished_scores, final.beams.live_log_probs)
  # Behind the prompt that the caches were filled with.
  index = jnp.arange(max_decode_len) - first[:, None]
  found = jnp.take_along_axis(sequences, jnp.maximum(index, -1)[:, None] + 1, axis=2)
  before = jnp.pad(inputs, ((0, 0), (0, 1)))[:, 1 : max_decode_len + 1]
  return DecodeResult(
      sequences=jnp.where((index < 0)[:, None], before[:, None], found), scores=scores,
      statistics=jax.tree.map(
          lambda x: jnp.repeat(x[:, None], num_decodes, axis=1), final.statistics),
  )


def _check_vocabularies(target, draft, batch, num_rows, num_decodes):
  """Refuses vocabularies that differ in size, or are too small for the beam."""
  def size(model, rows):
    tokens = jnp.zeros((batch * rows, 1), jnp.int32)
    return jax.eval_shape(
        model.tokens_to_logits, tokens, tokens[:, 0], model.cache)[0].shape[-1]

  vocab_size = size(target, num_rows.target)
  if vocab_size < 2:
    raise UserError(f'vocabulary: expected at least 2 tokens, found {vocab_size}')
  if num_decodes > vocab_size:
    raise UserError(
        f'num_decodes: expected at most {vocab_size} (the vocabulary), found {num_decodes}')
  if draft is not None and (found := size(draft, num_rows.draft)) != vocab_size:
    raise UserError(f"draft vocabulary: expected the target's {vocab_size} tokens, found {found}")
