"""Command lines that are configured by gin files, like T5X's."""

import argparse
import ast
import sys
from collections.abc import Callable, Sequence
from typing import Any

import gin

from speculative_t5x import paths
from speculative_t5x.errors import UserError


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
  """Reads a command line; `--gin.NAME=value` arguments become `bindings`.

  Args:
    parser: with the command's own arguments; those of gin are added.
    arguments: None is the process's own.

  Returns:
    The arguments; `bindings` is a list of gin lines.

  Raises:
    UserError: an argument is not known.
  """
  parser.epilog = 'Any gin macro or parameter: --gin.GAMMA=7, --gin.TEMPERATURE=0.0, …'
  parser.add_argument('--gin_file', action='append', default=[], help='may be given repeatedly')
  parser.add_argument('--gin_search_paths', default='.', help='comma-separated folders')
  args, rest = parser.parse_known_args(arguments)
  args.bindings = []
  for argument in rest:
    name, equals, value = argument.removeprefix('--gin.').partition('=')
    if not argument.startswith('--gin.') or not equals:
      raise UserError(f'argument: expected a known one or --gin.NAME=value, found {argument}')
    args.bindings.append(f'{name} = {value}')
  return args


def configure(args: argparse.Namespace) -> None:
  """Parses gin files and bindings; files are looked for in the search paths and the package.

  Raises:
    UserError: a file is missing or gin refuses a line.
  """
  if not args.gin_file:
    raise UserError('--gin_file: expected at least one file, found none')
  gin.clear_config()
  for folder in [*args.gin_search_paths.split(','), str(paths.PACKAGES)]:
    gin.add_config_file_search_path(folder)
  try:
    gin.parse_config_files_and_bindings(args.gin_file, _quote_words(args.bindings))
  except Exception as error:
    # gin raises what the bound function or Python's parser raised, with lines of its own.
    message = ' '.join(str(error).split())
    raise UserError(f'gin: {message}') from error


def _quote_words(bindings: list[str]) -> list[str]:
  """Quotes values that are no gin values: shells eat quotes, as in `--gin.CHECKPOINT_PATH=/a/b`."""
  quoted = []
  for binding in bindings:
    name, _, value = binding.partition(' = ')
    # References and containers are left to gin, which says what is wrong with them.
    if not value.startswith(('@', '%', '(', '[', '{')):
      try:
        ast.literal_eval(value)
      except (SyntaxError, ValueError):
        value = repr(value)
    quoted.append(f'{name} = {value}')
  return quoted


def macro(name: str) -> Any:
  """The value of a gin macro, a reference as `gin.config.ConfigurableReference`.

  Raises:
    UserError: there is none.
  """
  try:
    return gin.query_parameter(f'%{name}')
  except ValueError as error:
    raise UserError(f'gin: expected a macro {name}, found none') from error


def reference(name: str, kind: str) -> gin.config.ConfigurableReference:
  """A gin macro that must be a reference; `kind` says to what, for the message.

  Raises:
    UserError: there is no such macro, or it is no reference.
  """
  found = macro(name)
  if not isinstance(found, gin.config.ConfigurableReference):
    raise UserError(f'gin macro {name}: expected a {kind}, found {found!r}')
  return found


def run(command: Callable[[], int]) -> int:
  """Runs a command; returns its exit code, or 2 after one line on standard error if refused."""
  try:
    return command()
  except UserError as error:
    # gin adds a line for every configurable on the way.
    print(f'error: {str(error).splitlines()[0]}', file=sys.stderr)
    return 2
