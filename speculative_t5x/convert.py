r"""Converts checkpoints between T5X, Orbax and Hugging Face, and says what they hold.

    python -m speculative_t5x.convert google/flan-t5-small checkpoint_0 --to=t5x
    python -m speculative_t5x.convert checkpoint_1000000 my_model --to=huggingface
    python -m speculative_t5x.convert --inspect checkpoint_1000000

Parameters keep their values and dtype. The destination appears under its name only when it is
complete. A T5X or Orbax checkpoint has no configuration: what it cannot hold is printed.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Iterable, Sequence

import flax
import numpy as np

from speculative_t5x import checkpoints, families, huggingface, paths, reading
from speculative_t5x.errors import UserError
from speculative_t5x.families import Description

LAYOUTS = ('t5x', 'huggingface', 'orbax')


def convert(
    source: str | os.PathLike, destination: str | os.PathLike, to: str, *, step: int = 0
) -> tuple[Description, Description]:
  """Writes a checkpoint in another layout, with the same parameters.

  Args:
    source: T5X, Orbax or Hugging Face checkpoint, local or `gs://`.
    destination: local directory to create; T5X expects the name `checkpoint_<step>`.
    to: 't5x', 'huggingface' or 'orbax'.
    step: training step to record, of T5X and Orbax.

  Returns:
    The descriptions of the source and of what was written.

  Raises:
    UserError: the source cannot be read, the destination exists, or the layout cannot hold it.
  """
  if to not in LAYOUTS:
    raise UserError(f'--to: expected {", ".join(LAYOUTS)}, found {to}')
  with checkpoints.new_folder(destination) as folder:
    found = families.describe(source)
    values = reading.read_all(found.path, found.arrays)
    if to == 't5x':
      checkpoints.write_native(folder, values, step=step)
    elif to == 'orbax':
      _write_orbax(folder, values, step)
    else:
      eos_id = families.default_eos_id(found.family) if found.eos_id is None else found.eos_id
      huggingface.write_folder(
          folder, found.arrays, found.config, values, model_type=found.model_type, eos_id=eos_id)
  return found, families.describe(destination)


def _write_orbax(
    folder: pathlib.Path, values: Iterable[tuple[str, np.ndarray]], step: int
) -> None:
  """Writes T5X's Orbax layout: the state in a folder `state`. Holds all parameters at once."""
  try:
    import orbax.checkpoint as ocp
  except ImportError as error:
    raise UserError(
        "--to=orbax: expected the package 'orbax-checkpoint', which is not installed"
    ) from error
  params = flax.traverse_util.unflatten_dict(dict(values), sep='/')
  tree = {'target': params, 'state': {'step': np.asarray(step, np.int32)}, 'flax_mutables': {}}
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True)) as checkpointer:
    checkpointer.save(folder.absolute() / 'state', args=ocp.args.PyTreeSave(tree))


def lost(source: Description, written: Description) -> list[str]:
  """What of a source its conversion cannot say, one line each."""
  lines = [
      f'{name} {value}'
      for name, value in vars(source.config).items()
      if name not in families.RUN_FIELDS and value != getattr(written.config, name)
  ]
  if source.eos_id not in (None, written.eos_id, families.default_eos_id(written.family)):
    lines.append(f'eos_token_id {source.eos_id}')
  return lines


def report(description: Description) -> str:
  """Several lines about a checkpoint, for a terminal."""
  config = description.config
  names = {'T5 1.1': 'T5 1.1 (or Flan-T5 or LM-adapted, which have its shapes)'}
  layers = f'{config.num_encoder_layers} encoder, {config.num_decoder_layers} decoder'
  bias = 'in every layer' if config.relative_bias_per_layer else 'shared by the layers'
  tied = 'untied, with a kernel of its own'
  if config.logits_via_embedding:
    scale = 'scaled' if config.scale_logits_via_embedding else 'not scaled'
    tied = f'tied to the embedding, {scale}'
  drafts = families.drafts_for(description)
  standard = families.VOCAB_SIZES.get(description.family) == config.vocab_size
  none = 'no published size is smaller' if standard else (
      f'no published size has a vocabulary of {config.vocab_size:,}')
  rows = {
      'layout': description.layout,
      'family': names.get(description.family, description.family),
      'parameters': f'{description.num_parameters:,}',
      'dtype': ', '.join(description.dtypes),
      'vocabulary size': f'{config.vocab_size:,}',
      'EOS id': 'not in the checkpoint' if description.eos_id is None else description.eos_id,
      'layers': layers,
      'emb_dim': config.emb_dim,
      'heads': f'{config.num_heads} of {config.head_dim}',
      'mlp': f'{config.mlp_dim}, {" × ".join(config.mlp_activations)}',
      'relative bias': f'{bias}, {config.relative_attention_num_buckets} buckets',
      'logits': tied,
      'possible drafts': ', '.join(
          f'{name} ({count / 1e6:,.0f} M)' for name, count in drafts.items()) or none,
  }
  width = max(map(len, rows))
  return '\n'.join(f'{name:<{width}}  {value}' for name, value in rows.items())


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code, 2 after one line on standard error if refused."""
  parser = argparse.ArgumentParser(
      prog='python -m speculative_t5x.convert', description=__doc__.splitlines()[0])
  parser.add_argument('source', nargs='?', help='checkpoint to read, local or gs://')
  parser.add_argument('destination', nargs='?', help='local directory to create')
  parser.add_argument('--to', choices=LAYOUTS, help='layout of the destination')
  parser.add_argument('--step', type=int, default=0, help='to record, of T5X and Orbax')
  parser.add_argument('--inspect', metavar='PATH', help='say what a checkpoint holds')
  args = parser.parse_args(arguments)
  converts = (args.source, args.destination, args.to)
  if args.inspect is None and None in converts:
    parser.error('expected SOURCE DESTINATION --to=…, or --inspect PATH')
  if args.inspect is not None and any(converts):
    parser.error('--inspect: expected no SOURCE, DESTINATION and --to beside it')
  try:
    if args.inspect is not None:
      print(report(families.describe(paths.resolve(args.inspect))))
      return 0
    source, written = convert(
        paths.resolve(args.source), args.destination, args.to, step=args.step)
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  print(f'{args.destination}: {written.layout}, {written.family}, '
        f'{written.num_parameters:,} parameters in {", ".join(written.dtypes)}')
  if settings := lost(source, written):
    print(f'note: {written.layout} has no place for these, so set them where the network is '
          f'configured: {", ".join(settings)}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
