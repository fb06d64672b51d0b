"""Sizes and choices of one T5 network."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

ACTIVATIONS = ('relu', 'gelu', 'silu', 'swish', 'linear')


@dataclasses.dataclass(frozen=True)
class T5Config:
  """Hyperparameters of a T5, with the field names of T5X's `T5Config`.

  Attributes:
    vocab_size: rows of the token embedding; at least the vocabulary's size.
    dtype: dtype of activations, 'float32' or 'bfloat16'. Logits, attention weights before the
      softmax and layer-norm statistics are float32 whatever this says.
    emb_dim: width of the residual stream.
    num_heads: attention heads.
    num_encoder_layers: encoder depth; 0 is a decoder-only network, without cross-attention.
    num_decoder_layers: decoder depth; may differ from the encoder's.
    head_dim: width of one head. `num_heads * head_dim` need not equal `emb_dim`.
    mlp_dim: hidden width of the feed-forward block.
    mlp_activations: one name (T5 1.0: `('relu',)`, kernel `wi`) or two (T5 1.1:
      `('gelu', 'linear')`, kernels `wi_0` and `wi_1`, multiplied).
    dropout_rate: probability of dropping a unit while training.
    logits_via_embedding: True ties the output projection to the embedding (T5 1.0), scaled by
      `emb_dim ** -0.5`; False gives it a kernel of its own (T5 1.1).
    relative_bias_per_layer: True gives every layer its own table of relative position biases
      (umT5); False shares one in the encoder and one in the decoder.
    relative_attention_num_buckets: columns of such a table.
    relative_attention_max_distance: distances from here on share the last bucket.
    layer_norm_epsilon: added to the mean square in every layer norm.
    scale_logits_via_embedding: False leaves out the scale of tied logits, as configurations of
      transformers may ask for.

  Raises:
    ValueError: a value is out of range, or an activation is unknown.
  """

  vocab_size: int
  dtype: Any = 'float32'
  emb_dim: int = 512
  num_heads: int = 8
  num_encoder_layers: int = 6
  num_decoder_layers: int = 6
  head_dim: int = 64
  mlp_dim: int = 2048
  mlp_activations: Sequence[str] = ('relu',)
  dropout_rate: float = 0.0
  logits_via_embedding: bool = False
  relative_bias_per_layer: bool = False
  relative_attention_num_buckets: int = 32
  relative_attention_max_distance: int = 128
  layer_norm_epsilon: float = 1e-6
  scale_logits_via_embedding: bool = True

  def __post_init__(self):
    for name in (
        'vocab_size', 'emb_dim', 'num_heads', 'num_encoder_layers', 'num_decoder_layers',
        'head_dim', 'mlp_dim',
    ):
      least = 0 if name == 'num_encoder_layers' else 1
      if getattr(self, name) < least:
        raise ValueError(
            f'T5Config.{name}: expected at least {least}, found {getattr(self, name)}')
    if not 0.0 <= self.dropout_rate < 1.0:
      raise ValueError(f'T5Config.dropout_rate: expected [0, 1), found {self.dropout_rate}')
    buckets = self.relative_attention_num_buckets
    # The encoder halves them by direction, and half of what remains is of one distance each.
    if buckets < 4 or buckets % 4:
      raise ValueError(
          f'T5Config.relative_attention_num_buckets: expected a multiple of 4, found {buckets}'
      )
    if self.relative_attention_max_distance <= buckets // 2:
      raise ValueError(
          'T5Config.relative_attention_max_distance: expected more than half of the '
          f'{buckets} buckets, found {self.relative_attention_max_distance}'
      )
    if not 0.0 < self.layer_norm_epsilon < 1.0:
      raise ValueError(
          f'T5Config.layer_norm_epsilon: expected (0, 1), found {self.layer_norm_epsilon}'
      )
    unknown = [name for name in self.mlp_activations if name not in ACTIVATIONS]
    if unknown or not self.mlp_activations:
      raise ValueError(
          f'T5Config.mlp_activations: expected names among {ACTIVATIONS}, '
          f'found {tuple(self.mlp_activations)}'
      )
    # Flax modules are hashed with their attributes; gin hands over lists.
    object.__setattr__(self, 'mlp_activations', tuple(self.mlp_activations))
    object.__setattr__(self, 'dtype', jnp.dtype(self.dtype))
    if self.dtype not in (jnp.float32, jnp.bfloat16):
      raise ValueError(f'T5Config.dtype: expected float32 or bfloat16, found {self.dtype}')

  @property
  def is_decoder_only(self) -> bool:
    """Whether there is no encoder."""
    return self.num_encoder_layers == 0
