"""Which drafter a pair has, as it is named in gin, and how it is put together."""

import dataclasses
from typing import Any

import jax

from speculative_t5x.drafters.base import Drafter
from speculative_t5x.drafters.cascade import CascadeDrafter
from speculative_t5x.drafters.copying import CopyingDrafter
from speculative_t5x.drafters.mixed import MixedDrafter
from speculative_t5x.drafters.model import ModelDrafter
from speculative_t5x.drafters.ngram import NgramDrafter, NgramTable
from speculative_t5x.errors import UserError
from speculative_t5x.sampling import SamplingRule
from speculative_t5x.step import TokensToLogits

DRAFTERS = ('model', 'copying', 'ngram', 'mixed', 'cascade')
# What may guess for the draft model of a cascade.
CASCADE_DRAFTERS = ('copying', 'ngram')

# A match of one token is less to be trusted than a model.
MIXED_MIN_NGRAM = 2


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
  """What guesses.

  Attributes:
    name: 'model', a smaller model; 'copying', from the input and the output; 'ngram', a table;
      'mixed', copying where there is a match and the model elsewhere; 'cascade', the model, with
      `cascade` guessing for it.
    min_confidence: of a model's drafts, see `ModelDrafter`; 0 always drafts gamma tokens.
    cascade: what guesses for the model of a cascade, 'copying' or 'ngram'.
    cascade_gamma: its drafts an inner round.

  Raises:
    UserError: a name is unknown, or a number is out of range or has no effect.
  """

  name: str = 'model'
  min_confidence: float = 0.0
  cascade: str = 'copying'
  cascade_gamma: int = 2

  def __post_init__(self):
    if self.name not in DRAFTERS:
      raise UserError(f'drafter: expected one of {", ".join(DRAFTERS)}, found {self.name}')
    if self.cascade not in CASCADE_DRAFTERS:
      raise UserError(
          f'cascade: expected one of {", ".join(CASCADE_DRAFTERS)}, found {self.cascade}')
    if not 0.0 <= self.min_confidence < 1.0:
      raise UserError(
          f'min_confidence: expected a number in [0, 1), found {self.min_confidence}')
    if self.min_confidence and self.name not in ('model', 'mixed'):
      raise UserError(
          f'min_confidence: expected 0 with the drafter {self.name} (model and mixed take it), '
          f'found {self.min_confidence}')
    if self.cascade_gamma < 1:
      raise UserError(f'cascade_gamma: expected at least 1, found {self.cascade_gamma}')

  @property
  def has_model(self) -> bool:
    """Whether there is a draft model."""
    return self.name in ('model', 'mixed', 'cascade')

  @property
  def has_table(self) -> bool:
    """Whether there is an n-gram table."""
    return 'ngram' in (self.name, self.name == 'cascade' and self.cascade)

  @property
  def extra_slots(self) -> int:
    """Slots that the draft's cache needs beyond `decoding.cache_slots(L, gamma)`."""
    return self.cascade_gamma if self.name == 'cascade' else 0

  def check_parts(self, model: object, table: object) -> None:
    """Refuses a drafter whose parts are missing.

    Raises:
      UserError: one that is needed is None.
    """
    if self.has_model and model is None:
      raise UserError(f'draft: expected a model for the drafter {self.name!r}, found None')
    if self.has_table and table is None:
      raise UserError(f'ngram_table: expected one for the drafter {self.name!r}, found None')

  def make(
      self, rule: SamplingRule, *, tokens_to_logits: TokensToLogits | None = None,
      first_positions: jax.Array | int = 0, table: NgramTable | None = None,
  ) -> Drafter:
    """Puts the drafter together.

    Args:
      rule: that drafts are drawn with.
      tokens_to_logits: the draft model's decode step, where there is one.
      first_positions: see `ModelDrafter`.
      table: n-grams, where there are some.

    Returns:
      The drafter.
    """
    model = ModelDrafter(tokens_to_logits, rule, first_positions, self.min_confidence)
    others = {'copying': CopyingDrafter(), 'ngram': NgramDrafter(table, rule)}
    if self.name == 'model':
      return model
    if self.name == 'mixed':
      return MixedDrafter(CopyingDrafter(min_ngram=MIXED_MIN_NGRAM), model)
    if self.name == 'cascade':
      return CascadeDrafter(
          tokens_to_logits, rule, others[self.cascade], self.cascade_gamma, first_positions)
    return others[self.name]

  def state(self, model_state: Any, inputs: jax.Array) -> Any:
    """The drafter's first state.

    Args:
      model_state: the draft model's cache, where there is one.
      inputs: int32 `[B, S]`, padded with 0, that copies may be taken from.

    Returns:
      What the first call of `propose` is given.
    """
    if self.name == 'model':
      return model_state
    if self.name == 'mixed' or (self.name == 'cascade' and self.cascade == 'copying'):
      return model_state, inputs
    if self.name == 'cascade':
      return model_state, None
    return inputs if self.name == 'copying' else None
