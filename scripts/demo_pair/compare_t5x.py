"""Times T5X's own decoding of the demo's target beside speculative decoding of the pair.

    python scripts/demo_pair/compare_t5x.py results/t5x.json

Needs T5X. Everything runs in one process through T5X models: T5X's `temperature_sample` on the
target alone, and `speculative_decode` on the pair, each with T5X's minimal network and with this
package's own; greedy, float32, restoration and translation, batch 1 and 8. Every batch is decoded
by all of them in turns; medians of the repeats are summed over the batches.
"""

import argparse
import functools
import json
import pathlib
import statistics
import time

import jax
import numpy as np
import seqio
from t5x import decoding as t5x_decoding
from t5x import models
from t5x.examples.t5 import network as t5x_network

from speculative_t5x import training
from speculative_t5x.demo import tasks
from speculative_t5x.demo.__main__ import load_demo_pair
from speculative_t5x.t5x_integration import decoding, network
from speculative_t5x.t5x_integration import model as model_lib

LENGTHS = {'inputs': 64, 'targets': 64}


def t5x_model(config, vocabulary, own):
  """An encoder-decoder model of the demo's sizes, on either network."""
  if own:
    module = network.Transformer(config)
  else:
    names = ('vocab_size', 'emb_dim', 'num_heads', 'num_encoder_layers', 'num_decoder_layers',
             'head_dim', 'mlp_dim', 'mlp_activations', 'logits_via_embedding')
    module = t5x_network.Transformer(t5x_network.T5Config(
        **{name: getattr(config, name) for name in names}, dropout_rate=0.0))
  return models.EncoderDecoderModel(module, vocabulary, vocabulary, None)


def batches(pair, task, batch_size, count):
  """Encoder inputs int32 `[batch_size, S]` of held-out sentences that fit, evenly spread."""
  ids = tasks.held_out_ids(pair.vocabulary, task, LENGTHS['inputs'], count)
  return [training.pad(ids[i : i + batch_size], LENGTHS['inputs'])
          for i in range(0, len(ids) - batch_size + 1, batch_size)]


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('output', type=pathlib.Path)
  parser.add_argument('--num_sentences', type=int, default=16)
  parser.add_argument('--gammas', type=int, nargs='+', default=[3, 7])
  parser.add_argument('--repeats', type=int, default=5)
  args = parser.parse_args()
  pair = load_demo_pair()
  vocabulary = seqio.SentencePieceVocabulary(pair.vocabulary.path, 0)
  params = {'target': pair.target.params, 'draft': pair.draft.params}
  greedy = {'temperature': 0.0, 'topk': 0}

  def predict(own, decode_fn, **kwargs):
    model = model_lib.SpeculativeModel(
        t5x_model(pair.target.module.config, vocabulary, own),
        t5x_model(pair.draft.module.config, vocabulary, own),
        decode_fn=functools.partial(decode_fn, **greedy), **kwargs)
    return jax.jit(model.predict_batch)

  ways = {}
  for network_name, own in (('T5X minimal', False), ('own', True)):
    ways[f'temperature_sample, {network_name} network'] = predict(
        own, t5x_decoding.temperature_sample)
    for gamma in args.gammas:
      ways[f'speculative_decode, {network_name} network, gamma {gamma}'] = predict(
          own, decoding.speculative_decode, gamma=gamma)
  baseline = next(iter(ways))

  records = []
  for task in tasks.PREFIXES:
    for batch_size in (1, 8):
      seconds, different, tokens = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0), 0
      for inputs in batches(pair, task, batch_size, args.num_sentences):
        blank = np.zeros((batch_size, LENGTHS['targets']), np.int32)
        batch = {'encoder_input_tokens': inputs, 'decoder_input_tokens': blank,
                 'decoder_target_tokens': blank}
        outputs = {name: np.asarray(way(params, batch)) for name, way in ways.items()}
        tokens += int(np.count_nonzero(outputs[baseline]))
        taken = {name: [] for name in ways}
        for _ in range(args.repeats):
          for name, way in ways.items():
            start = time.perf_counter()
            jax.block_until_ready(way(params, batch))
            taken[name].append(time.perf_counter() - start)
        for name in ways:
          seconds[name] += statistics.median(taken[name])
          different[name] += int(np.any(outputs[name] != outputs[baseline], axis=1).sum())
      for name in ways:
        records.append({
            'task': task, 'batch_size': batch_size, 'way': name, 'different': different[name],
            'tokens_per_second': round(tokens / seconds[name], 1),
            'factor': round(seconds[baseline] / seconds[name], 3),
        })
        print(records[-1], flush=True)
  args.output.write_text(json.dumps(records, indent=1) + '\n')


if __name__ == '__main__':
  main()
