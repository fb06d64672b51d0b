"""Where files named in gin are found: in the working directory, or in the installed package."""

import pathlib

# The folder that holds the packages `speculative_t5x` and `gin_configs`.
PACKAGES = pathlib.Path(__file__).parents[1]


def resolve(path: str) -> str:
  """`path` itself, or the packaged file of that name when there is none in the working directory.

  Args:
    path: such as 'speculative_t5x/demo/vocabulary/sp4k.model'.

  Returns:
    A path that exists, or `path` unchanged.
  """
  packaged = PACKAGES / path
  if '://' not in path and not pathlib.Path(path).exists() and packaged.exists():
    return str(packaged)
  return path
