"""Where files named in gin are found: locally, in the installed package, or in a bucket."""

import errno
import os
import pathlib
import re

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


def read_bytes(path: str) -> bytes:
  """The content of a file, local or `gs://`.

  Args:
    path: the file.

  Returns:
    Its bytes.

  Raises:
    OSError: there is no such file, or it cannot be read.
  """
  if match := re.fullmatch(r'gs://([^/]+)/(.+)', path):
    import tensorstore as ts  # Slow to import, and needed for buckets alone.

    try:
      kvstore = ts.KvStore.open({'driver': 'gcs', 'bucket': match[1]}).result()
      found = kvstore.read(match[2]).result()
    except ValueError as error:
      raise OSError(errno.EIO, ' '.join(str(error).split())) from error
    if found.state == 'missing':
      raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return bytes(found.value)
  return pathlib.Path(path).expanduser().read_bytes()
