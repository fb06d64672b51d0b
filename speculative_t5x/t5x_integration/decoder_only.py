"""T5X's decoder-only network from the sizes that the command without T5X reads."""

import dataclasses

from t5x.examples.decoder_only import network

from speculative_t5x.errors import UserError
from speculative_t5x.network import T5Config

# What T5X's network has under the same name.
SHARED = ('vocab_size', 'dtype', 'emb_dim', 'num_heads', 'head_dim', 'mlp_dim', 'mlp_activations',
          'dropout_rate', 'logits_via_embedding')


def module_of(config: T5Config) -> network.DecoderWrapper:
  """T5X's own module of a decoder-only configuration, for `t5x.models.DecoderOnlyModel`.

  Args:
    config: sizes and choices.

  Returns:
    The module.

  Raises:
    UserError: there is an encoder, or T5X's network lacks a choice that is set.
  """
  if not config.is_decoder_only:
    raise UserError(
        f'num_encoder_layers: expected 0 for a decoder-only model, found '
        f'{config.num_encoder_layers}')
  for field in dataclasses.fields(T5Config):
    if field.name in (*SHARED, 'num_encoder_layers', 'num_decoder_layers'):
      continue
    if (found := getattr(config, field.name)) != field.default:
      raise UserError(
          f"{field.name}: expected {field.default} as in T5X's decoder-only network, found {found}")
  return network.DecoderWrapper(network.TransformerConfig(
      num_layers=config.num_decoder_layers, **{name: getattr(config, name) for name in SHARED}))
