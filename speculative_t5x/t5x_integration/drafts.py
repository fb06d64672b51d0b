"""What a decode function drafts with: an `adapters.DecodingModel`, the context, or n-grams."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax

from speculative_t5x import decoding
from speculative_t5x.drafters import CopyingDrafter, Drafter, NgramDrafter
from speculative_t5x.drafters.ngram import NgramTable
from speculative_t5x.sampling import SamplingRule

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
