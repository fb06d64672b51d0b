"""T5X's own decoding of a network, for the planner to compile beside this package's.

`B` is the batch, `S` the input length, `L` the output length, `V` the vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import seqio
from t5x import decoding, models
from t5x.examples.t5 import network

from speculative_t5x.network import T5Config
from speculative_t5x.sampling import SamplingRule


def target_alone(
    config: T5Config, rule: SamplingRule, output_length: int
) -> Callable[..., Any]:
  """Decoding with T5X's minimal network of a configuration's sizes and `temperature_sample`.

  Args:
    config: the sizes. What T5X's network has no field for is as T5X has it: none of it changes a
      program's memory or speed but biases per layer, which are a few numbers.
    rule: how tokens are drawn.
    output_length: `L`.

  Returns:
    `decode(params, inputs int32 [B, S], key uint32 [2])`, which takes the parameters of this
    package's network and returns sequences int32 `[B, L]` and scores `[B]`.
  """
  known = {field.name for field in dataclasses.fields(network.T5Config)}
  sizes = {name: value for name, value in vars(config).items() if name in known}
  module = network.Transformer(network.T5Config(**sizes))
  vocabulary = seqio.PassThroughVocabulary(config.vocab_size, eos_id=1)
  # Greedy is T5X's topk=1, its default.
  choice = {'topk': 1} if rule.is_greedy else {
      'temperature': rule.temperature, 'topk': rule.topk, 'topp': rule.topp}
  model = models.EncoderDecoderModel(
      module, vocabulary, vocabulary, optimizer_def=None,
      decode_fn=functools.partial(decoding.temperature_sample, **choice))

  def decode(params, inputs, key):
    batch = {
        'encoder_input_tokens': inputs,
        'decoder_input_tokens': jnp.zeros((inputs.shape[0], output_length), jnp.int32),
    }
    sequences, aux = model.predict_batch_with_aux(
        params, batch, rng=jax.random.wrap_key_data(key))
    return sequences, aux['scores']

  return decode
