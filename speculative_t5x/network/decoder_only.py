"""A decoder-only T5: a language model that goes on from its inputs.

The parameter tree is that of T5X's decoder-only network (`t5x/examples/decoder_only/network.py`).
Attention is causal everywhere, as T5X's `DecoderOnlyModel` has it unless
`inputs_bidirectional_attention` is set.

`B` is the batch, `S` the input length, `M` the tokens in one call, `T` the cache slots, `V` the
rows of the embedding.
"""

import flax
import jax
import jax.numpy as jnp
from flax import linen as nn

from speculative_t5x.network.config import T5Config
from speculative_t5x.network.transformer import Decoder


@flax.struct.dataclass
class DecoderOnlyCache:
  """What is kept between steps; every array has the batch as its leading axis.

  The inputs stand before what is decoded, in the same cache. Slots behind a row's position are
  dead, as in `DecoderCache`.

  Attributes:
    self_keys: one `[B, H, T, K]` a layer.
    self_values: one `[B, H, T, K]` a layer.
    lengths: int32 `[B]`, tokens of each input: the slot that position 0 is written to.
    last_tokens: int32 `[B]`, the last token of each input; 0, the start token, of an empty one.
  """

  self_keys: tuple[jax.Array, ...]
  self_values: tuple[jax.Array, ...]
  lengths: jax.Array
  last_tokens: jax.Array


class DecoderOnly(nn.Module):
  """A decoder-only T5, which decodes as `Transformer` does: inputs first, then step by step."""

  config: T5Config

  def setup(self):
    if not self.config.is_decoder_only:
      raise ValueError('DecoderOnly: expected num_encoder_layers 0, found '
                       f'{self.config.num_encoder_layers}')
    self.decoder = Decoder(self.config)

  def __call__(
      self, decoder_input_tokens: jax.Array, decoder_target_tokens: jax.Array | None = None,
      *, enable_dropout: bool = False,
  ) -> jax.Array:
    """Teacher-forced logits.

    Args:
      decoder_input_tokens: int32 `[B, M]`, a text shifted right behind a 0.
      decoder_target_tokens: of T5X's signature; it masks padding there, which stands behind the
        text and which a causal mask hides already.
      enable_dropout: True while training.

    Returns:
      float32 logits `[B, M, V]` of the token after each.
    """
    del decoder_target_tokens
    return self.decoder.teacher_forced(decoder_input_tokens, deterministic=not enable_dropout)

  def init_cache(self, inputs: jax.Array, num_slots: int) -> DecoderOnlyCache:
    """Reads the inputs and prepares decoding behind them.

    Args:
      inputs: int32 `[B, S]`, what each output goes on from, padded with 0 at the end.
      num_slots: length of the cache behind the inputs; at least the largest position ever written,
        plus one.

    Returns:
      A cache of `S + num_slots` slots that holds all but the last token of each input.
    """
    cfg = self.config
    batch, length = inputs.shape
    lengths = jnp.sum(inputs != 0, axis=1, dtype=jnp.int32)
    # Behind the start token. The last token of an input is left to the first step, whose logits
    # are of the first token decoded.
    tokens = jnp.pad(inputs, ((0, 0), (1, 0)))
    last_tokens = jnp.take_along_axis(tokens, lengths[:, None], axis=1)[:, 0]
    empty = jnp.zeros((batch, cfg.num_heads, length + num_slots, cfg.head_dim), cfg.dtype)
    layers = (empty,) * cfg.num_decoder_layers
    cache = DecoderOnlyCache(layers, layers, lengths, last_tokens)
    if length:
      # What is written for padding is dead: it stands at or behind position 0.
      _, cache = self._step(tokens[:, :length], jnp.zeros(batch, jnp.int32), cache)
    return cache

  def decode_step(
      self, tokens: jax.Array, positions: jax.Array, cache: DecoderOnlyCache
  ) -> tuple[jax.Array, DecoderOnlyCache]:
    """Decodes `M` tokens of every row in one call; see `Transformer.decode_step`.

    Args:
      tokens: int32 `[B, M]`. At position 0, where the start token of an encoder-decoder stands,
        the last token of the input is read in its place.
      positions: int32 `[B]`, where `tokens[:, 0]` stands behind the row's input.
      cache: from `init_cache` or an earlier step.

    Returns:
      float32 logits `[B, M, V]` of the token after each of `tokens`, and the new cache.
    """
    places = positions[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    tokens = jnp.where(places == 0, cache.last_tokens[:, None], tokens)
    return self._step(tokens, cache.lengths + positions, cache)

  def _step(self, tokens, slots, cache):
    """The decoder on `tokens`, which are written to `slots` `[B]` and following."""
    return self.decoder.decode_step(tokens, slots, cache, [None] * self.config.num_decoder_layers)
