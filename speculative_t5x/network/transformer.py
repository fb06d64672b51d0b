"""T5's encoder and decoder, and the decode step that speculative decoding needs.

The parameter tree is that of T5X's minimal network (`t5x/examples/t5/network.py`), so public T5X
checkpoints load unchanged. Decoding takes several tokens a call, every row at its own position:
see `Transformer.decode_step`.

`B` is the batch, `M` the tokens in one call, `S` the encoder length, `T` the cache slots, `E` the
width of the residual stream, `V` the rows of the embedding.
"""

from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax import linen as nn

from speculative_t5x.network import layers
from speculative_t5x.network.config import T5Config
from speculative_t5x.rows import write_rows
from speculative_t5x.step import TokensToLogits


@flax.struct.dataclass
class DecoderCache:
  """What the decoder keeps between steps; every array has the batch as its leading axis.

  Slots of the self-attention cache at or beyond a row's position are dead: masked by index and
  overwritten by later writes. Rolling back therefore means passing a smaller position.

  Attributes:
    self_keys: one `[B, H, T, K]` a layer.
    self_values: one `[B, H, T, K]` a layer.
    cross_keys: one `[B, H, S, K]` a layer, computed once from the encoder's output.
    cross_values: one `[B, H, S, K]` a layer.
    cross_bias: float32 `[B, 1, 1, S]`, the padding mask of the encoder's input.
  """

  self_keys: tuple[jax.Array, ...]
  self_values: tuple[jax.Array, ...]
  cross_keys: tuple[jax.Array, ...]
  cross_values: tuple[jax.Array, ...]
  cross_bias: jax.Array


