r"""Plans a pair on a TPU slice without a TPU: memory, traffic and speed as its compiler sees them.

    python -m speculative_t5x.tpu --gin_file=gin_configs/models/t5_1_1_xxl_small.gin \
        --topology=v5p:2x2x1 --partitions 1 --gamma=7 --json=plan.json

Nothing is run and no weights are read. Times are what memory traffic and operations, counted in the
compiled programs, take at the chip's best; cycles are the compiler's own estimates.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

# Configures networks in gin.
import speculative_t5x.pair  # noqa: F401
from speculative_t5x import gin_command
from speculative_t5x.errors import UserError
from speculative_t5x.network import T5Config
from speculative_t5x.tpu.plan import Plan, plan
from speculative_t5x.tpu.programs import Request

MIB = 2**20


def network_of(name: str, dtype: str) -> T5Config:
  """The network of the gin macro `name`, in `dtype`.

  Raises:
    UserError: there is none, or it has no encoder.
  """
  reference = gin_command.reference(name, 'network such as @T5Config()')
  config = dataclasses.replace(reference.scoped_configurable_fn(), dtype=dtype)
  if config.is_decoder_only:
    raise UserError(
        f'{name}: expected a network with an encoder to plan, found num_encoder_layers 0')
  return config


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code, 1 if a pair does not fit."""
  parser = argparse.ArgumentParser(
      prog='python -m speculative_t5x.tpu', description=__doc__.splitlines()[0],
      allow_abbrev=False)
  parser.add_argument('--topology', required=True, help='such as v5p:2x2x1, v5e:2x4, v4:2x2x1')
  parser.add_argument('--partitions', type=int, nargs='+', default=[1],
                      help='chips that share the target; several numbers are all tried')
  parser.add_argument('--draft_partitioned', action='store_true',
                      help='spread the draft, too; it is replicated otherwise')
  parser.add_argument('--gamma', type=int, default=7)
  parser.add_argument('--batch_size', type=int, default=1)
  parser.add_argument('--input_length', type=int, default=128)
  parser.add_argument('--output_length', type=int, default=128)
  parser.add_argument('--temperature', type=float, default=0.0)
  parser.add_argument('--alpha', type=float, default=0.75,
                      help="acceptance rate; default: .75, the paper's for XXL with small at T=0")
  parser.add_argument('--dtype', default='bfloat16', choices=('bfloat16', 'float32'))
  parser.add_argument('--verify_largest_batch', action='store_true',
                      help='look for the largest batch with the compiler, minutes a try; otherwise '
                           'it is extrapolated from two sizes, and may be a third too large')
  parser.add_argument('--json', type=pathlib.Path, help='file to write the plans to')

  def command():
    args = gin_command.parse(parser, arguments)
    for name in ('gamma', 'batch_size', 'input_length', 'output_length'):
      if getattr(args, name) < 1:
        raise UserError(f'--{name}: expected at least 1, found {getattr(args, name)}')
    gin_command.configure(args)
    request = Request(
        network_of('TARGET', args.dtype), network_of('DRAFT', args.dtype), args.topology,
        draft_partitioned=args.draft_partitioned, gamma=args.gamma, batch_size=args.batch_size,
        input_length=args.input_length, output_length=args.output_length,
        temperature=args.temperature, alpha=args.alpha,
        verify_largest_batch=args.verify_largest_batch)
    plans = []
    for partitions in args.partitions:
      plans.append(plan(dataclasses.replace(request, partitions=partitions)))
      show(plans[-1])
      if args.json is not None:
        args.json.write_text(
            json.dumps([dataclasses.asdict(found) for found in plans], indent=1) + '\n',
            encoding='utf-8')
    for found in plans:
      if not found.fits:
        print(
            f'error: {found.request["topology"]}, {found.request["partitions"]} partitions: '
            f'expected at most {found.hbm_bytes / MIB:.0f} MiB a chip, found '
            f'{found.needed_bytes / MIB:.0f}', file=sys.stderr)
    return 0 if all(found.fits for found in plans) else 2

  return gin_command.run(command)


def show(found: Plan) -> None:
  """Prints a plan as a table."""
  request = found.request
  table = Table(
      'program', 'arguments MiB', 'temporary MiB', 'traffic MiB', 'GFLOP', 'ms', 'Mcycles',
      'collectives',
      title=f'{request["topology"]}, {request["partitions"]} of its chips share the target, batch '
            f'{request["batch_size"]}, gamma {request["gamma"]}; each figure of one chip, loops '
            "counted once, ms at the chip's best")
  for name, program in found.programs.items():
    table.add_row(
        name, f'{program.argument_bytes / MIB:.0f}', f'{program.temporary_bytes / MIB:.0f}',
        f'{program.traffic_bytes / MIB:.0f}', f'{program.flops / 1e9:.1f}',
        f'{1000 * program.seconds:.3f}', f'{program.cycles / 1e6:.2f}',
        ', '.join(f'{count} {kind}' for kind, count in program.collectives.items()))
  console = Console(width=120)
  console.print(table)
  fits = 'fits' if found.fits else 'does not fit'
  how = ('extrapolated; --verify_largest_batch asks the compiler' if found.too_large_batch is None
         else f'compiled; {found.too_large_batch} does not fit')
  console.print(
      f'{found.needed_bytes / MIB:.0f} of {found.hbm_bytes / MIB:.0f} MiB: {fits}; largest batch '
      f'{found.largest_batch or "none"} ({how}).')
  loop = found.programs['speculative']
  copied = ', '.join(f'{size / MIB:.1f} MiB of {kind}' for kind, size in loop.loop_copies.items())
  console.print(
      f'A round moves {loop.loop_traffic_bytes / MIB:.0f} MiB beside its drafts, a step of plain '
      f'decoding {found.programs["plain"].loop_traffic_bytes / MIB:.0f}; copied within memory in '
      f'a round: {copied}; sorts of the vocabulary: {loop.sorts}.')
  if found.t5x_absent is None:
    console.print(
        f"A step of T5X's own decoding moves "
        f'{found.programs["t5x"].loop_traffic_bytes / MIB:.0f} MiB.')
  else:
    console.print(f"No program of T5X's own: {found.t5x_absent}.", soft_wrap=True)
  console.print(
      f'At alpha {request["alpha"]:g}: {found.factor:.2f}x plain decoding by time '
      f'(c {found.c:.3f}, v({request["gamma"]}) {found.v:.2f}, best gamma {found.best_gamma}), '
      f'{found.traffic_factor:.2f}x by traffic (c {found.traffic_c:.3f}, v {found.traffic_v:.2f}), '
      f'{found.cycle_factor:.2f}x by cycles (c {found.cycle_c:.3f}, v {found.cycle_v:.2f}).')


if __name__ == '__main__':
  sys.exit(main())
