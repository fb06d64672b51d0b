"""The rules of T5X's beam search, one step at a time, every example at its own.

`B` is the number of examples, `W` the width of the beam, `L` the longest decoded length, `V` the
vocabulary, `T` the length of the buffers.
"""

import dataclasses

import flax
import jax
import jax.numpy as jnp

from speculative_t5x.sampling import NEG_INF
from speculative_t5x.step import force_tokens


def pick(values: jax.Array, index: jax.Array) -> jax.Array:
  """`values[b, index[b]]`, `[B, M, ...]`, of `[B, N, ...]` at int32 `[B, M]`."""
  return jax.vmap(lambda row, i: row[i])(values, index)


def brevity_penalty(alpha: float | jax.Array, length: int | jax.Array) -> jax.Array:
  """What log-probabilities of `length` tokens are divided by, as in T5X."""
  return jnp.power((5.0 + length) / 6.0, alpha)


@flax.struct.dataclass
class Beams:
  """A search; beams are ordered by rising score.

  Attributes:
    steps: int32 `[B]`, taken so far; index of the last token in `live`.
    live: int32 `[B, W, T]`, the token that the search starts from and those found.
    live_log_probs: float32 `[B, W]`.
    finished: int32 `[B, W, T]`, hypotheses with their end.
    finished_scores: float32 `[B, W]`.
    finished_flags: bool `[B, W]`, which of them there are.
  """

  steps: jax.Array
  live: jax.Array
  live_log_probs: jax.Array
  finished: jax.Array
  finished_scores: jax.Array
  finished_flags: jax.Array

  @classmethod
  def start(cls, first_tokens: jax.Array, width: int, length: int) -> 'Beams':
    """A search of `width` beams from `first_tokens` int32 `[B]`; `length` is `T`."""
    shape = (first_tokens.shape[0], width)
    nothing = jnp.zeros((*shape, length), jnp.int32)
    return cls(
        steps=jnp.zeros(shape[0], jnp.int32),
        live=nothing.at[:, :, 0].set(first_tokens[:, None]),
        live_log_probs=jnp.full(shape, NEG_INF).at[:, 0].set(0.0),
        finished=nothing, finished_scores=jnp.full(shape, NEG_INF),
        finished_flags=jnp.zeros(shape, bool),
    )


@dataclasses.dataclass(frozen=True)
class Search:
  """The rules of T5X's `beam_search`, for each example as if it were alone in its batch.

  Attributes:
    eos_id: the id that ends a hypothesis.
    alpha: of the brevity penalty.
    max_decode_len: `L`.
    limits: int32 `[B]`, steps at most.
    first_positions: int32 `[B]`, tokens before those counted in `Beams.steps`.
    min_log_prob: the search ends once no live beam has more, without its brevity penalty.
  """

  eos_id: int
  alpha: float | jax.Array
  max_decode_len: int
  limits: jax.Array
  first_positions: jax.Array
  min_log_prob: float | jax.Array = NEG_INF

  def goes_on(self, beams: Beams) -> jax.Array:
    """Bool `[B]`: whether a step could change what is found."""
    # One more for the start token.
    penalty = brevity_penalty(self.alpha, self.max_decode_len + 1)
    best_live = beams.live_log_probs[:, -1] / penalty
    worst = jnp.min(beams.finished_scores, axis=1, keepdims=True)
    worst = jnp.where(beams.finished_flags, worst, NEG_INF)
    is_found = jnp.all(worst > best_live[:, None], axis=1)
    is_hopeless = (best_live < self.min_log_prob / penalty) & (beams.steps > 0)
    return (beams.steps < self.limits) & ~is_found & ~is_hopeless

  def advance(
      self, beams: Beams, logits: jax.Array, forced: jax.Array
  ) -> tuple[Beams, jax.Array, jax.Array]:
    """One step.

    Args:
      beams: the search.
      logits: float32 `[B, W, V]` of the token behind each live beam.
      forced: int32 `[B]`, the prompt's token there, 0 where there is none.

    Returns:
      The search; and of each live beam in it the one `[B, W]` that it continues, and its last token
      `[B, W]`.
    """
    batch, width, vocab_size = logits.shape
    log_probs = jax.nn.log_softmax(logits) + beams.live_log_probs[..., None]
    # Half of these go on even if every beam ends.
    top, index = jax.lax.top_k(log_probs.reshape(batch, -1), 2 * width)
    parents = index // vocab_size
    # All beams of a prompt are one.
    one_beam = jnp.where(jnp.arange(2 * width) == 0, 0.0, NEG_INF)
    top = jnp.where(forced[:, None] != 0, one_beam, top)
    tokens = force_tokens(index % vocab_size, jnp.broadcast_to(forced[:, None], index.shape))
    sequences = pick(beams.live, parents)
    sequences = jax.vmap(lambda row, place, token: row.at[:, place].set(token))(
        sequences, beams.steps + 1, tokens)
    has_ended = tokens == self.eos_id

    log_probs = top + has_ended * NEG_INF
    best = jnp.flip(jax.lax.top_k(log_probs, width)[1], axis=1)
    length = self.first_positions + beams.steps + 1
    scores = top / brevity_penalty(self.alpha, length)[:, None] + ~has_ended * NEG_INF
    finished, scores, flags = (
        jnp.concatenate(pair, axis=1) for pair in (
            (beams.finished, sequences), (beams.finished_scores, scores),
            (beams.finished_flags, has_ended)))
    kept = jnp.flip(jax.lax.top_k(scores, width)[1], axis=1)
    beams = Beams(
        steps=beams.steps + 1, live=pick(sequences, best), live_log_probs=pick(log_probs, best),
        finished=pick(finished, kept), finished_scores=pick(scores, kept),
        finished_flags=pick(flags, kept),
    )
    return beams, pick(parents, best), pick(tokens, best)
