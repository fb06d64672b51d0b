"""Speculative decoding beside T5X's own and transformers', on the same weights and inputs.

    pip install '.[benchmark]'
    python scripts/benchmark/benchmark.py scripts/benchmark/results

The demo pair on held-out sentences of both tasks, float32, in one process, all ways in turns: plain
and speculative decoding of this package, T5X's `temperature_sample` where T5X is importable, and
`transformers`' T5 with and without its `assistant_model` (which takes one input at a time). Greedy
outputs must be equal. Writes `benchmark.json` and `benchmark.md` into the folder.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import statistics
import sys
import tempfile

import jax
import numpy as np
import torch
import transformers

from speculative_t5x import convert, paths, timing, training
from speculative_t5x.demo import tasks
from speculative_t5x.demo.__main__ import load_demo_pair
from speculative_t5x.measure import report
from speculative_t5x.measure.subject import PairSubject
from speculative_t5x.sampling import SamplingRule

try:
  # Before the demo pair, which locks gin's configuration.
  import seqio
  from t5x import decoding as t5x_decoding
  from t5x import models as t5x_models
  from t5x.examples.t5 import network as t5x_network
except ImportError:
  t5x_models = None

LENGTH = 64
DEMO = pathlib.Path(paths.resolve('speculative_t5x/demo'))


def held_out(pair, task, count):
  """Inputs int32 `[count, LENGTH]`, evenly spread over the sentences that fit."""
  return training.pad(tasks.held_out_ids(pair.vocabulary, task, LENGTH, count), LENGTH)


def own_ways(subject, index, gammas):
  """Plain and speculative decoding of a batch, by name."""
  return {
      f'speculative, gamma {gamma}' if gamma else 'plain': functools.partial(
          lambda program: subject.run(program, index).sequences, subject.program(index, gamma))
      for gamma in (0, *gammas)
  }


def t5x_program(pair, temperature):
  """T5X's decoding of the target on T5X's minimal network; None without T5X."""
  if t5x_models is None:
    return None
  config = pair.target.module.config
  names = ('vocab_size', 'emb_dim', 'num_heads', 'num_encoder_layers', 'num_decoder_layers',
           'head_dim', 'mlp_dim', 'mlp_activations', 'logits_via_embedding')
  module = t5x_network.Transformer(t5x_network.T5Config(
      **{name: getattr(config, name) for name in names}, dropout_rate=0.0))
  vocabulary = seqio.SentencePieceVocabulary(pair.vocabulary.path, 0)
  model = t5x_models.EncoderDecoderModel(
      module, vocabulary, vocabulary, None, decode_fn=functools.partial(
          t5x_decoding.temperature_sample, temperature=temperature, topk=0))
  program = jax.jit(model.predict_batch)

  def decode(inputs):
    blank = np.zeros((len(inputs), LENGTH), np.int32)
    batch = {'encoder_input_tokens': inputs, 'decoder_input_tokens': blank,
             'decoder_target_tokens': blank}
    return program(pair.target.params, batch, jax.random.PRNGKey(0))

  return decode


def transformers_ways(models, inputs, temperature, gamma):
  """Generation by transformers, alone and with the draft as its assistant."""
  tokens = torch.tensor(inputs.astype(np.int64))
  arguments = {
      'input_ids': tokens, 'attention_mask': (tokens != 0).long(), 'max_new_tokens': LENGTH,
      'do_sample': temperature > 0, 'num_beams': 1,
  }
  if temperature:
    arguments |= {'temperature': temperature, 'top_k': 0}

  def generate(**more):
    with torch.inference_mode():
      found = models['target'].generate(**arguments, **more).numpy()[:, 1:]
    return np.pad(found, ((0, 0), (0, LENGTH - found.shape[1]))).astype(np.int32)

  ways = {'transformers': generate}
  if len(inputs) == 1:
    ways['transformers, assistant'] = functools.partial(generate, assistant_model=models['draft'])
    models['draft'].generation_config.num_assistant_tokens = gamma
    models['draft'].generation_config.num_assistant_tokens_schedule = 'constant'
  return ways


def compare(pair, models, inputs, batch_size, temperature, gammas, repeats):
  """Records of every way on one task's inputs."""
  seconds, tokens, different, count = {}, {}, {}, 0
  batches = [inputs[start : start + batch_size]
             for start in range(0, len(inputs) - batch_size + 1, batch_size)]
  subject = PairSubject(
      dataclasses.replace(pair, sampling=SamplingRule(temperature)), batches, LENGTH)
  t5x_decode = t5x_program(pair, temperature)
  for index, batch in enumerate(batches):
    ways = own_ways(subject, index, gammas)
    if t5x_decode is not None:
      ways['T5X temperature_sample'] = functools.partial(t5x_decode, batch)
    ways |= transformers_ways(models, batch, temperature, max(gammas))
    outputs = {name: np.asarray(way()) for name, way in ways.items()}
    count += batch_size
    for name, times in timing.race(ways, repeats).items():
      seconds[name] = seconds.get(name, 0.0) + statistics.median(times)
      tokens[name] = tokens.get(name, 0) + int(np.count_nonzero(outputs[name]))
      different[name] = different.get(name, 0) + int(
          np.any(outputs[name] != outputs['plain'], axis=1).sum())
  rate = {name: tokens[name] / seconds[name] for name in seconds}
  return [
      {'way': name, 'tokens_per_second': round(rate[name], 1),
       'factor': round(rate[name] / rate['plain'], 3), 'inputs': count,
       'different_outputs': None if temperature else different[name]}
      for name in seconds
  ]


