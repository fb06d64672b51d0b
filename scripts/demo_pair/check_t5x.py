"""Decodes every held-out sentence through T5X and without it, and counts the outputs that differ.

    python scripts/demo_pair/check_t5x.py results/t5x_identity.json

Needs T5X. Runs `python -m t5x.infer` in the modes predict and predict_with_aux with speculative
decoding, and in predict with T5X's `temperature_sample` on the same target; then score on the
target's own outputs; and `python -m speculative_t5x.infer`. Greedy, float32. What is done is kept
in `--folder`: start it again to go on.
"""

import argparse
import json
import pathlib
import subprocess
import sys

import numpy as np

from speculative_t5x.demo import tasks


def run(module, *arguments):
  subprocess.run([sys.executable, '-m', module, *arguments], check=True)


def t5x_infer(source, folder, mode, *bindings):
  """Records of one run of T5X's command."""
  run('t5x.infer', '--gin_file=gin_configs/examples/demo_t5x.gin',
      f'--gin.INPUT_PATH="{source}"', f'--gin.INFER_OUTPUT_DIR="{folder}"',
      f'--gin.infer.mode="{mode}"', '--gin.BATCH_SIZE=16', '--gin.infer.checkpoint_period=5',
      *bindings)
  [path] = folder.glob(f'text_*-{mode}.jsonl-00000-of-00001')
  return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('output', type=pathlib.Path)
  parser.add_argument('--folder', type=pathlib.Path, default=pathlib.Path('runs/check_t5x'))
  parser.add_argument('--num_sentences', type=int, help='of each task; default: all')
  args = parser.parse_args()
  folder = args.folder.resolve()
  folder.mkdir(parents=True, exist_ok=True)
  pairs = tasks.read_pairs(tasks.HELD_OUT)
  inputs = [text for task in tasks.PREFIXES
            for text, _ in tasks.examples(pairs, task)[: args.num_sentences]]
  source = folder / 'inputs.txt'
  source.write_text('\n'.join(inputs) + '\n', encoding='utf-8')

  greedy = ('--gin.TEMPERATURE=0.0',)
  plain = t5x_infer(
      source, folder / 'plain', 'predict', *greedy,
      '--gin.model.SpeculativeModel.decode_fn=@t5x_decoding.temperature_sample')
  texts = {'temperature_sample': [record['prediction'] for record in plain]}
  for mode in ('predict', 'predict_with_aux'):
    records = t5x_infer(source, folder / mode, mode, *greedy)
    texts[f't5x.infer, {mode}'] = [record['prediction'] for record in records]
  run('speculative_t5x.infer', '--gin_file=gin_configs/examples/demo.gin', f'--input={source}',
      f'--output_dir={folder / "standalone"}', '--gin.BATCH_SIZE=16', *greedy)
  lines = (folder / 'standalone' / 'inferences.jsonl').read_text(encoding='utf-8').splitlines()
  standalone = [json.loads(line) for line in lines]
  texts['speculative_t5x.infer'] = [record['prediction'] for record in standalone]

  scored = folder / 'scored.jsonl'
  scored.write_text(''.join(
      json.dumps({'inputs': text, 'targets': target}) + '\n'
      for text, target in zip(inputs, texts['temperature_sample'], strict=True)), encoding='utf-8')
  scores = [record['score'] for record in t5x_infer(scored, folder / 'score', 'score', *greedy)]
  aux_scores = [record['aux']['scores'] for record in records]
  # An output that was cut has no EOS, and one that re-encodes otherwise is another sequence.
  gaps = np.abs(np.subtract(scores, aux_scores))

  baseline = texts.pop('temperature_sample')
  result = {
      'inputs': len(inputs),
      'different': {
          name: sum(a != b for a, b in zip(found, baseline, strict=True))
          for name, found in texts.items()
      },
      'scores_within_0.001': int(np.sum(gaps < 1e-3)),
  }
  args.output.write_text(json.dumps(result, indent=1) + '\n')
  print(json.dumps(result, indent=1))


if __name__ == '__main__':
  main()
