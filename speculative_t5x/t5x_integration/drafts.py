"""What a decode function drafts with: a drafter and the parts it is made of."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from speculative_t5x import decoding
from speculative_t5x.drafters import Drafter, DrafterConfig
from speculative_t5x.drafters.ngram import NgramTable
from speculative_t5x.sampling import SamplingRule
from speculative_t5x.t5x_integration.adapters import DecodingModel

# Wraps a decode step and its cache, as `callbacks.with_callbacks` does.
Wrap = Callable[[Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Draft:
  """Makes the drafter of one batch.

  Attributes:
    config: what guesses.
    inputs: int32 `[batch, S]`, padded with 0, that copies may be taken from besides the output.
    model: the draft model, where there is one.
    table: n-grams, where there are some; they become a constant of the program.
  """

  config: DrafterConfig
  inputs: jax.Array
  model: DecodingModel | None = None
  table: NgramTable | None = None

  def start(
      self, rule: SamplingRule, first_positions: jax.Array, num_decodes: int, wrap: Wrap
  ) -> tuple[Drafter, Any]:
    """The drafter and its first state.

    Args:
      rule: that drafts are drawn with; a temperature array has one entry a row.
      first_positions: int32 `[batch * num_decodes]`, where each row starts.
      num_decodes: decodes an example.
      wrap: for the decode step of the model.
    """
    step, cache = None, None
    if self.model is not None:
      step, cache = wrap(self.model.tokens_to_logits, self.model.expanded_cache(num_decodes))
    drafter = self.config.make(
        rule, tokens_to_logits=step, first_positions=first_positions, table=self.table)
    return drafter, self.config.state(cache, decoding.expand_rows(self.inputs, num_decodes))
