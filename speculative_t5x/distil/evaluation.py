"""The acceptance rate of a draft on held-out inputs, along what the target wrote for them.

`B` is the batch, `S` the input length, `L` the output length.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speculative_t5x import training
from speculative_t5x.measure import acceptance
from speculative_t5x.network import Transformer
from speculative_t5x.sampling import SamplingRule
from speculative_t5x.training import Batch, Example


def held_out_batches(
    examples: Sequence[Example], batch_size: int, buckets: Sequence[tuple[int, int]]
) -> list[Batch]:
  """All of `examples` in batches of one number of rows, alike in length; empty rows fill up.

  Args:
    examples: `(input ids, the target's text)`, no longer than the last bucket.
    batch_size: `B`.
    buckets: `(S, L)`, growing on both sides.

  Returns:
    Batches `[B, S]` and `[B, L]`.
  """
  by_bucket: dict[tuple[int, int], list[Example]] = {}
  for example in examples:
    by_bucket.setdefault(training.bucket_of(example, buckets), []).append(example)
  found = []
  for size, of_size in sorted(by_bucket.items()):
    for start in range(0, len(of_size), batch_size):
      rows = of_size[start : start + batch_size]
      rows = [*rows, *[([], [])] * (batch_size - len(rows))]
      found.append(Batch(*(training.pad([row[side] for row in rows], size[side])
                           for side in (0, 1))))
  return found


def make_alpha(
    target: Transformer, draft: Transformer, vocab_size: int, rule: SamplingRule,
    draft_rule: SamplingRule,
) -> Callable[[Any, Any, Sequence[Batch]], float]:
  """Compiles the acceptance rate, as `measure.acceptance.alpha` takes it.

  Args:
    target: the network that wrote the texts.
    draft: the other one.
    vocab_size: rows of either embedding from here on get no probability.
    rule: that the texts were written with.
    draft_rule: the draft's.

  Returns:
    `(target_params, draft_params, batches) → alpha`, the mean of Σ min(p, q) over all tokens.
  """

  @jax.jit
  def overlap(target_params, draft_params, batch):
    decoder_inputs = training.shift_right(batch.targets)
    logits = lambda module, params: module.apply(
        {'params': params}, batch.inputs, decoder_inputs)[..., :vocab_size]
    p = rule.distribution(logits(target, target_params))
    q = draft_rule.distribution(logits(draft, draft_params))
    lengths = jnp.count_nonzero(batch.targets, axis=1)
    counts = jnp.arange(batch.targets.shape[1]) < lengths[:, None]
    return jnp.sum(jnp.where(counts, acceptance.overlap(p, q), 0.0)), jnp.sum(lengths)

  def alpha(target_params, draft_params, batches):
    found = np.sum([
        [float(x) for x in overlap(target_params, draft_params, batch)] for batch in batches
    ], axis=0)
    return float(found[0] / max(found[1], 1.0))

  return alpha