def write_slots(cache: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
  """Overwrites slots `positions … positions + M - 1` of every row.

  Args:
    cache: `[B, H, T, K]`.
    new: `[B, H, M, K]`.
    positions: int32 `[B]`; `positions + M <= T`, or the write would be shifted.

  Returns:
    `[B, H, T, K]`.
  """
  new = new.astype(cache.dtype)
  if cache.shape[0] == 1:
    return jax.lax.dynamic_update_slice_in_dim(cache, new, positions[0], axis=2)
  return write_rows(cache, new, positions, axis=1)


class EncoderLayer(nn.Module):
  """Self-attention and feed-forward, each behind a layer norm and beside a residual."""

  config: T5Config

  @nn.compact
  def __call__(self, inputs: jax.Array, bias: jax.Array, *, deterministic: bool) -> jax.Array:
    """Maps `[B, S, E]` to `[B, S, E]`.

    `bias` is float32 `[B, H, S, S]`, or the mask `[B, 1, S or 1, S]` alone where every layer adds
    a relative bias of its own.
    """
    cfg = self.config
    if cfg.relative_bias_per_layer:
      positions = jnp.arange(inputs.shape[1], dtype=jnp.int32)[None]
      biases = relative_biases(cfg, bidirectional=True, name='relpos_bias')
      bias = bias + biases(positions, positions)
    dropout = nn.Dropout(rate=cfg.dropout_rate, broadcast_dims=(-2,))
    x = layer_norm(cfg, 'pre_attention_layer_norm')(inputs)
    attention = attention_block(cfg, 'attention')
    x = attention(x, *attention.keys_values(x), bias, deterministic=deterministic)
    x = dropout(x, deterministic=deterministic) + inputs
    y = layer_norm(cfg, 'pre_mlp_layer_norm')(x)
    y = mlp_block(cfg)(y, deterministic=deterministic)
    return dropout(y, deterministic=deterministic) + x


class DecoderLayer(nn.Module):
  """Self-attention, cross-attention where there is an encoder, and feed-forward."""

  config: T5Config

  def setup(self):
    cfg = self.config
    if cfg.relative_bias_per_layer:
      self.relpos_bias = relative_biases(cfg, bidirectional=False)
    self.pre_self_attention_layer_norm = layer_norm(cfg)
    self.self_attention = attention_block(cfg)
    if not cfg.is_decoder_only:
      self.pre_cross_attention_layer_norm = layer_norm(cfg)
      self.encoder_decoder_attention = attention_block(cfg)
    self.pre_mlp_layer_norm = layer_norm(cfg)
    self.mlp = mlp_block(cfg, name=None)
    self.dropout = nn.Dropout(rate=cfg.dropout_rate, broadcast_dims=(-2,))

  def relative_bias(self, query_positions, key_positions) -> jax.Array:
    """The layer's own bias, float32 `[B, H, M, T]`, of positions `[B, M]` and `[B, T]`."""
    return self.relpos_bias(query_positions, key_positions)

  def cross_keys_values(self, encoded: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values `[B, H, S, K]` of the encoder's output `[B, S, E]`."""
    return self.encoder_decoder_attention.keys_values(encoded)

  def __call__(self, inputs, self_bias, cross=None, *, cached=None, deterministic=True):
    """One decoder layer.

    Args:
      inputs: `[B, M, E]`.
      self_bias: float32 `[B, H, M, T]` (`T = M` without a cache).
      cross: `(keys [B, H, S, K], values [B, H, S, K], bias float32 [B, 1, 1 or M, S])` of the
        encoder's output; None without an encoder.
      cached: None, or `(keys [B, H, T, K], values [B, H, T, K], positions [B])` to write the new
        keys and values into and to attend to.
      deterministic: False applies dropout.

    Returns:
      outputs `[B, M, E]`, and the keys and values attended to.
    """
    x = self.pre_self_attention_layer_norm(inputs)
    keys, values = self.self_attention.keys_values(x)
    if cached is not None:
      cached_keys, cached_values, positions = cached
      keys = write_slots(cached_keys, keys, positions)
      values = write_slots(cached_values, values, positions)
    x = self.self_attention(x, keys, values, self_bias, deterministic=deterministic)
    x = self.dropout(x, deterministic=deterministic) + inputs
    if cross is not None:
      y = self.pre_cross_attention_layer_norm(x)
      y = self.encoder_decoder_attention(y, *cross, deterministic=deterministic)
      x = self.dropout(y, deterministic=deterministic) + x
    z = self.mlp(self.pre_mlp_layer_norm(x), deterministic=deterministic)
    return self.dropout(z, deterministic=deterministic) + x, keys, values


def layer_norm(cfg: T5Config, name: str | None = None) -> layers.LayerNorm:
  """The layer norm that `cfg` describes."""
  return layers.LayerNorm(epsilon=cfg.layer_norm_epsilon, dtype=cfg.dtype, name=name)


def relative_biases(
    cfg: T5Config, *, bidirectional: bool, name: str | None = None
) -> layers.RelativePositionBiases:
  """The relative position biases that `cfg` describes."""
  return layers.RelativePositionBiases(
      cfg.num_heads, bidirectional=bidirectional, num_buckets=cfg.relative_attention_num_buckets,
      max_distance=cfg.relative_attention_max_distance, name=name,
  )


def attention_block(cfg: T5Config, name: str | None = None) -> layers.Attention:
  """The attention that `cfg` describes."""
  return layers.Attention(
      num_heads=cfg.num_heads, head_dim=cfg.head_dim, emb_dim=cfg.emb_dim,
      dropout_rate=cfg.dropout_rate, dtype=cfg.dtype, name=name,
  )


def mlp_block(cfg: T5Config, name: str | None = 'mlp') -> layers.MlpBlock:
  """The feed-forward block that `cfg` describes."""
  return layers.MlpBlock(
      mlp_dim=cfg.mlp_dim, activations=cfg.mlp_activations, dropout_rate=cfg.dropout_rate,
      dtype=cfg.dtype, name=name,
  )


class Encoder(nn.Module):
  """A stack of encoder layers, under one relative position bias or each with its own."""

  config: T5Config

  @nn.compact
  def __call__(self, embedded: jax.Array, mask_bias: jax.Array, *, deterministic: bool):
    """Encodes `embedded` `[B, S, E]` under the padding mask `[B, 1, S or 1, S]`."""
    cfg = self.config
    bias = mask_bias
    if not cfg.relative_bias_per_layer:
      positions = jnp.arange(embedded.shape[1], dtype=jnp.int32)[None]
      biases = relative_biases(cfg, bidirectional=True, name='relpos_bias')
      bias = bias + biases(positions, positions)
    dropout = nn.Dropout(rate=cfg.dropout_rate, broadcast_dims=(-2,))
    x = dropout(embedded, deterministic=deterministic)
    for index in range(cfg.num_encoder_layers):
      x = EncoderLayer(cfg, name=f'layers_{index}')(x, bias, deterministic=deterministic)
    x = layer_norm(cfg, 'encoder_norm')(x)
    return nn.Dropout(rate=cfg.dropout_rate)(x, deterministic=deterministic)


class Decoder(nn.Module):
  """A stack of decoder layers, their relative position biases, and the output projection.

  Attributes:
    config: sizes and choices.
    shared_embedding: the encoder's; None gives the decoder its own, as T5X's decoder-only network
      has it.
  """

  config: T5Config
  shared_embedding: nn.Module | None = None

  def setup(self):
    cfg = self.config
    if self.shared_embedding is None:
      self.token_embedder = layers.Embed(cfg.vocab_size, cfg.emb_dim, dtype=cfg.dtype)
    self.layers = [DecoderLayer(cfg) for _ in range(cfg.num_decoder_layers)]
    if not cfg.relative_bias_per_layer:
      self.relpos_bias = relative_biases(cfg, bidirectional=False)
    self.decoder_norm = layer_norm(cfg)
    if not cfg.logits_via_embedding:
      self.logits_dense = layers.LogitsDense(cfg.vocab_size)
    self.dropout = nn.Dropout(rate=cfg.dropout_rate, broadcast_dims=(-2,))

  @property
  def embedding(self) -> nn.Module:
    """The token embedding."""
    return self.token_embedder if self.shared_embedding is None else self.shared_embedding

  def cross_keys_values(self, encoded):
    """Cross-attention keys and values of every layer."""
    return zip(*(layer.cross_keys_values(encoded) for layer in self.layers), strict=True)

  def self_biases(self, query_positions, key_positions):
    """Causal mask and relative bias of every layer.

    Each is float32 `[B, H, M, T]`, of positions `[B, M]` and `[B, T]`.
    """
    visible = key_positions[:, None, None, :] <= query_positions[:, None, :, None]
    masked = lambda bias: jnp.where(visible, bias, layers.MASKED)
    if self.config.relative_bias_per_layer:
      return [masked(x.relative_bias(query_positions, key_positions)) for x in self.layers]
    return [masked(self.relpos_bias(query_positions, key_positions))] * len(self.layers)

  def logits(self, x):
    """Final norm and output projection: `[B, M, E]` to float32 `[B, M, V]`."""
    x = self.decoder_norm(x)
    if self.config.logits_via_embedding:
      logits = self.embedding.attend(x)
      if self.config.scale_logits_via_embedding:
        logits = logits / jnp.sqrt(jnp.float32(x.shape[-1]))
      return logits
    return self.logits_dense(x)

  def teacher_forced(self, tokens, encoded=None, cross_bias=None, *, deterministic):
    """Logits `[B, M, V]` of all positions of `tokens` `[B, M]` at once.

    `encoded` `[B, S, E]` and its mask are None without an encoder.
    """
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    self_biases = self.self_biases(positions, positions)
    x = self.dropout(self.embedding(tokens), deterministic=deterministic)
    for layer, self_bias in zip(self.layers, self_biases, strict=True):
      cross = None
      if encoded is not None:
        cross = *layer.cross_keys_values(encoded), cross_bias
      x, _, _ = layer(x, self_bias, cross, deterministic=deterministic)
    return self.logits(self.dropout(x, deterministic=deterministic))

  def decode_step(self, tokens, positions, cache, crosses):
    """See `Transformer.decode_step`; `crosses` is of `DecoderLayer`'s `cross`, one a layer."""
    query_positions = positions[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    slots = jnp.arange(cache.self_keys[0].shape[2], dtype=jnp.int32)[None]
    self_biases = self.self_biases(query_positions, slots)
    x = self.embedding(tokens)
    new_keys, new_values = [], []
    for index, layer in enumerate(self.layers):
      x, keys, values = layer(
          x, self_biases[index], crosses[index],
          cached=(cache.self_keys[index], cache.self_values[index], positions),
      )
      new_keys.append(keys)
      new_values.append(values)
    cache = cache.replace(self_keys=tuple(new_keys), self_values=tuple(new_values))
    return self.logits(x), cache


class Transformer(nn.Module):
  """An encoder-decoder T5."""

  config: T5Config

  def setup(self):
    cfg = self.config
    if cfg.is_decoder_only:
      raise ValueError('Transformer: expected num_encoder_layers of at least 1 (DecoderOnly has no '
                       'encoder), found 0')
    self.token_embedder = layers.Embed(cfg.vocab_size, cfg.emb_dim, dtype=cfg.dtype)
    self.encoder = Encoder(cfg)
    self.decoder = Decoder(cfg, shared_embedding=self.token_embedder)

  def encode(self, encoder_input_tokens: jax.Array, *, enable_dropout: bool = False) -> jax.Array:
    """Encodes `encoder_input_tokens` `[B, S]` int32, padded with 0; returns `[B, S, E]`."""
    return self.encoder(
        self.token_embedder(encoder_input_tokens), padding_bias(encoder_input_tokens),
        deterministic=not enable_dropout,
    )

  def decode(
      self, encoded: jax.Array, encoder_input_tokens: jax.Array, decoder_input_tokens: jax.Array,
      *, enable_dropout: bool = False,
  ) -> jax.Array:
    """Teacher-forced decoding.

    Args:
      encoded: `[B, S, E]`.
      encoder_input_tokens: int32 `[B, S]`, for the padding mask.
      decoder_input_tokens: int32 `[B, M]`, the targets shifted right behind a 0.
      enable_dropout: True while training.

    Returns:
      float32 logits `[B, M, V]`.
    """
    return self.decoder.teacher_forced(
        decoder_input_tokens, encoded, padding_bias(encoder_input_tokens),
        deterministic=not enable_dropout,
    )

  def __call__(
      self, encoder_input_tokens: jax.Array, decoder_input_tokens: jax.Array,
      *, enable_dropout: bool = False,
  ) -> jax.Array:
    """`encode`, then `decode`: float32 logits `[B, M, V]`."""
    encoded = self.encode(encoder_input_tokens, enable_dropout=enable_dropout)
    return self.decode(
        encoded, encoder_input_tokens, decoder_input_tokens, enable_dropout=enable_dropout
    )

  def init_cache(self, encoder_input_tokens: jax.Array, num_slots: int) -> DecoderCache:
    """Encodes the inputs and prepares decoding.

    Args:
      encoder_input_tokens: int32 `[B, S]`, padded with 0.
      num_slots: length of the self-attention cache; at least the largest position ever written,
        plus one.

    Returns:
      A `DecoderCache` with empty self-attention and filled cross-attention.
    """
    encoded = self.encode(encoder_input_tokens, enable_dropout=False)
    return self.start_decoding(encoded, encoder_input_tokens, num_slots)

  def start_decoding(
      self, encoded: jax.Array, encoder_input_tokens: jax.Array, num_slots: int
  ) -> DecoderCache:
    """`init_cache` of inputs that are encoded already, `[B, S, E]`."""
    cfg = self.config
    cross_keys, cross_values = self.decoder.cross_keys_values(encoded)
    shape = (encoder_input_tokens.shape[0], cfg.num_heads, num_slots, cfg.head_dim)
    empty = tuple(jnp.zeros(shape, cfg.dtype) for _ in range(cfg.num_decoder_layers))
    return DecoderCache(
        self_keys=empty, self_values=empty, cross_keys=tuple(cross_keys),
        cross_values=tuple(cross_values), cross_bias=padding_bias(encoder_input_tokens),
    )

  def decode_step(
      self, tokens: jax.Array, positions: jax.Array, cache: DecoderCache
  ) -> tuple[jax.Array, DecoderCache]:
    """Decodes `M` tokens of every row in one call.

    Args:
      tokens: int32 `[B, M]`.
      positions: int32 `[B]`, where `tokens[:, 0]` stands in its row. The keys and values of the
        call overwrite slots `positions … positions + M - 1`; slots beyond are masked.
      cache: from `init_cache` or an earlier step.

    Returns:
      float32 logits `[B, M, V]` of the token after each of `tokens`, and the new cache.
    """
    crosses = [
        (*cross, cache.cross_bias)
        for cross in zip(cache.cross_keys, cache.cross_values, strict=True)
    ]
    return self.decoder.decode_step(tokens, positions, cache, crosses)


def padding_bias(encoder_input_tokens: jax.Array) -> jax.Array:
  """float32 `[B, 1, 1, S]`: 0 where there is a token, a large negative number on padding."""
  return jnp.where(encoder_input_tokens > 0, 0.0, layers.MASKED)[:, None, None, :]


def tokens_to_logits(module: nn.Module, params: Any, vocab_size: int) -> TokensToLogits:
  """The decode step of `module`, with or without an encoder, its logits cut to the vocabulary.

  Rows of the embedding beyond the vocabulary are padding: they get no probability, and a target
  and a draft padded differently agree on `V`.
  """
  def step(tokens, positions, cache):
    logits, cache = module.apply(
        {'params': params}, tokens, positions, cache, method='decode_step'
    )
    return logits[..., :vocab_size], cache

  return step
