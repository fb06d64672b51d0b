"""Plain and speculative decoding at T5 XL and XXL size on one accelerator of 80 GB or more.

    python scripts/benchmark/accelerator.py prepare pair.npz
    python scripts/benchmark/accelerator.py run pair.npz results.json

`prepare` writes the demo pair's weights and held-out inputs to one file. `run` needs that file,
JAX, Flax and this package's folder, nothing else: it widens both models on the device (see
`speculative_t5x.widening`), so that text and acceptance are real at the costs of T5 1.1 XL and XXL
with T5 1.1 small, and compares both ways of decoding in bfloat16 for every temperature, batch and
gamma, in turns. It starts no comparison that its time would not do for.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import time

import flax
import jax
import jax.numpy as jnp
import numpy as np

from speculative_t5x import decoding, timing
from speculative_t5x.drafters import ModelDrafter
from speculative_t5x.network import T5Config, Transformer, tokens_to_logits
from speculative_t5x.sampling import SamplingRule
from speculative_t5x.widening import widen

T5_1_1 = {
    'tiny': {'emb_dim': 320, 'num_heads': 5, 'mlp_dim': 640, 'layers': 6},
    'small': {'emb_dim': 512, 'num_heads': 6, 'mlp_dim': 1024, 'layers': 8},
    'base': {'emb_dim': 768, 'num_heads': 12, 'mlp_dim': 2048, 'layers': 12},
    'large': {'emb_dim': 1024, 'num_heads': 16, 'mlp_dim': 2816, 'layers': 24},
    'xl': {'emb_dim': 2048, 'num_heads': 32, 'mlp_dim': 5120, 'layers': 24},
    'xxl': {'emb_dim': 4096, 'num_heads': 64, 'mlp_dim': 10240, 'layers': 24},
}
INPUT_LENGTH, OUTPUT_LENGTH = 64, 64


def wide_config(config, size, dtype):
  """A network of `size` around `config`."""
  sizes = dict(T5_1_1[size])
  layers = sizes.pop('layers')
  return dataclasses.replace(
      config, **sizes, head_dim=64, vocab_size=32128, num_encoder_layers=layers,
      num_decoder_layers=layers, logits_via_embedding=False, dtype=dtype)


def prepare(path):
  """Writes weights and inputs of the demo pair."""
  from speculative_t5x import training
  from speculative_t5x.demo import tasks
  from speculative_t5x.demo.__main__ import load_demo_pair

  pair = load_demo_pair()
  arrays = {}
  for name in ('target', 'draft'):
    model = getattr(pair, name)
    for key, leaf in flax.traverse_util.flatten_dict(model.params, sep='/').items():
      arrays[f'{name}/params/{key}'] = np.asarray(leaf)
    config = dataclasses.asdict(model.module.config) | {'dtype': 'float32'}
    arrays[f'{name}/config'] = np.array(json.dumps(config))
  for task in tasks.PREFIXES:
    ids = tasks.held_out_ids(pair.vocabulary, task, INPUT_LENGTH, 16)
    arrays[f'inputs/{task}'] = training.pad(ids, INPUT_LENGTH)
  arrays['vocab_size'] = np.array(pair.vocabulary.size)
  np.savez(path, **arrays)


def load(path, name, size, dtype):
  """The widened network and its parameters, on the device."""
  with np.load(path) as arrays:
    config = T5Config(**json.loads(str(arrays[f'{name}/config'])))
    prefix = f'{name}/params/'
    flat = {key.removeprefix(prefix): arrays[key] for key in arrays if key.startswith(prefix)}
  wide = wide_config(config, size, dtype)
  params = widen(flax.traverse_util.unflatten_dict(flat, sep='/'), config, wide,
                 jax.random.key(0), dtype=dtype)
  return Transformer(wide), params


def decode(models, vocab_size, gamma, rule, params, inputs, key):
  """Decodes a batch; pure."""
  slots = decoding.cache_slots(OUTPUT_LENGTH, gamma)
  cache = lambda name: models[name].apply(
      {'params': params[name]}, inputs, slots, method='init_cache')
  step = lambda name: tokens_to_logits(models[name], params[name], vocab_size)
  drafter = ModelDrafter(step('draft'), rule) if gamma else None
  result = decoding.speculative_decode(
      jnp.zeros((inputs.shape[0], OUTPUT_LENGTH), jnp.int32), cache('target'), step('target'), 1,
      gamma=gamma, drafter=drafter, draft_state=cache('draft') if gamma else None, rule=rule,
      decode_rng=key)
  return result.sequences[:, 0], result.statistics


def compare(models, params, inputs, vocab_size, gammas, temperature, batch_size, repeats):
  """Speed of every gamma over plain decoding on batches of the inputs."""
  batches = [inputs[start : start + batch_size]
             for start in range(0, len(inputs) - batch_size + 1, batch_size)]
  programs = {
      gamma: jax.jit(functools.partial(
          decode, models, vocab_size, gamma, SamplingRule(temperature)))
      for gamma in (0, *gammas)
  }
  totals = {gamma: {'seconds': 0.0, 'emitted': 0, 'rounds': 0, 'equal': 0} for gamma in programs}
  for index, batch in enumerate(batches):
    key = jax.random.key(index)
    runs = {gamma: functools.partial(program, params, jnp.asarray(batch), key)
            for gamma, program in programs.items()}
    outputs = {gamma: jax.device_get(run()) for gamma, run in runs.items()}
    for gamma, times in timing.race(runs, repeats).items():
      sequences, found = outputs[gamma]
      totals[gamma]['seconds'] += statistics.median(times)
      totals[gamma]['emitted'] += int(found.emitted.sum())
      totals[gamma]['rounds'] += int(found.rounds.sum())
      totals[gamma]['equal'] += int((sequences == outputs[0][0]).all(axis=1).sum())
  rate = {gamma: total['emitted'] / total['seconds'] for gamma, total in totals.items()}
  return [
      {'gamma': gamma, 'factor': round(rate[gamma] / rate[0], 3),
       'tokens_per_second': round(rate[gamma], 1),
       'tokens_a_round': round(total['emitted'] / total['rounds'], 3),
       'equal_outputs': total['equal'] if not temperature else None,
       'outputs': len(batches) * batch_size}
      for gamma, total in totals.items()
  ]


def run(args):
  """Compares until everything is done or the time is over; every record is written at once."""
  started, records, slowest = time.monotonic(), [], 0.0
  device = jax.devices()[0]
  environment = {'device': device.device_kind, 'jax': jax.__version__, 'flax': flax.__version__}
  with np.load(args.pair) as arrays:
    vocab_size = int(arrays['vocab_size'])
    inputs = {key.removeprefix('inputs/'): arrays[key][: args.num_inputs]
              for key in arrays if key.startswith('inputs/')}
  for size in args.sizes:
    models, params = {}, {}
    for name, of in (('target', size), ('draft', args.draft_size)):
      models[name], params[name] = load(args.pair, name, of, args.dtype)
    for batch_size in args.batch_sizes:
      for temperature in args.temperatures:
        for task, rows in inputs.items():
          begun = time.monotonic()
          if begun - started + slowest > args.seconds:
            print(f'{size}, batch {batch_size}, temperature {temperature:g}, {task}: no time left')
            continue
          for found in compare(models, params, rows, vocab_size, args.gammas, temperature,
                               batch_size, args.repeats):
            records.append({'size': size, 'draft_size': args.draft_size, 'task': task,
                            'batch_size': batch_size, 'temperature': temperature, **found})
            print(records[-1], flush=True)
          slowest = max(slowest, time.monotonic() - begun)
          content = {'environment': environment, 'dtype': args.dtype, 'records': records}
          args.output.write_text(json.dumps(content, indent=1) + '\n')


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  commands = parser.add_subparsers(dest='command', required=True)
  commands.add_parser('prepare').add_argument('pair', type=pathlib.Path)
  comparison = commands.add_parser('run')
  comparison.add_argument('pair', type=pathlib.Path)
  comparison.add_argument('output', type=pathlib.Path)
  comparison.add_argument('--sizes', nargs='+', default=['xxl', 'xl'], choices=T5_1_1)
  comparison.add_argument('--draft_size', default='small', choices=T5_1_1)
  comparison.add_argument('--dtype', default='bfloat16', choices=('bfloat16', 'float32'))
  comparison.add_argument('--gammas', type=int, nargs='+', default=[3, 5, 7])
  comparison.add_argument('--temperatures', type=float, nargs='+', default=[0.0, 1.0])
  comparison.add_argument('--batch_sizes', type=int, nargs='+', default=[1, 8])
  comparison.add_argument('--num_inputs', type=int, default=8)
  comparison.add_argument('--repeats', type=int, default=3)
  comparison.add_argument('--seconds', type=float, default=600, help='for all of it')
  args = parser.parse_args()
  if args.command == 'prepare':
    prepare(args.pair)
  else:
    run(args)


if __name__ == '__main__':
  main()
