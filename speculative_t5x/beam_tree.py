"""The tree that a round of speculative beam search drafts, and the rows it is scored in.

From the target's live beams, layer 0, the draft runs a beam of its own for gamma steps; layer `i`
holds its nodes behind `i` of them. The target scores the nodes in one call: a row runs a path from
a live beam down the tree, so that a node needs a row of its own only where its parent has a better
child.

`B` is the number of examples, `W` num_decodes, `U` the draft's width, `R` the rows of a target call
an example, `V` the vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp

from speculative_t5x.beam_rules import Beams, pick
from speculative_t5x.decoding import check_gamma
from speculative_t5x.errors import UserError
from speculative_t5x.sampling import check_static
from speculative_t5x.step import TokensToLogits, force_tokens
from speculative_t5x.verification import at_position

# The score of what is no hypothesis at all: below any that `sampling.NEG_INF` is part of.
NEVER = -1.0e30


def take_rows(cache: Any, rows: jax.Array) -> Any:
  """Row `rows[r]` of every array of `cache` as row `r`; `rows` is int32 `[rows of the cache]`."""
  return jax.tree.map(lambda x: x[rows], cache)


@dataclasses.dataclass(frozen=True)
class BeamModel:
  """A model whose rows may be exchanged.

  Attributes:
    tokens_to_logits: its decode step.
    cache: its cache, the rows of an example being equal at first and next to each other: `R` of
      the target, `U` of the draft, see `rows_of_calls`.
    gather_rows: `(cache, rows) -> cache`, see `take_rows`. Rows are exchanged within an example, so
      that what all its rows have in common, the encoder's keys and values, may stay as it is.
  """

  tokens_to_logits: TokensToLogits
  cache: Any
  gather_rows: Callable[[Any, jax.Array], Any] = take_rows


class BeamRows(NamedTuple):
  """Rows of a call of each model, an example.

  Attributes:
    target: `R`.
    draft: `U`.
  """

  target: int
  draft: int


def rows_of_calls(
    num_decodes: int, gamma: int, draft_width: int | None = None, target_rows: int | None = None
) -> BeamRows:
  """Rows that the caches need.

  Where the target's do not suffice for a tree, side branches of its deepest layers are not scored.

  Args:
    num_decodes: `W`.
    gamma: drafted steps a round.
    draft_width: `U`; None is `2 * W`.
    target_rows: `R`; None is `U + W`, which scores nearly all nodes that matter.

  Returns:
    The rows.

  Raises:
    UserError: a number is out of range.
  """
  check_static(
      num_decodes=num_decodes, gamma=gamma, draft_width=draft_width, target_rows=target_rows)
  check_gamma(gamma)
  if num_decodes < 1:
    raise UserError(f'num_decodes: expected at least 1, found {num_decodes}')
  width = 2 * num_decodes if draft_width is None else draft_width
  if width < num_decodes:
    raise UserError(f'draft_width: expected at least num_decodes {num_decodes}, found {width}')
  if target_rows is None:
    target_rows = width + num_decodes if gamma else num_decodes
  if target_rows < num_decodes:
    raise UserError(
        f'target_rows: expected at least num_decodes {num_decodes}, found {target_rows}')
  return BeamRows(target_rows, width)


def flat_rows(rows: jax.Array, num_rows: int) -> jax.Array:
  """Rows `[B, num_rows]` of each example as rows `[B * num_rows]` of the batch."""
  return (rows + jnp.arange(rows.shape[0])[:, None] * num_rows).reshape(-1)


@flax.struct.dataclass
class Tree:
  """What a round drafted. A layer behind the last drafted one has no node.

  Attributes:
    tokens: int32 `[B, gamma + 2, U]`, the last token of each node.
    parents: int32 `[B, gamma + 2, U]`, its place in the layer before.
    rows: int32 `[B, gamma + 2, U]`, the row of the target call that runs through it; `R` when there
      is none.
    scores: float32 `[B, U]`, of the newest layer.
    num_rows: int32 `[B]`, rows in use.
    row_tokens: int32 `[B, R, gamma + 1]`, what each row runs, a live beam's last token first.
    row_roots: int32 `[B, R]`, that live beam.
  """

  tokens: jax.Array
  parents: jax.Array
  rows: jax.Array
  scores: jax.Array
  num_rows: jax.Array
  row_tokens: jax.Array
  row_roots: jax.Array

  @classmethod
  def plant(cls, beams: Beams, gamma: int, num_rows: BeamRows) -> 'Tree':
    """A tree of live beams alone; each has the row of its own place."""
    batch, width = beams.live_log_probs.shape
    extra = num_rows.draft - width
    last = jnp.take_along_axis(beams.live, beams.steps[:, None, None], axis=2)[..., 0]
    pad = lambda x, **kwargs: jnp.pad(x, ((0, 0), (0, extra)), **kwargs)
    layers = jnp.zeros((batch, gamma + 2, num_rows.draft), jnp.int32)
    rows = jnp.where(jnp.arange(num_rows.draft) < width, jnp.arange(num_rows.draft),
                     num_rows.target)
    row_tokens = jnp.zeros((batch, num_rows.target, gamma + 1), jnp.int32)
    roots = jnp.arange(num_rows.target)
    return cls(
        tokens=layers.at[:, 0].set(pad(last)), parents=layers,
        rows=jnp.full_like(layers, num_rows.target).at[:, 0].set(rows),
        scores=pad(beams.live_log_probs, constant_values=NEVER),
        num_rows=jnp.full(batch, width, jnp.int32),
        row_tokens=row_tokens.at[:, :width, 0].set(last),
        row_roots=jnp.broadcast_to(jnp.where(roots < width, roots, 0), row_tokens.shape[:2]),
    )

  def grow(
      self, layer: jax.Array | int, logits: jax.Array, forced: jax.Array, eos_id: int
  ) -> 'Tree':
    """Adds a layer.

    Args:
      layer: the newest one.
      logits: float32 `[B, U, V]`, the draft's behind each node of it.
      forced: int32 `[B]`, the prompt's token there, 0 where there is none.
      eos_id: what ends a hypothesis, and so is no node.

    Returns:
      The tree with the best `U` continuations, or with the forced one of every node.
    """
    batch, width, vocab_size = logits.shape
    scores = self.scores[..., None] + jax.nn.log_softmax(logits)
    scores = jnp.where(jnp.arange(vocab_size) == eos_id, NEVER, scores)
    scores, index = jax.lax.top_k(scores.reshape(batch, -1), width)
    is_forced = forced[:, None] != 0
    scores = jnp.where(is_forced, self.scores, scores)
    parents = jnp.where(is_forced, jnp.arange(width), index // vocab_size)
    tokens = force_tokens(index % vocab_size, jnp.broadcast_to(forced[:, None], index.shape))

    # The best child goes on in its parent's row.
    room = self.row_tokens.shape[1]
    old_rows = pick(self.rows[:, layer], parents)
    is_sibling = parents[:, :, None] == parents[:, None, :]
    is_other = jnp.any(jnp.tril(is_sibling, -1), axis=2) & (old_rows < room)
    new_rows = self.num_rows[:, None] + jnp.cumsum(is_other, axis=1) - 1
    rows = jnp.minimum(jnp.where(is_other, new_rows, old_rows), room)
    examples = jnp.arange(batch)[:, None]
    old_rows = jnp.minimum(old_rows, room - 1)
    row_tokens = pick(self.row_tokens, old_rows).at[:, :, layer + 1].set(tokens)
    return Tree(
        tokens=self.tokens.at[:, layer + 1].set(tokens),
        parents=self.parents.at[:, layer + 1].set(parents),
        rows=self.rows.at[:, layer + 1].set(rows), scores=scores,
        num_rows=self.num_rows + jnp.sum(is_other, axis=1, dtype=jnp.int32),
        row_tokens=self.row_tokens.at[examples, rows].set(row_tokens, mode='drop'),
        row_roots=self.row_roots.at[examples, rows].set(
            pick(self.row_roots, old_rows), mode='drop'),
    )

  def find(
      self, layer: jax.Array, parents: jax.Array, tokens: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Looks for nodes.

    Args:
      layer: where.
      parents: int32 `[B, W]`, their places in the layer before.
      tokens: int32 `[B, W]`, their last tokens.

    Returns:
      Their places `[B, W]`, and whether the target scored them, bool `[B, W]`.
    """
    same = self.parents[:, layer, None] == parents[..., None]
    same &= self.tokens[:, layer, None] == tokens[..., None]
    same &= self.rows[:, layer, None] < self.row_tokens.shape[1]
    return jnp.argmax(same, axis=2).astype(jnp.int32), jnp.any(same, axis=2)


