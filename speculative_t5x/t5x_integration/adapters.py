"""What the loop needs of a T5X model: a decode step over several tokens, and a cache to begin with.

`B` is the batch, `N` the decodes an example, `S` the input length, `L` the length of the decoded
sequences, `T` the slots of a cache.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from t5x import models

from speculative_t5x import decoding
from speculative_t5x.errors import UserError
from speculative_t5x.step import TokensToLogits
from speculative_t5x.t5x_integration import multi_token

# Cached variables of T5X's modules that have no batch.
WITHOUT_BATCH = {'cache_index', 'cached_bias'}


@dataclasses.dataclass(frozen=True)
class Prompt:
  """What a batch asks for, in the terms of either kind of model.

  Attributes:
    inputs: int32 `[B, S]`, padded with 0: the encoder's, or what stands before the targets of a
      decoder-only model.
    decoder_inputs: int32 `[B, L]`, shifted right: what the decoded sequences begin with.
    initial_index: int32 `[B]`, the place in `decoder_inputs` that decoding starts from; None is 0.
    causal_attention: int32 `[B, L]`, 1 on the prefix of a decoder-only batch; None otherwise.
  """

  inputs: jax.Array
  decoder_inputs: jax.Array
  initial_index: jax.Array | None = None
  causal_attention: jax.Array | None = None

  @property
  def is_decoder_only(self) -> bool:
    """Whether the inputs stand in the decoded sequence."""
    return self.causal_attention is not None


@dataclasses.dataclass(frozen=True)
class DecodingModel:
  """One model, ready to decode a batch.

  Attributes:
    tokens_to_logits: its decode step, on rows `[B * N]`.
    cache: its cache before the rows are repeated for their decodes.
    cache_offset: the axis of the batch in `cache`.
  """

  tokens_to_logits: TokensToLogits
  cache: Any
  cache_offset: int = 0

  def expanded_cache(self, num_decodes: int) -> Any:
    """The cache, each row `num_decodes` times."""
    return expand_cache(self.cache, num_decodes, self.cache_offset)


def expand_cache(cache: Any, num_decodes: int, cache_offset: int = 0) -> Any:
  """Repeats the rows of a cache, leaving alone what has no batch; see `decoding.expand_rows`."""
  def expand(path, leaf):
    if str(getattr(path[-1], 'key', '')) in WITHOUT_BATCH:
      return leaf
    return decoding.expand_rows(leaf, num_decodes, cache_offset)

  return jax.tree_util.tree_map_with_path(expand, cache)


def prompt_of(
    model: models.BaseTransformerModel, batch: dict[str, jax.Array], prompt_with_targets: bool
) -> Prompt:
  """Reads a batch of the feature converter of `model`.

  Args:
    model: the target.
    batch: its features, `[B, …]`.
    prompt_with_targets: whether an encoder-decoder's outputs begin with the batch's targets.

  Returns:
    The prompt.

  Raises:
    UserError: features are missing.
  """
  def feature(name):
    if name not in batch:
      raise UserError(
          f'batch: expected the feature {name}, found {sorted(batch)}; task_feature_lengths must '
          'have inputs and targets'
      )
    return batch[name]

  decoder_inputs = feature('decoder_input_tokens')
  if isinstance(model, models.DecoderOnlyModel):
    causal_attention = feature('decoder_causal_attention')
    decoder_inputs = decoder_inputs * causal_attention
    inputs = decoder_inputs[:, 1:]
    return Prompt(inputs, decoder_inputs, jnp.sum(inputs != 0, axis=1), causal_attention)
  # An EOS would end the row behind the prompt.
  is_prompt = prompt_with_targets & (decoder_inputs != model.output_vocabulary.eos_id)
  return Prompt(feature('encoder_input_tokens'), decoder_inputs * is_prompt)


def prepare(
    model: models.BaseTransformerModel, params: Any, prompt: Prompt, *, num_slots: int,
    num_decodes: int, vocab_size: int,
) -> DecodingModel:
  """Makes a model ready to decode the sequences of `prompt`, whichever kind of model it is.

  Args:
    model: an encoder-decoder or a decoder-only model.
    params: its parameters.
    prompt: what the target's batch asks for.
    num_slots: places of the decoded sequences that are written, see `decoding.cache_slots`.
    num_decodes: `N`.
    vocab_size: logits beyond it are padding and cut off.

  Returns:
    The model, on the places of `prompt.decoder_inputs`.

  Raises:
    UserError: the model, or the module in it, is of no known kind.
  """
  if isinstance(model, models.DecoderOnlyModel):
    if prompt.is_decoder_only:
      found = _prepare_decoder_only(model, params, prompt.decoder_inputs, prompt.causal_attention,
                                    num_slots)
    else:
      found = _prepare_language_model_of_inputs(model, params, prompt, num_slots, num_decodes)
  elif isinstance(model, models.EncoderDecoderModel):
    found = _prepare_encoder_decoder(model, params, prompt.inputs, num_slots, num_decodes)
    if prompt.is_decoder_only:
      # The start token takes the place of the prefix's last token.
      first = decoding.expand_rows(prompt.initial_index, num_decodes)
      found = _moved(found, -first, first, jnp.zeros_like(first))
  else:
    raise UserError(
        'model: expected a t5x.models.EncoderDecoderModel or DecoderOnlyModel, found '
        f'{type(model).__module__}.{type(model).__name__}'
    )

  def tokens_to_logits(tokens, positions, cache):
    logits, cache = found.tokens_to_logits(tokens, positions, cache)
    if logits.shape[-1] < vocab_size:
      raise UserError(
          f'{type(model.module).__name__} vocab_size: expected at least {vocab_size} (the '
          f"vocabulary's), found {logits.shape[-1]}"
      )
    return logits[..., :vocab_size].astype(jnp.float32), cache

  return dataclasses.replace(found, tokens_to_logits=tokens_to_logits)


def _prepare_encoder_decoder(model, params, encoder_input_tokens, num_slots, num_decodes):
  module = model.module
  if hasattr(module, 'decode_step'):
    cache = module.apply(
        {'params': params}, encoder_input_tokens, num_slots, method=module.init_cache)
    step = lambda tokens, positions, cache: module.apply(
        {'params': params}, tokens, positions, cache, method=module.decode_step)
    return DecodingModel(step, cache)

  encoded = module.apply(
      {'params': params}, encoder_input_tokens, enable_dropout=False, method=module.encode)
  slots = jnp.ones((encoder_input_tokens.shape[0], num_slots), jnp.int32)
  cache = _kv_cache(
      model, params, encoded_inputs=encoded, encoder_input_tokens=encoder_input_tokens,
      decoder_input_tokens=slots)

  def apply(tokens, positions, cache, encoded, encoder_input_tokens, **kwargs):
    return multi_token.apply(
        module, params, cache, positions, encoded, encoder_input_tokens, tokens, tokens,
        max_decode_length=num_slots, method=module.decode, **kwargs)

  _, cache = apply(slots[:, :1], slots[:, 0] * 0, cache, encoded, encoder_input_tokens,
                   fills_cross_attention=True)
  # Only the padding mask reads these: the keys and values of `encoded` are cached.
  rows = decoding.expand_rows((encoded, encoder_input_tokens), num_decodes)
  step = lambda tokens, positions, cache: apply(tokens, positions, cache, *rows)
  return DecodingModel(step, cache, _cache_offset(module))


def _prepare_decoder_only(model, params, inputs, causal_attention, num_slots):
  module = model.module
  pad = lambda x: jnp.pad(x, ((0, 0), (0, num_slots - x.shape[1])))
  cache = _kv_cache(model, params, pad(inputs), pad(causal_attention))

  def step(tokens, positions, cache):
    return multi_token.apply(
        module, params, cache, positions, tokens, tokens, max_decode_length=num_slots)

  return DecodingModel(step, cache, _cache_offset(module))


def _prepare_language_model_of_inputs(model, params, prompt, num_slots, num_decodes):
  """A decoder-only model that reads an encoder's inputs as the prefix of the targets."""
  length = prompt.inputs.shape[1]
  inputs = jnp.pad(prompt.inputs, ((0, 0), (1, num_slots)))
  lengths = jnp.sum(prompt.inputs != 0, axis=1)
  causal_attention = jnp.arange(inputs.shape[1]) <= lengths[:, None]
  found = _prepare_decoder_only(
      model, params, inputs, causal_attention.astype(jnp.int32), num_slots + length + 1)
  last = jnp.take_along_axis(inputs, lengths[:, None], axis=1)[:, 0]
  offsets, last = decoding.expand_rows((lengths, last), num_decodes)
  # The prefix's last token takes the place of the start token.
  return _moved(found, offsets, jnp.zeros_like(offsets), last)


