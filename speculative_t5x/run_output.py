"""The output folder of a run: nothing lost, nothing written twice, nothing of others touched."""

import itertools
import json
import os
import pathlib
from typing import Any

from speculative_t5x.errors import UserError

RECORDS = 'inferences.jsonl'
RUN = 'run.json'


class RunOutput:
  """Appends records to `inferences.jsonl`, which an interrupted run continues.

  `run.json` holds what the outputs depend on. A folder of another run is refused. A last line
  that an interruption cut is removed; whole lines are kept.

  Attributes:
    done: records that the folder held when it was opened.
  """

  def __init__(self, folder: str | os.PathLike, settings: dict[str, Any]):
    """Opens or makes the folder.

    Args:
      folder: where to write.
      settings: JSON-serialisable; the same for a run that continues.

    Raises:
      UserError: the folder holds something else, or a run with other settings.
    """
    self._folder = pathlib.Path(folder)
    open_folder(folder, settings)
    records = self._folder / RECORDS
    self.done = _drop_cut_line(records)
    self._file = records.open('ab')

  def write(self, records: list[dict[str, Any]]) -> None:
    """Appends records and hands them to the disk."""
    lines = ''.join(json.dumps(record, ensure_ascii=False) + '\n' for record in records)
    self._file.write(lines.encode('utf-8'))
    self._file.flush()
    os.fsync(self._file.fileno())

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def _drop_cut_line(records: pathlib.Path) -> int:
  """Truncates the file behind its last whole line; returns the number of whole lines."""
  if not records.exists():
    return 0
  content = records.read_bytes()
  whole = content[: content.rfind(b'\n') + 1]
  if len(whole) < len(content):
    os.truncate(records, len(whole))
  return whole.count(b'\n')


def open_folder(folder: str | os.PathLike, settings: dict[str, Any]) -> None:
  """Makes a folder with `settings` in its `run.json`, unless it is that already.

  Raises:
    UserError: see `check_folder`.
  """
  check_folder(folder, settings)
  run = pathlib.Path(folder) / RUN
  run.parent.mkdir(parents=True, exist_ok=True)
  if not run.exists():
    partial = run.with_suffix('.partial')
    text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + '\n'
    partial.write_text(text, encoding='utf-8')
    os.replace(partial, run)


def check_folder(folder: str | os.PathLike, settings: dict[str, Any]) -> None:
  """Refuses a folder that cannot take the run of `settings`; writes nothing.

  Raises:
    UserError: the folder holds something else, or a run with other settings.
  """
  folder = pathlib.Path(folder)
  if folder.exists() and not folder.is_dir():
    raise UserError(f'output folder: expected a folder at {folder}, found a file')
  run = folder / RUN
  if not run.exists():
    if (folder / RECORDS).exists():
      raise UserError(f'output folder {folder}: expected {RUN} beside {RECORDS}, found none')
    return
  try:
    found = json.loads(run.read_text(encoding='utf-8'))
  except ValueError:
    found = None
  if not isinstance(found, dict):
    raise UserError(f'output folder: expected a JSON object in {run}, found something else')
  for name in sorted({*settings, *found}):
    if settings.get(name) != found.get(name):
      raise UserError(f'output folder {folder}: holds another run; {name}: '
                      + _difference(str(settings.get(name)), str(found.get(name))))


def _difference(wanted: str, found: str) -> str:
  """The first line in which two texts differ, on one line."""
  lines = itertools.zip_longest(wanted.splitlines(), found.splitlines(), fillvalue='')
  return next(f'expected {a!r}, found {b!r}' for a, b in lines if a != b)