def load_transformers(folder):
  """The demo's target and draft as transformers' models, by this package's conversion."""
  models = {}
  for name in ('target', 'draft'):
    [checkpoint] = (DEMO / name).glob('checkpoint_*')
    convert.convert(checkpoint, folder / name, 'huggingface')
    # The checkpoints are in bfloat16, and would be decoded in it.
    models[name] = transformers.T5ForConditionalGeneration.from_pretrained(
        folder / name, dtype=torch.float32).eval()
    # Its generation makes room in the decoder's cache for as many layers as the encoder has.
    models[name].config.num_layers = models[name].config.num_decoder_layers
  return models


def markdown(records, environment):
  """The records as tables, one a temperature and batch size."""
  versions = ', '.join(f'{name} {value}' for name, value in environment['versions'].items())
  lines = [
      f'{environment["processor"]}, {environment["cores"]} cores, {environment["date"]}; '
      f'{versions}. Tokens a second; in brackets the factor over plain decoding.', '',
  ]
  settings = sorted({(record['temperature'], record['batch_size']) for record in records})
  for temperature, batch_size in settings:
    chosen = [record for record in records
              if (record['temperature'], record['batch_size']) == (temperature, batch_size)]
    lines += [f'Temperature {temperature:g}, batch {batch_size}:', '',
              '| way | ' + ' | '.join(tasks.PREFIXES) + ' |', '| --- | ---: | ---: |']
    for way in dict.fromkeys(record['way'] for record in chosen):
      cells = [f'{record["tokens_per_second"]:.0f} ({record["factor"]:.2f})'
               for record in chosen if record['way'] == way]
      lines.append(f'| {way} | ' + ' | '.join(cells) + ' |')
    lines.append('')
  return '\n'.join(lines)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--num_sentences', type=int, default=16)
  parser.add_argument('--gammas', type=int, nargs='+', default=[3, 7])
  parser.add_argument('--batch_sizes', type=int, nargs='+', default=[1, 4, 16])
  parser.add_argument('--temperatures', type=float, nargs='+', default=[0.0, 1.0])
  parser.add_argument('--repeats', type=int, default=3)
  args = parser.parse_args()
  pair = load_demo_pair()
  environment = report.environment()
  environment['versions'] |= {
      name: importlib.metadata.version(name) for name in ('torch', 'transformers')}
  records = []
  with tempfile.TemporaryDirectory() as folder:
    models = load_transformers(pathlib.Path(folder))
    for temperature in args.temperatures:
      for batch_size in args.batch_sizes:
        for task in tasks.PREFIXES:
          for found in compare(
              pair, models, held_out(pair, task, args.num_sentences), batch_size, temperature,
              args.gammas, args.repeats):
            records.append({
                'temperature': temperature, 'batch_size': batch_size, 'task': task, **found})
            print(records[-1], flush=True)
  args.folder.mkdir(parents=True, exist_ok=True)
  (args.folder / 'benchmark.json').write_text(
      json.dumps({'environment': environment, 'records': records}, indent=1) + '\n')
  (args.folder / 'benchmark.md').write_text(markdown(records, environment))
  unequal = [record for record in records if record['different_outputs']]
  for record in unequal:
    print(f'error: greedy outputs differ: {record}', file=sys.stderr)
  return 1 if unequal else 0


if __name__ == '__main__':
  sys.exit(main())
