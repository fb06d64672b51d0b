"""Acceptance along the target's own texts: alpha as the paper takes it, and what follows from it.

`B` is the batch, `L` the output length, `V` the vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speculative_t5x.measure.subject import ModelSteps
from speculative_t5x.sampling import SamplingRule


class Path(NamedTuple):
  """One text that the target wrote.

  Attributes:
    overlap: float `[n]`, sum over x of min(p(x), q(x)) at each of its tokens: the chance that a
      draft is accepted there (paper, definition 3.1 and theorem 3.5).
    accepted: float `[n]`, min(1, q(x) / p(x)) of the token x that stands there: the chance that it
      was a draft that was accepted, given that it stands there.
  """

  overlap: np.ndarray
  accepted: np.ndarray


def logits_along(
    target: ModelSteps, draft: ModelSteps, sequences: np.ndarray
) -> tuple[jax.Array, jax.Array]:
  """What both models say at every token of texts that the target has written.

  Args:
    target: the target's steps.
    draft: the draft's.
    sequences: int32 `[B, L]`.

  Returns:
    float32 logits `[B, L, V]` of the target and of the draft.
  """
  tokens = jnp.pad(jnp.asarray(sequences, jnp.int32)[:, :-1], ((0, 0), (1, 0)))
  positions = jnp.zeros(tokens.shape[0], jnp.int32)

  def along(model):
    program = jax.jit(
        lambda params: model.step(params, tokens, positions, model.encode(params))[0])
    return program(model.params)

  return along(target), along(draft)


def overlap(p: jax.Array, q: jax.Array) -> jax.Array:
  """The chance that a draft is accepted, sum over x of min(p(x), q(x)): `[..., V]` to `[...]`."""
  return jnp.sum(jnp.minimum(p, q), axis=-1)


def paths_of(
    target_logits: jax.Array, draft_logits: jax.Array, sequences: np.ndarray, rule: SamplingRule,
    draft_rule: SamplingRule,
) -> list[Path]:
  """How the texts would be drafted.

  Args:
    target_logits: float32 `[B, L, V]`.
    draft_logits: float32 `[B, L, V]`.
    sequences: int32 `[B, L]`, 0 behind EOS.
    rule: the sampling rule that the target wrote them with.
    draft_rule: the draft's.

  Returns:
    A path for each row that is not empty.
  """
  @jax.jit
  def compare(target_logits, draft_logits, sequences):
    p, q = rule.distribution(target_logits), draft_rule.distribution(draft_logits)
    chosen = lambda law: jnp.take_along_axis(law, sequences[..., None], axis=-1)[..., 0]
    return overlap(p, q), chosen(p), chosen(q)

  found = compare(target_logits, draft_logits, jnp.asarray(sequences, jnp.int32))
  overlaps, p, q = (np.asarray(x, np.float64) for x in found)
  accepted = np.minimum(1.0, q / np.maximum(p, 1e-30))
  lengths = np.count_nonzero(np.asarray(sequences), axis=1)
  return [
      Path(overlaps[row, :length], accepted[row, :length])
      for row, length in enumerate(lengths) if length
  ]


def alpha(paths: Sequence[Path]) -> float:
  """The mean acceptance rate, over all tokens (paper, section 4.1)."""
  return float(np.mean(np.concatenate([path.overlap for path in paths])))


def expected_rounds(path: Path, gamma: int) -> float:
  """Target runs that a text takes, token by token verified; exact for a given text.

  Each of its tokens, when drafted, was accepted with its own probability, and the one behind the
  accepted ones is the target's; so the rounds from every place follow from those behind it.

  Args:
    path: the text.
    gamma: drafts a round.

  Returns:
    The expectation over the uniforms.
  """
  length = len(path.accepted)
  rounds = np.zeros(length + gamma + 2)
  for place in range(length - 1, -1, -1):
    reached, total = 1.0, 1.0
    for ahead in range(gamma):
      if place + ahead >= length:
        break
      chance = path.accepted[place + ahead]
      total += reached * (1 - chance) * rounds[place + ahead + 1]
      reached *= chance
    else:
      total += reached * rounds[place + gamma + 1]
    rounds[place] = total
  return float(rounds[0])


def accepted_by_depth(paths: Sequence[Path], gamma: int) -> np.ndarray:
  """Chance that the first i drafts from any place of a text are all accepted.

  Args:
    paths: the texts.
    gamma: the most drafts.

  Returns:
    float `[gamma]`, for i = 1 … gamma. Drafts behind a text's end do not count.
  """
  found = []
  for depth in range(1, gamma + 1):
    chances = [
        np.prod(path.accepted[place : place + depth])
        for path in paths for place in range(len(path.accepted) - depth + 1)
    ]
    found.append(float(np.mean(chances)) if chances else 0.0)
  return np.array(found)
