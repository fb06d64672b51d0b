"""The package's own network as a T5X module, for any T5X model, decode function and checkpoint."""

from typing import Any

import jax
import jax.numpy as jnp

from speculative_t5x import network
from speculative_t5x.network import T5Config

__all__ = ['T5Config', 'Transformer']


class Transformer(network.Transformer):
  """`speculative_t5x.network.Transformer` with the signatures of T5X's `Transformer`.

  Packed examples are refused: nothing here trains.
  """

  def encode(self, encoder_input_tokens, encoder_segment_ids=None, enable_dropout=False):
    """Encodes `[B, S]` int32; see T5X's `Transformer.encode`."""
    _refuse_packing(encoder_segment_ids=encoder_segment_ids)
    return super().encode(encoder_input_tokens, enable_dropout=enable_dropout)

  def decode(
      self, encoded, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens=None,
      encoder_segment_ids=None, decoder_segment_ids=None, decoder_positions=None,
      enable_dropout=False, decode=False, max_decode_length=None,
  ):
    """Logits `[B, M, V]`, teacher-forced or, with `decode`, of the next token.

    See T5X's `Transformer.decode`. What does not depend on the targets' padding is not masked by
    `decoder_target_tokens`: padded positions have no weight in any loss or score.

    Raises:
      ValueError: the examples are packed.
    """
    _refuse_packing(encoder_segment_ids=encoder_segment_ids,
                    decoder_segment_ids=decoder_segment_ids, decoder_positions=decoder_positions)
    if decode:
      return self._decode_one(encoded, encoder_input_tokens, decoder_input_tokens)
    return super().decode(
        encoded, encoder_input_tokens, decoder_input_tokens, enable_dropout=enable_dropout
    )

  def __call__(
      self, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens=None,
      encoder_segment_ids=None, decoder_segment_ids=None, encoder_positions=None,
      decoder_positions=None, *, enable_dropout=False, decode=False,
  ):
    """Logits `[B, M, V]`; see T5X's `Transformer.__call__`."""
    _refuse_packing(encoder_positions=encoder_positions)
    encoded = self.encode(encoder_input_tokens, encoder_segment_ids, enable_dropout)
    return self.decode(
        encoded, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens,
        encoder_segment_ids, decoder_segment_ids, decoder_positions, enable_dropout, decode,
    )

  def _decode_one(self, encoded, encoder_input_tokens, tokens) -> jax.Array:
    """One token at the cache's index, as T5X's own decode functions ask for it."""
    cache = self.start_decoding(encoded, encoder_input_tokens, tokens.shape[1])
    if not self.has_variable('cache', 'cache_index'):
      self._put_cache(cache, jnp.int32(0))
      return jnp.zeros((*tokens.shape, self.config.vocab_size))
    index = self.get_variable('cache', 'cache_index')
    logits, cache = self.decode_step(tokens, jnp.full(tokens.shape[0], index), cache.replace(
        self_keys=self.get_variable('cache', 'cached_key'),
        self_values=self.get_variable('cache', 'cached_value')))
    self._put_cache(cache, index + 1)
    return logits

  def _put_cache(self, cache, index) -> None:
    self.put_variable('cache', 'cached_key', cache.self_keys)
    self.put_variable('cache', 'cached_value', cache.self_values)
    self.put_variable('cache', 'cache_index', index)


def _refuse_packing(**features: Any) -> None:
  """Raises a ValueError that names the first feature of packed examples."""
  for name, feature in features.items():
    if feature is not None:
      raise ValueError(f'{name}: expected None (examples that are not packed), found {feature!r}')


