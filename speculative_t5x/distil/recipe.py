"""What a draft is trained on and how: the settings of a run, and the loss that they mean.

`B` is the batch, `S` the input length, `M` the target length.
"""

import dataclasses
from collections.abc import Callable

import gin
import jax
import jax.numpy as jnp
from flax.linen import partitioning as nn_partitioning

from speculative_t5x import training
from speculative_t5x.distil.divergences import DIVERGENCES, mean_divergence
from speculative_t5x.distil.examples import counted
from speculative_t5x.errors import UserError
from speculative_t5x.network import Transformer
from speculative_t5x.network.partitioning import REPLICATED, RULES
from speculative_t5x.vocabularies import Vocabulary

# Where the trained tokens come from.
REFERENCES, TARGET, DRAFT = 'references', 'target', 'draft'
EXAMPLES = (REFERENCES, TARGET, DRAFT)


@gin.configurable(module='speculative_t5x')
@dataclasses.dataclass(frozen=True)
class Recipe:
  """How to distil; the optimizer is Adafactor, see `training.TrainConfig`.

  Attributes:
    divergence: between the target's distributions and the draft's, one of `DIVERGENCES`.
    examples: whose texts are learnt on: the 'references' given with the inputs, what the 'target'
      decodes, or what the 'draft' itself does at present (on-policy).
    draft_fraction: share of the batches whose texts are the draft's own in place of `examples`
      (lambda of GKD, arXiv 2306.13649); drawn for every `sample_period` batches.
    sample_period: batches that the draft writes the texts of at once, without learning in between.
    reference_weight: share of the cross-entropy on the texts in the loss, the divergence being the
      rest; 1 learns from texts alone and runs no target. Texts of the draft itself have none of it.
    distillation_temperature: both models' logits are divided by it in the divergence.
    dropout_rate: of the draft.
    learning_rate: peak step size relative to each parameter's scale.
    warmup_steps: steps of linear warm-up.
    train_steps: after which the rate has decayed linearly to a twentieth.
    batch_size: texts in a batch.
    seed: of initialisation, order, dropout and sampling.

  Raises:
    UserError: a value is out of range, or two contradict each other.
  """

  divergence: str = 'forward_kl'
  examples: str = TARGET
  draft_fraction: float = 0.0
  sample_period: int = 1
  reference_weight: float = 0.0
  distillation_temperature: float = 1.0
  dropout_rate: float = 0.0
  learning_rate: float = 0.01
  warmup_steps: int = 100
  train_steps: int = 10_000
  batch_size: int = 32
  seed: int = 0

  def __post_init__(self):
    for name, choices in (('divergence', tuple(DIVERGENCES)), ('examples', EXAMPLES)):
      if getattr(self, name) not in choices:
        raise UserError(
            f'{name.upper()}: expected one of {choices}, found {getattr(self, name)!r}')
    for name, least in (
        ('train_steps', 1), ('batch_size', 1), ('sample_period', 1), ('warmup_steps', 0),
        ('seed', 0),
    ):
      check_count(name.upper(), getattr(self, name), least)
    for name, is_right, expected in (
        ('draft_fraction', lambda x: 0 <= x <= 1, 'a number in [0, 1]'),
        ('reference_weight', lambda x: 0 <= x <= 1, 'a number in [0, 1]'),
        ('dropout_rate', lambda x: 0 <= x < 1, 'a number in [0, 1)'),
        ('distillation_temperature', lambda x: x > 0, 'a number above 0'),
        ('learning_rate', lambda x: x > 0, 'a number above 0'),
    ):
      value = getattr(self, name)
      if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_right(value):
        raise UserError(f'{name.upper()}: expected {expected}, found {value!r}')
    if self.warmup_steps >= self.train_steps:
      raise UserError(f'WARMUP_STEPS: expected less than TRAIN_STEPS {self.train_steps}, '
                      f'found {self.warmup_steps}')
    if self.examples == DRAFT and self.draft_fraction:
      raise UserError("DRAFT_FRACTION: expected 0.0 for EXAMPLES 'draft', which are all the "
                      f"draft's, found {self.draft_fraction}")
    if self.uses_draft and self.reference_weight == 1:
      raise UserError("REFERENCE_WEIGHT: expected less than 1.0 for the draft's own texts, which "
                      'only a target can judge, found 1.0')
    if self.examples == DRAFT and self.reference_weight:
      raise UserError("REFERENCE_WEIGHT: expected 0.0 for EXAMPLES 'draft', which are no "
                      f'references, found {self.reference_weight}')

  @property
  def uses_draft(self) -> bool:
    """Whether the draft writes some of the texts."""
    return self.examples == DRAFT or self.draft_fraction > 0

  @property
  def needs_teacher(self) -> bool:
    """Whether the loss asks the target."""
    return self.reference_weight < 1

  @property
  def train_config(self) -> training.TrainConfig:
    """The optimizer's part."""
    return training.TrainConfig(
        learning_rate=self.learning_rate, warmup_steps=self.warmup_steps,
        total_steps=self.train_steps, seed=self.seed)


def check_count(name: str, value: int, least: int) -> None:
  """Refuses what is no whole number from `least` on.

  Raises:
    UserError: it is not.
  """
  if isinstance(value, bool) or not isinstance(value, int) or value < least:
    raise UserError(f'{name}: expected a whole number from {least} on, found {value!r}')


def distillation_loss(
    draft: Transformer, target: Transformer, recipe: Recipe, vocabulary: Vocabulary
) -> Callable[..., jax.Array]:
  """The loss of one batch, for `training.make_train_step`.

  Args:
    draft: the network to train.
    target: the network to learn from.
    recipe: the weights and the divergence.
    vocabulary: of both; rows of either embedding beyond its size never count.

  Returns:
    `(params, batch, rng, target_params, reference_weight) → mean loss a token`, of which
    `reference_weight` (float32 scalar) is the share of the cross-entropy. What stands behind EOS
    does not count.
  """

  def loss_fn(params, batch, rng, target_params, reference_weight):
    decoder_inputs = training.shift_right(batch.targets)
    mask = counted(batch.targets, vocabulary.eos_id)
    with nn_partitioning.axis_rules(REPLICATED):
      logits = draft.apply(
          {'params': params}, batch.inputs, decoder_inputs, enable_dropout=True,
          rngs={'dropout': rng})
    loss = 0.0
    if recipe.reference_weight > 0:
      total, _ = training.cross_entropy(logits[..., : vocabulary.size], batch.targets)
      loss += reference_weight * total / jnp.maximum(jnp.sum(mask), 1)
    if recipe.needs_teacher:
      with nn_partitioning.axis_rules(RULES):
        wanted = target.apply({'params': target_params}, batch.inputs, decoder_inputs)
      loss += (1 - reference_weight) * mean_divergence(
          recipe.divergence, wanted, logits, mask, vocab_size=vocabulary.size,
          temperature=recipe.distillation_temperature)
    return loss

  return loss_fn
