"""Reading what is to be decoded: text, JSONL, standard input, or a seqio task."""

import dataclasses
import hashlib
import io
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

from speculative_t5x.errors import UserError


@dataclasses.dataclass(frozen=True)
class Example:
  """One input.

  Attributes:
    inputs: the text; empty lines are empty texts.
    extra: fields of the source that are passed through to the record.
    error: why there is no text, naming the line; None when there is one.
  """

  inputs: str
  extra: dict[str, Any] = dataclasses.field(default_factory=dict)
  error: str | None = None


def read_file(path: str) -> tuple[Iterator[Example], str]:
  """Reads a text file with an input a line, or JSONL (`.jsonl`) with a field `inputs` each.

  A line that cannot be read becomes an example with an error; the others are not affected.

  Args:
    path: the file, or `-` for text on standard input.

  Returns:
    The examples, in order, and the SHA-256 of the content, so that a run is not continued on
    other inputs.

  Raises:
    UserError: there is no such file.
  """
  if path == '-':
    content = sys.stdin.buffer.read()
    source, digest = io.BytesIO(content), hashlib.sha256(content)
    return _lines(source, 'standard input', is_json=False), digest.hexdigest()
  if not pathlib.Path(path).is_file():
    raise UserError(f'input file: expected one at {path}, found none')
  with open(path, 'rb') as source:
    digest = hashlib.file_digest(source, 'sha256')
  return _read(path), digest.hexdigest()


def _read(path: str) -> Iterator[Example]:
  with open(path, 'rb') as source:
    yield from _lines(source, path, is_json=path.endswith('.jsonl'))


def _lines(source: BinaryIO, name: str, *, is_json: bool) -> Iterator[Example]:
  for number, raw in enumerate(source, 1):
    where = f'{name} line {number}'
    try:
      text = raw.decode('utf-8').rstrip('\r\n')
    except UnicodeDecodeError as error:
      yield Example('', error=f'{where}: expected UTF-8, found byte 0x{raw[error.start]:02x} at '
                              f'column {error.start + 1}')
      continue
    yield _json_example(text, where) if is_json else Example(text.strip())


def _json_example(text: str, where: str) -> Example:
  if not text.strip():
    return Example('')
  try:
    record = json.loads(text)
  except json.JSONDecodeError as error:
    return Example('', error=f'{where}: expected JSON, found {error.msg} at column {error.colno}')
  except RecursionError:
    return Example('', error=f'{where}: expected JSON, found it nested too deeply')
  if not isinstance(record, dict) or not isinstance(record.get('inputs'), str):
    return Example('', error=f'{where}: expected an object with a text field "inputs", found '
                             f'{text[:60]}')
  return Example(record.pop('inputs').strip(), extra=record)


def read_task(name: str, split: str) -> Iterator[Example]:
  """Reads the inputs of a seqio task or mixture, as text before tokenisation where there is one.

  Args:
    name: a registered task or mixture.
    split: such as 'test'.

  Returns:
    The examples, in the dataset's order, `targets` passed through.

  Raises:
    UserError: nothing of that name is registered, or it has no such split.
  """
  import seqio  # Brings TensorFlow, which nothing else here needs.

  try:
    provider = seqio.get_mixture_or_task(name)
    dataset = provider.get_dataset(
        sequence_length=None, split=split, shuffle=False, use_cached=False, num_epochs=1
    )
  except (ValueError, KeyError) as error:
    message = str(error).splitlines()[0]
    raise UserError(f'MIXTURE_OR_TASK_NAME {name}, split {split}: {message}') from error
  features = provider.output_features
  return _task_examples(dataset, features)


def _task_examples(dataset, features) -> Iterator[Example]:
  for example in dataset.as_numpy_iterator():
    def text(name, example=example):
      if f'{name}_pretokenized' in example:
        return example[f'{name}_pretokenized'].decode('utf-8')
      return features[name].vocabulary.decode([int(i) for i in example[name]])
    extra = {'targets': text('targets')} if 'targets' in features else {}
    yield Example(text('inputs'), extra=extra)
