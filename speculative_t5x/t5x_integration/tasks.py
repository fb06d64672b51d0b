"""seqio tasks of a user's own text, chosen in gin."""

import hashlib
import os

import seqio
import tensorflow as tf

from speculative_t5x import inputs as inputs_lib
from speculative_t5x import ngram, paths, vocabularies
from speculative_t5x.drafters.ngram import NgramTable
from speculative_t5x.errors import UserError

SPLIT = 'test'
# A text that is cut ends in EOS too, as without T5X.
PREPROCESSORS = (seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim)


def text_task(
    path: str, vocabulary: seqio.Vocabulary, prefix: str = '', add_eos: bool = True
) -> str:
  """Registers a task of a text file and names it, for `DatasetConfig.mixture_or_task_name`.

  Args:
    path: a text file with an input a line, or JSONL with a text `inputs` in each object and, for
      scoring, a text `targets`. It is held in memory.
    vocabulary: of both features.
    prefix: put before every input, such as 'restore: '.
    add_eos: whether the features end in EOS.

  Returns:
    The task's name. It has one split, 'test', which answers to any split's name that is asked for
    in gin; the examples have `inputs_pretokenized` (with the prefix) and `targets_pretokenized`.

  Raises:
    UserError: there is no such file, it has no lines, or a line cannot be read.
  """
  examples, digest = inputs_lib.read_file(os.fspath(path))
  texts: dict[str, list[str]] = {'inputs': [], 'targets': []}
  for example in examples:
    if example.error is not None:
      raise UserError(example.error)
    targets = example.extra.get('targets', '')
    if not isinstance(targets, str):
      raise UserError(
          f'{path} line {len(texts["inputs"]) + 1}: expected a text field "targets", found '
          f'{targets!r}'
      )
    texts['inputs'].append(prefix + example.inputs if example.inputs else '')
    texts['targets'].append(targets)
  if not texts['inputs']:
    raise UserError(f'{path}: expected at least one line, found none')

  def dataset_fn(split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
    del split, shuffle_files, seed
    return tf.data.Dataset.from_tensor_slices(texts)

  # The name tells runs on other content or another prefix apart, as T5X resumes by it.
  identity = hashlib.sha256('\0'.join((digest, prefix, str(add_eos))).encode()).hexdigest()[:10]
  name = f'text_{identity}'
  if name not in seqio.TaskRegistry.names():
    feature = seqio.Feature(vocabulary, add_eos=add_eos, required=False)
    seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(
            dataset_fn, splits=[SPLIT], num_input_examples={SPLIT: len(texts['inputs'])}),
        preprocessors=PREPROCESSORS,
        output_features={'inputs': feature, 'targets': feature},
    )
  return name


def vocabulary(path: str, extra_ids: int = 0) -> seqio.Vocabulary:
  """The vocabulary of a pair, from the macros that both commands share.

  Args:
    path: a SentencePiece model, which may be a file of the installed package (`paths.resolve`), or
      'bytes' for ByT5's.
    extra_ids: sentinels behind its pieces.

  Returns:
    The vocabulary.
  """
  if path == 'bytes':
    return seqio.ByteVocabulary(extra_ids)
  return seqio.SentencePieceVocabulary(paths.resolve(path), extra_ids)


def ngram_table(path: str | None, vocabulary_path: str, extra_ids: int = 0) -> NgramTable | None:
  """The n-gram table of a drafter, from the macros that both commands share.

  Args:
    path: an `.npz` of `python -m speculative_t5x.ngram`; None when another drafter is used.
    vocabulary_path: of the target, as `vocabulary`'s `path`.
    extra_ids: sentinels behind its pieces.

  Returns:
    The table, or None.

  Raises:
    UserError: see `speculative_t5x.ngram.load`.
  """
  if path is None:
    return None
  return ngram.load(path, vocabularies.load_vocabulary(
      paths.resolve(vocabulary_path), extra_ids=extra_ids))