def _kv_cache(model, *args, **kwargs):
  """What T5X makes of the model's collection `cache`."""
  try:
    cache, _ = model._compute_kv_cache(*args, **kwargs)
  except KeyError as error:
    if error.args != ('cache',):
      raise
    raise multi_token.unknown_module(model.module, 'no cache') from error
  return cache


def _moved(model, offsets, first_positions, first_tokens):
  """`model` on other places: its own are `offsets` `[B * N]` later.

  Args:
    model: the model.
    offsets: int32 `[B * N]`.
    first_positions: int32 `[B * N]`, the place decoding starts from.
    first_tokens: int32 `[B * N]`, what the model reads there.
  """
  def step(tokens, positions, cache):
    places = positions[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    tokens = jnp.where(places == first_positions[:, None], first_tokens[:, None], tokens)
    return model.tokens_to_logits(tokens, positions + offsets, cache)

  return dataclasses.replace(model, tokens_to_logits=step)


def _cache_offset(module: nn.Module) -> int:
  """The axis of the batch in cached variables: layers of a scan stand before it (as in T5X)."""
  return int(bool(getattr(module, 'scan_layers', False)))


def inputs_for(
    model: models.BaseTransformerModel, input_shapes: dict[str, Any],
    input_types: dict[str, Any] | None,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
  """Shapes and types to initialise `model` from those of a batch for either kind of model.

  Args:
    model: an encoder-decoder or a decoder-only model.
    input_shapes: shape of each feature.
    input_types: dtype of each feature, or None.

  Returns:
    Both, with the encoder's feature in place of or beside the decoder's where `model` has one.
  """
  features = dict.fromkeys(('encoder_input_tokens', 'decoder_input_tokens'))
  if isinstance(model, models.EncoderDecoderModel) and 'encoder_input_tokens' not in input_shapes:
    fill = lambda found: dict.fromkeys(features, found['decoder_input_tokens'])
    return fill(input_shapes), input_types and fill(input_types)
  return input_shapes, input_types
