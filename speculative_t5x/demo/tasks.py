"""The demo pair's two tasks, as text: restoration of written English, and English to German."""

import csv
import gzip
import pathlib
import re
from typing import TypeVar

from speculative_t5x.vocabularies import Vocabulary

T = TypeVar('T')

ASSETS = pathlib.Path(__file__).parent
HELD_OUT = ASSETS / 'data' / 'test_libreoffice.tsv.gz'
VALIDATION = ASSETS / 'data' / 'validation_libreoffice.tsv.gz'
VOCABULARY = ASSETS / 'vocabulary' / 'sp4k.model'

RESTORE = 'restore: '
TRANSLATE = 'translate English to German: '
PREFIXES = {'restoration': RESTORE, 'translation': TRANSLATE}


def read_pairs(path: pathlib.Path) -> list[tuple[str, str]]:
  """Reads `English<TAB>German` lines from a gzip file."""
  with gzip.open(path, 'rt', encoding='utf-8', newline='') as lines:
    return [(row[0], row[1]) for row in csv.reader(lines, delimiter='\t', quoting=csv.QUOTE_NONE)]


def spoken(text: str) -> str:
  """Writes `text` as a speech recogniser would: lower case, only apostrophes and hyphens kept."""
  return ' '.join(re.sub(r"[^\w'-]+", ' ', text.lower()).split())


def examples(pairs: list[tuple[str, str]], task: str) -> list[tuple[str, str]]:
  """Turns translation pairs into `(inputs, targets)` of `task`, the task's prefix in place.

  Args:
    pairs: `(English, German)`.
    task: 'restoration' or 'translation'.

  Returns:
    One pair a sentence. Sentences that keep no word in spoken form are left out of restoration.
  """
  if task == 'translation':
    return [(TRANSLATE + english, german) for english, german in pairs]
  found = [(spoken(english), english) for english, _ in pairs]
  return [(RESTORE + heard, english) for heard, english in found if heard]


def held_out_ids(
    vocabulary: Vocabulary, task: str, longest: int, count: int
) -> list[list[int]]:
  """Token ids of held-out inputs, EOS included, evenly spread over those that fit.

  Args:
    vocabulary: of the demo pair.
    task: 'restoration' or 'translation'.
    longest: tokens that an input has at most.
    count: inputs at most.

  Returns:
    The ids of each.
  """
  texts = [text for text, _ in examples(read_pairs(HELD_OUT), task)]
  ids = [[*vocabulary.encode(text), vocabulary.eos_id] for text in texts]
  return spread([row for row in ids if len(row) <= longest], count)


def spread(found: list[T], count: int) -> list[T]:
  """`count` of the examples, evenly spread: neighbours come from one page and are alike."""
  step = max(1, len(found) // count)
  return found[::step][:count]
