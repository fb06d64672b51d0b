"""A target with its draft as one T5X model.

`B` is the batch, `N` the decodes an example, `L` the output length.
"""

import copy
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import core as flax_core
from flax.linen import partitioning as flax_partitioning
from t5x import models

from speculative_t5x import decoding as core_decoding
from speculative_t5x import gin_command
from speculative_t5x.drafters import DrafterConfig
from speculative_t5x.drafters.ngram import NgramTable
from speculative_t5x.errors import UserError
from speculative_t5x.t5x_integration import adapters, decoding, drafts, partitioning, vocabularies


class SpeculativeModel(models.BaseTransformerModel):
  """Two ordinary T5X models, each with its module, vocabulary and checkpoint, that decode together.

  To T5X it is one model: every collection of its variables is nested under `target` and `draft`.
  Losses and scores are the target's. With a decode function of T5X's (`temperature_sample`,
  `beam_search`) it decodes as the target alone does.

  Attributes:
    target: the model whose distribution the outputs follow.
    draft: the model that guesses; None when none does.
  """

  def __init__(
      self,
      target: models.BaseTransformerModel,
      draft: models.BaseTransformerModel | None = None,
      gamma: int = 4,
      drafter: DrafterConfig = DrafterConfig(),  # noqa: B008 - frozen
      ngram_table: NgramTable | None = None,
      decode_fn: models.DecodeFnCallable = decoding.speculative_decode,
      default_decoder_params: models.DecoderParams | None = None,
      draft_logical_axis_rules: partitioning.LogicalAxisRules | None = None,
  ):
    """See the class.

    Args:
      target: a `t5x.models.EncoderDecoderModel` or `DecoderOnlyModel`.
      draft: likewise, of either kind; None with a drafter that is no model.
      gamma: drafts a round.
      drafter: what guesses. When it has no model, the one given here is dropped.
      ngram_table: of a drafter that has one, see `tasks.ngram_table`.
      decode_fn: `speculative_decode`, or a decode function of T5X's.
      default_decoder_params: `num_decodes` and `return_all_decodes` when a call names none.
      draft_logical_axis_rules: how the draft is partitioned, see `partitioning`; None replicates
        it.

    Raises:
      UserError: gamma is below 0, the drafter lacks a part, or the vocabularies differ.
    """
    core_decoding.check_gamma(gamma)
    drafter.check_parts(draft, ngram_table)
    if not drafter.has_model:
      draft = None
    else:
      vocabularies.check_same(target.output_vocabulary, draft.output_vocabulary)
    super().__init__(
        module=target.module, input_vocabulary=target.input_vocabulary,
        output_vocabulary=target.output_vocabulary, optimizer_def=target.optimizer_def,
        decode_fn=decode_fn,
    )
    self.FEATURE_CONVERTER_CLS = target.FEATURE_CONVERTER_CLS
    self.target = target
    self.draft = draft
    self._gamma = gamma
    self._drafter = drafter
    self._ngram_table = ngram_table
    self._default_decoder_params = default_decoder_params or models.DecoderParams()
    self._draft_logical_axis_rules = draft_logical_axis_rules

  def get_initial_variables(
      self, rng: jax.Array, input_shapes: Mapping[str, Any],
      input_types: Mapping[str, jnp.dtype] | None = None,
  ) -> flax_core.FrozenDict:
    """Both models' variables, each collection as `{'target': …, 'draft': …}`."""
    both = {'target': self.target.get_initial_variables(rng, input_shapes, input_types)}
    if self.draft is not None:
      with self._draft_axis_rules():
        both['draft'] = self.draft.get_initial_variables(
            rng, *adapters.inputs_for(self.draft, input_shapes, input_types))
    both = {name: flax_core.unfreeze(variables) for name, variables in both.items()}
    if 'params_axes' in both.get('draft', {}):
      both['draft']['params_axes'] = partitioning.draft_axes(
          both['draft']['params_axes'], is_partitioned=self._draft_logical_axis_rules is not None)
    collections = dict.fromkeys(name for variables in both.values() for name in variables)
    return flax_core.freeze({
        collection: {name: variables.get(collection, {}) for name, variables in both.items()}
        for collection in collections
    })

  def predict_batch_with_aux(
      self,
      params: Mapping[str, Any],
      batch: Mapping[str, jax.Array],
      rng: jax.Array | None = None,
      decoder_params: Mapping[str, Any] | None = None,
      return_all_decodes: bool | None = None,
      num_decodes: int | None = None,
      prompt_with_targets: bool = False,
  ) -> tuple[jax.Array, dict[str, Any]]:
    """Decodes a batch; see T5X's `EncoderDecoderModel.predict_batch_with_aux`.

    Args:
      params: `{'target': …, 'draft': …}`.
      batch: features of the target's converter, `[B, …]`.
      rng: a key.
      decoder_params: further arguments of the decode function, `gamma` among them.
      return_all_decodes: whether all decodes are returned, or the one of the highest score.
      num_decodes: decodes an example.
      prompt_with_targets: whether outputs begin with the batch's targets (encoder-decoder).

    Returns:
      Sequences `[B, L]`, or `[B, N, L]`; and `scores` `[B]` or `[B, N]` with, from
      `speculative_decode`, `statistics` of the same leading axes.

    Raises:
      UserError: the target has no encoder and `prompt_with_targets` is set; see also
        `adapters.prepare`.
    """
    if prompt_with_targets and isinstance(self.target, models.DecoderOnlyModel):
      raise UserError('prompt_with_targets: expected False for a decoder-only target, whose inputs '
                      'are its prompt, found True')
    if return_all_decodes is None:
      return_all_decodes = self._default_decoder_params.return_all_decodes
    if num_decodes is None:
      num_decodes = self._default_decoder_params.num_decodes
    decoder_params = dict(decoder_params or {})
    if not self.is_speculative:
      return self._decode_target(
          params, batch, rng, decoder_params=decoder_params, num_decodes=num_decodes,
          return_all_decodes=return_all_decodes,
          **({'prompt_with_targets': True} if prompt_with_targets else {}))
    if rng is not None:
      if decoder_params.get('decode_rng') is not None:
        raise UserError("rng: expected it once, found it also in decoder_params['decode_rng']")
      decoder_params['decode_rng'] = rng
    prompt = adapters.prompt_of(self.target, batch, prompt_with_targets)
    gamma = decoder_params.pop('gamma', self._gamma)
    core_decoding.check_gamma(gamma)
    sizes = {
        'num_slots': core_decoding.cache_slots(prompt.decoder_inputs.shape[1], gamma),
        'num_decodes': num_decodes, 'vocab_size': self.output_vocabulary.vocab_size,
    }
    target = adapters.prepare(self.target, params['target'], prompt, **sizes)
    draft = self._draft_of(params, prompt, sizes) if gamma else None
    decoder_params.setdefault('eos_id', self.output_vocabulary.eos_id or 1)
    result = self.decode_fn(
        inputs=prompt.decoder_inputs, cache=target.cache,
        tokens_to_logits=target.tokens_to_logits, num_decodes=num_decodes,
        cache_offset=target.cache_offset, draft=draft, gamma=gamma,
        initial_index=prompt.initial_index, **decoder_params)
    chosen = (lambda x: x) if return_all_decodes else (lambda x: x[:, -1])
    sequences = chosen(result.sequences)
    if prompt.is_decoder_only:
      sequences = models.remove_prefix(sequences, prompt.initial_index)
    statistics = {
        field.name: chosen(getattr(result.statistics, field.name))
        for field in dataclasses.fields(result.statistics)
    }
    aux = {'scores': chosen(result.scores), 'statistics': statistics}
    if result.lenience < 1.0:
      # Lossy outputs say so, each.
      aux['lenience'] = jnp.full_like(aux['scores'], result.lenience)
    return sequences, aux

  @property
  def is_speculative(self) -> bool:
    """Whether the decode function takes a draft."""
    return 'draft' in inspect.signature(self.decode_fn).parameters

  def score_batch(
      self, params: Mapping[str, Any], batch: Mapping[str, jax.Array],
      return_intermediates: bool = False,
  ) -> Any:
    """Log-likelihoods `[B]` of the batch's targets under the target model."""
    return self.target.score_batch(params['target'], batch, return_intermediates)

  def loss_fn(self, params, batch, dropout_rng):
    """The target's loss."""
    return self.target.loss_fn(params['target'], batch, dropout_rng)

  def _compute_logits(self, params, batch, dropout_rng=None, **kwargs):
    return self.target._compute_logits(params['target'], batch, dropout_rng, **kwargs)

  def _draft_of(self, params, prompt, sizes) -> drafts.Draft:
    """What the decode function drafts with."""
    model = None
    if self.draft is not None:
      sizes = {**sizes, 'num_slots': sizes['num_slots'] + self._drafter.extra_slots}
      with self._draft_axis_rules():
        model = adapters.prepare(self.draft, params['draft'], prompt, **sizes)
      model = dataclasses.replace(
          model, tokens_to_logits=self._with_draft_axis_rules(model.tokens_to_logits))
    # A decoder-only target's inputs stand in the decoded sequence itself.
    inputs = prompt.inputs[:, :0] if prompt.is_decoder_only else prompt.inputs
    return drafts.Draft(self._drafter, inputs, model, self._ngram_table)

  def _decode_target(self, params, batch, rng, **kwargs):
    """What the target alone decodes with T5X's own decode function."""
    target = copy.copy(self.target)
    target._decode_fn = self.decode_fn
    return target.predict_batch_with_aux(params['target'], batch, rng, **kwargs)

  def _draft_axis_rules(self):
    """The rules that the draft's activations are constrained by."""
    rules = self._draft_logical_axis_rules
    return flax_partitioning.axis_rules(partitioning.REPLICATED if rules is None else rules)

  def _with_draft_axis_rules(self, tokens_to_logits):
    def step(*args):
      with self._draft_axis_rules():
        return tokens_to_logits(*args)

    return step


def model_in_scope(macro: str = 'MODEL') -> models.BaseTransformerModel:
  """The model that a gin macro names, built in the scope this is called in.

  `@draft/model_in_scope()` is the model of an existing configuration with every binding of the
  scope `draft/` in place of the unscoped one.

  Args:
    macro: the macro's name.

  Returns:
    The model.

  Raises:
    UserError: there is no such macro, or it is no reference.
  """
  reference = gin_command.reference(
      macro, 'reference such as @models.EncoderDecoderModel()')
  return reference.configurable.wrapper()
