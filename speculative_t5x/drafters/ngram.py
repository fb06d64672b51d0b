"""An n-gram model with back-off as drafter: next to no time a draft, and no state.

`B` is the number of rows, `V` the vocabulary, `C` the contexts of one order, `K` the successors
kept for each. `speculative_t5x.ngram` builds the tables.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from speculative_t5x import sampling
from speculative_t5x.drafters.base import Drafter, draw
from speculative_t5x.rounds import Proposal
from speculative_t5x.rows import read_rows

# Of a context's hash. Contexts that share one share a row: q is what was sampled from all the same.
MULTIPLIER = np.uint32(1000003)


@flax.struct.dataclass
class Order:
  """Successors of contexts of one length.

  Attributes:
    keys: uint32 `[C]`, hashes of the contexts, ascending.
    tokens: int32 `[C, K]`, the most frequent successors, 0 where there are fewer.
    probabilities: float32 `[C, K]`, discounted; 0 where there are fewer.
  """

  keys: jax.Array
  tokens: jax.Array
  probabilities: jax.Array


@flax.struct.dataclass
class NgramTable:
  """An n-gram model of order `len(orders) + 1`.

  The probability of a token is that of the longest known context, whose missing mass is spread as
  the next shorter context says: q_k(x) = d_k(x) + (1 - sum d_k) q_{k-1}(x), d_k the discounted
  share of the successors that are kept (absolute discounting).

  Attributes:
    unigram: float32 `[V]`, add-one smoothed.
    orders: of contexts of 1, 2, … tokens.
  """

  unigram: jax.Array
  orders: tuple[Order, ...]

  @property
  def context_length(self) -> int:
    """Tokens of the longest context."""
    return len(self.orders)


def hash_context(tokens: Sequence[jax.Array]) -> jax.Array:
  """The key of a context; `tokens` are its arrays, oldest first, the result is uint32."""
  key = tokens[0].astype('uint32') * 0
  for token in tokens:
    # Token ids are moved by one, or leading zeros would not count.
    key = key * MULTIPLIER + token.astype('uint32') + np.uint32(1)
  return key


def law(table: NgramTable, context: jax.Array) -> jax.Array:
  """The next token's distribution.

  Args:
    table: the model.
    context: int32 `[B, context_length]`, the last tokens, oldest first; negative before a text.

  Returns:
    float32 `[B, V]`.
  """
  table = jax.tree.map(jnp.asarray, table)
  batch, length = context.shape[0], table.context_length
  q = jnp.broadcast_to(table.unigram, (batch, table.unigram.shape[0]))
  rows = jnp.arange(batch)[:, None]
  for size, order in enumerate(table.orders, 1):
    tokens = context[:, length - size :]
    key = hash_context([tokens[:, i] for i in range(size)])
    index = jnp.minimum(jnp.searchsorted(order.keys, key), order.keys.shape[0] - 1)
    known = (order.keys[index] == key) & jnp.all(tokens >= 0, axis=1)
    share = jnp.where(known[:, None], order.probabilities[index], 0.0)
    q = q * (1.0 - jnp.sum(share, axis=1, keepdims=True))
    q = q.at[rows, order.tokens[index]].add(share)
  return q


@dataclasses.dataclass(frozen=True, eq=False)
class NgramDrafter(Drafter):
  """Drafts from an n-gram table (paper, section 3.6: cheap drafts).

  Attributes:
    table: the model.
    rule: the sampling rule; its law of the model's log-probabilities is what drafts are drawn from.
  """

  table: NgramTable
  rule: sampling.SamplingRule

  @property
  def is_deterministic(self) -> bool:
    """Greedy drafts need no randomness."""
    return self.rule.is_greedy

  def propose(
      self, state: Any, sequences: jax.Array, positions: jax.Array, forced: jax.Array,
      uniforms: jax.Array, active: jax.Array,
  ) -> Proposal:
    """See `Drafter.propose`; the table is all that is needed, so `state` is passed through."""
    del active
    length = max(self.table.context_length, 1)
    # Places before the start token are no context.
    padded = jnp.pad(sequences, ((0, 0), (length, 0)), constant_values=-1)
    context = read_rows(padded, positions + 1, length)

    def draft(context, place):
      q = law(self.table, context[:, length - self.table.context_length :])
      token, q = draw(self.rule, jnp.log(q), *place)
      return jnp.concatenate([context[:, 1:], token[:, None]], axis=1), (token, q)

    _, (tokens, q) = jax.lax.scan(draft, context, (forced.T, uniforms.T))
    return Proposal(tokens.T, None if q is None else jnp.moveaxis(q, 0, 1), state)
