"""T5 in Flax linen, with the parameter tree of T5X's minimal network."""

from speculative_t5x.network.config import T5Config
from speculative_t5x.network.transformer import DecoderCache, Transformer, tokens_to_logits

__all__ = ['DecoderCache', 'T5Config', 'Transformer', 'tokens_to_logits']
