"""What a decode function drafts with: a model, the context, or an n-gram table."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax

from speculative_t5x import decoding
from speculative_t5x.drafters import CopyingDrafter, Drafter, ModelDrafter, NgramDrafter
from speculative_t5x.drafters.ngram import NgramTable
from speculative_t5x.sampling import SamplingRule
from speculative_t5x.t5x_integration.adapters import DecodingModel

# Wraps a decode step and its cache, as `callbacks.with_callbacks` does.
Wrap = Callable[[Any, Any], tuple[Any, Any]]


class Draft(Protocol):
  """Makes the drafter of one batch."""

  def start(
      self, rule: SamplingRule, first_positions: jax.Array, num_decodes: int, wrap: Wrap
  ) -> tuple[Drafter, Any]:
    """The drafter and its first state.

    Args:
      rule: that drafts are drawn with; a temperature array has one entry a row.
      first_positions: int32 `[batch * num_decodes]`, where each row starts.
      num_decodes: decodes an example.
      wrap: for the decode step of a model.
    """
    ...


@dataclasses.dataclass(frozen=True)
class ModelDraft:
  """Drafts with a model."""

  model: DecodingModel

  def start(self, rule, first_positions, num_decodes, wrap):
    """See `Draft.start`."""
    step, cache = wrap(self.model.tokens_to_logits, self.model.expanded_cache(num_decodes))
    return ModelDrafter(step, rule, first_positions), cache


@dataclasses.dataclass(frozen=True)
class CopyingDraft:
  """Copies from `inputs` int32 `[batch, S]`, padded with 0, and from the output."""

  inputs: jax.Array

  def start(self, rule, first_positions, num_decodes, wrap):
    """See `Draft.start`."""
    del rule, first_positions, wrap
    return CopyingDrafter(), decoding.expand_rows(self.inputs, num_decodes)


@dataclasses.dataclass(frozen=True)
class NgramDraft:
  """Drafts with an n-gram table, which becomes a constant of the program."""

  table: NgramTable

  def start(self, rule, first_positions, num_decodes, wrap):
    """See `Draft.start`."""
    del first_positions, num_decodes, wrap
    return NgramDrafter(self.table, rule), None