def draft_tree(
    draft: BeamModel, cache: Any, tree: Tree, beams: Beams, origins: jax.Array,
    first_positions: jax.Array, forced: jax.Array, eos_id: int,
) -> tuple[Tree, Any]:
  """Drafts one round.

  The rows of `cache` are right up to where the last round began. What was found since is read
  again, which takes one call whatever it is.

  Args:
    draft: the draft model; its own `cache` is not used.
    cache: its cache.
    tree: of the live beams alone.
    beams: the search.
    origins: int32 `[B, W]`, the row that each live beam had in the last round.
    first_positions: int32 `[B]`.
    forced: int32 `[B, gamma]`, the prompt's tokens, 0 where there is none.
    eos_id: what ends a hypothesis.

  Returns:
    The tree with `gamma` more layers, and the cache with the live beams in its first rows.
  """
  batch, gamma = forced.shape
  num_rows = tree.scores.shape[1]
  rows = jnp.arange(num_rows)
  beam_of_row = jnp.broadcast_to(
      jnp.where(rows < beams.live.shape[1], rows, 0), (batch, num_rows))

  def run(cache, tokens, first, sources):
    cache = draft.gather_rows(cache, flat_rows(sources, num_rows))
    logits, cache = draft.tokens_to_logits(
        tokens.reshape(batch * num_rows, -1), jnp.repeat(first_positions + first, num_rows), cache)
    return logits.reshape(batch, num_rows, *logits.shape[1:]).astype(jnp.float32), cache

  start = jnp.maximum(beams.steps - gamma, 0)
  tokens = jax.vmap(lambda row, i: jax.lax.dynamic_slice_in_dim(row, i, gamma + 1, axis=1))(
      pick(beams.live, beam_of_row), start)
  logits, cache = run(cache, tokens, start, pick(origins, beam_of_row))
  logits = at_position(jnp.moveaxis(logits, 2, 1), beams.steps - start)
  tree = tree.grow(0, logits, forced[:, 0], eos_id)

  def deepen(layer, carry):
    tree, cache = carry
    logits, cache = run(
        cache, tree.tokens[:, layer], beams.steps + layer, tree.parents[:, layer])
    return tree.grow(layer, logits[:, :, 0], forced[:, layer], eos_id), cache

  # Which nodes the target refuses is not known yet: the cache that is kept is the one before them.
  tree, _ = jax.lax.fori_loop(1, gamma, deepen, (tree, cache))
  return tree, cache
