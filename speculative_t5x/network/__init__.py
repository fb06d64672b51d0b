"""T5 in Flax linen, with the parameter trees of T5X's minimal and decoder-only networks."""

from speculative_t5x.network.config import T5Config
from speculative_t5x.network.decoder_only import DecoderOnly
from speculative_t5x.network.transformer import DecoderCache, Transformer, tokens_to_logits

__all__ = ['DecoderCache', 'DecoderOnly', 'T5Config', 'Transformer', 'network_of',
           'tokens_to_logits']


def network_of(config: T5Config) -> Transformer | DecoderOnly:
  """The module of a configuration: with an encoder, or decoder-only."""
  return DecoderOnly(config) if config.is_decoder_only else Transformer(config)
