r"""Decodes a file of inputs: the command that needs no T5X.

    python -m speculative_t5x.infer --gin_file=gin_configs/examples/demo.gin \
        --input=sentences.txt --output_dir=out --gin.GAMMA=7 --gin.TEMPERATURE=0.0

Writes one record an input to `out/inferences.jsonl`. An interrupted run continues where it was.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import gin
import jax
import numpy as np
from tqdm import tqdm

from speculative_t5x import gin_command, run_output, weight_layouts
from speculative_t5x import inputs as inputs_lib
from speculative_t5x.errors import UserError
from speculative_t5x.pair import Pair, load_pair

STATISTICS = ('rounds', 'drafted', 'accepted', 'rejected', 'emitted')
LOG_SECONDS = 10


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  """Reads the command line; see `gin_command.parse`."""
  parser = argparse.ArgumentParser(
      prog='python -m speculative_t5x.infer', description=__doc__.splitlines()[0],
      allow_abbrev=False,
  )
  parser.add_argument('--input', help='text file, .jsonl file, or - for standard input')
  parser.add_argument('--output_dir', help='same as --gin.INFER_OUTPUT_DIR')
  args = gin_command.parse(parser, arguments)
  if args.output_dir is not None:
    args.bindings.append(f'INFER_OUTPUT_DIR = {args.output_dir!r}')
  return args


@gin.configurable
def infer(
    input_path: str | None,
    output_dir: str = gin.REQUIRED,
    mixture_or_task_name: str | None = None,
    split: str = 'test',
    task_feature_lengths: dict[str, int] = gin.REQUIRED,
    batch_size: int = 8,
    prefix: str = '',
    add_eos: bool = True,
    seed: int = 0,
    on_long_input: str = 'truncate',
) -> int:
  """Decodes all inputs into `output_dir`.

  Args:
    input_path: a file, or `-`; None reads the task.
    output_dir: folder of `inferences.jsonl` and `run.json`.
    mixture_or_task_name: a seqio task, used when there is no `input_path`.
    split: of the task.
    task_feature_lengths: tokens of `inputs` (with EOS) and `targets` at most. Of a decoder-only
      target, `targets` counts what it adds to its input.
    batch_size: inputs in one program run.
    prefix: put before every input, such as 'restore: '.
    add_eos: whether inputs end in EOS; False for a language model that goes on from them.
    seed: of the sampling; an input's output does not depend on the batch size.
    on_long_input: 'truncate' cuts an input that is too long and says so in its record; 'error'
      writes a record with an error instead.

  Returns:
    How many records carry an error.

  Raises:
    UserError: a setting or a file is not what it must be; nothing was decoded then.
  """
  if (input_path is None) == (mixture_or_task_name is None):
    raise UserError('inputs: expected either --input or MIXTURE_OR_TASK_NAME, found '
                    f'{input_path!r} and {mixture_or_task_name!r}')
  if not isinstance(task_feature_lengths, dict) or {'inputs', 'targets'} - {*task_feature_lengths}:
    raise UserError("TASK_FEATURE_LENGTHS: expected {'inputs': …, 'targets': …}, found "
                    f'{task_feature_lengths!r}')
  counts = {f'TASK_FEATURE_LENGTHS {name}': task_feature_lengths[name]
            for name in ('inputs', 'targets')} | {'BATCH_SIZE': batch_size}
  for name, value in counts.items():
    if not isinstance(value, int) or value < 1:
      raise UserError(f'{name}: expected a whole number from 1 on, found {value!r}')
  if on_long_input not in ('truncate', 'error'):
    raise UserError(f"on_long_input: expected 'truncate' or 'error', found {on_long_input!r}")
  if input_path is not None:
    examples, content = inputs_lib.read_file(input_path)
  else:
    examples, content = inputs_lib.read_task(mixture_or_task_name, split), None
  settings = {
      'config': gin.config_str(),
      'input': input_path or mixture_or_task_name,
      'input_sha256': content,
  }
  # Before weights are read, and without a trace in the folder should they be refused.
  run_output.check_folder(output_dir, settings)
  pair = load_pair()
  if jax.default_backend() == 'tpu':
    pair = weight_layouts.lay_out(
        pair, batch_size, task_feature_lengths['inputs'], task_feature_lengths['targets'])
  output = run_output.RunOutput(output_dir, settings)
  try:
    return decode_all(
        pair, examples, output, batch_size=batch_size, lengths=task_feature_lengths, prefix=prefix,
        add_eos=add_eos, seed=seed, on_long_input=on_long_input)
  finally:
    output.close()


def decode_all(
    pair: Pair, examples: Iterator[inputs_lib.Example], output: run_output.RunOutput, *,
    batch_size: int, lengths: dict[str, int], prefix: str, seed: int, on_long_input: str,
    add_eos: bool = True,
) -> int:
  """Decodes `examples` from the first one that `output` lacks; see `infer`."""
  remaining = itertools.islice(enumerate(examples), output.done, None)
  if output.done:
    print(f'continuing behind {output.done} records', file=sys.stderr)
  is_terminal = sys.stderr.isatty()
  bar = tqdm(unit=' inputs', initial=output.done, disable=not is_terminal)
  errors, written, started, logged = 0, 0, time.monotonic(), time.monotonic()
  while batch := list(itertools.islice(remaining, batch_size)):
    records = decode_batch(
        pair, batch, batch_size=batch_size, lengths=lengths, prefix=prefix, seed=seed,
        on_long_input=on_long_input, add_eos=add_eos)
    output.write(records)
    for record in records:
      for kind in ('error', 'warning'):
        if kind in record:
          tqdm.write(f'{kind}: {record[kind]}', file=sys.stderr)
    errors += sum('error' in record for record in records)
    written += len(records)
    bar.update(len(records))
    if not is_terminal and time.monotonic() - logged > LOG_SECONDS:
      logged = time.monotonic()
      print(f'{output.done + written} inputs, {written / (logged - started):.1f} a second',
            file=sys.stderr, flush=True)
  bar.close()
  print(f'{output.done + written} inputs done, {errors} with errors', file=sys.stderr)
  return errors


def decode_batch(
    pair: Pair, batch: Sequence[tuple[int, inputs_lib.Example]], *, batch_size: int,
    lengths: dict[str, int], prefix: str, seed: int, on_long_input: str, add_eos: bool = True,
) -> list[dict[str, Any]]:
  """Records of a batch of `(number, example)`; rows are padded so that one program serves all."""
  records, rows = [], []
  for number, example in batch:
    record = {'inputs': example.inputs, **example.extra}
    records.append(record)
    if example.error is not None:
      record.update(empty_result(pair), error=example.error)
      continue
    if not example.inputs:
      record.update(empty_result(pair))
      continue
    end = [pair.vocabulary.eos_id] if add_eos else []
    ids = [*pair.vocabulary.encode(prefix + example.inputs), *end]
    if len(ids) > lengths['inputs']:
      message = (f'input {number + 1}: expected at most {lengths["inputs"]} tokens, '
                 f'found {len(ids)}')
      if on_long_input == 'error':
        record.update(empty_result(pair), error=message)
        continue
      record.update(truncated=True, warning=f'{message}; truncated')
      ids = [*ids[: lengths['inputs'] - len(end)], *end]
    rows.append((number, ids, record))
  if not rows:
    return records
  tokens = np.zeros((batch_size, lengths['inputs']), np.int32)
  numbers = np.zeros(batch_size, np.int32)
  # Rows that only fill the batch are the first once more, and take no longer than it.
  for i, (number, ids, _) in enumerate(rows + rows[:1] * (batch_size - len(rows))):
    tokens[i, : len(ids)] = ids
    numbers[i] = number
  result = pair.predict(tokens, max_length=lengths['targets'], seed=seed, example_index=numbers)
  sequences, scores = np.asarray(result.sequences), np.asarray(result.scores)
  statistics = {name: np.asarray(getattr(result.statistics, name)) for name in STATISTICS}
  by_position = np.asarray(result.statistics.accepted_at_position)
  for i, (_, _, record) in enumerate(rows):
    texts = [pair.vocabulary.decode(sequence) for sequence in sequences[i]]
    record.update(
        prediction=texts[-1], score=float(scores[i, -1]),
        statistics={name: int(statistics[name][i, -1]) for name in STATISTICS}
        | {'accepted_at_position': by_position[i, -1].tolist()},
    )
    if pair.verification.lenience < 1.0:
      record['lenience'] = pair.verification.lenience
    if pair.num_decodes > 1:
      record.update(predictions=texts, scores=scores[i].tolist())
  return records


def empty_result(pair: Pair) -> dict[str, Any]:
  """What a record holds for an input without text."""
  zeros = dict.fromkeys(STATISTICS, 0) | {'accepted_at_position': [0] * pair.gamma}
  return {'prediction': '', 'score': 0.0, 'statistics': zeros}


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code."""
  def command():
    args = parse(arguments)
    gin_command.configure(args)
    # Inputs that could not be read are recorded, and told by the exit code.
    return 1 if infer(args.input) else 0

  return gin_command.run(command)


if __name__ == '__main__':
  sys.exit(main())
