r"""n-gram tables from a corpus: the command that builds what the n-gram drafter draws from.

    python -m speculative_t5x.ngram build --corpus=targets.txt --order=3 --output=ngram.npz \
        --vocabulary=speculative_t5x/demo/vocabulary/sp4k.model

`V` is the vocabulary, `K` the successors kept for each context.
"""

import argparse
import itertools
import os
import pathlib
import sys
from collections.abc import Iterable, Sequence

import numpy as np
from tqdm import tqdm

from speculative_t5x import inputs as inputs_lib
from speculative_t5x import paths, vocabularies
from speculative_t5x.drafters.ngram import NgramTable, Order, hash_context
from speculative_t5x.errors import UserError


def build(
    texts: Iterable[Sequence[int]], vocab_size: int, order: int, *, successors: int = 16,
    min_count: int = 2, discount: float = 0.5,
) -> NgramTable:
  """Counts n-grams.

  Args:
    texts: token ids of each text, EOS included. Each begins with the start token 0 as context.
    vocab_size: `V`.
    order: 1 for unigrams, 2 for bigrams, …
    successors: `K`.
    min_count: contexts of two tokens and more that occur less often are left out.
    discount: taken from every count, in (0, 1).

  Returns:
    The model, its arrays numpy's.

  Raises:
    UserError: a setting is out of range, there is no text, or a token is beyond the vocabulary.
  """
  if order < 1:
    raise UserError(f'order: expected at least 1, found {order}')
  if not 0.0 < discount < 1.0:
    raise UserError(f'discount: expected a number in (0, 1), found {discount}')
  start = [-1] * (order - 1) + [0]
  flat, firsts = [], []
  for text in texts:
    firsts.append(len(flat) + len(start))
    flat += [*start, *text]
  if not flat or len(flat) == len(start) * len(firsts):
    raise UserError('corpus: expected at least one text, found none')
  tokens = np.asarray(flat, np.int64)
  if tokens.max() >= vocab_size:
    raise UserError(
        f'corpus: expected tokens below {vocab_size} (the vocabulary), found {tokens.max()}')
  is_next = np.ones(len(tokens), bool)
  for first in firsts:
    is_next[first - len(start) : first] = False
  places = np.flatnonzero(is_next)
  counts = np.bincount(tokens[places], minlength=vocab_size) + 1.0
  orders = []
  for size in range(1, order):
    context = [tokens[places - size + i] for i in range(size)]
    inside = np.all([part >= 0 for part in context], axis=0)
    keys = hash_context([part[inside].astype(np.uint32) for part in context])
    orders.append(_count(
        keys, tokens[places][inside], successors, discount, min_count if size > 1 else 1))
  return NgramTable((counts / counts.sum()).astype(np.float32), tuple(orders))


def _count(keys, following, successors, discount, min_count) -> Order:
  """The table of one order, from the key of each place and the token behind it."""
  pairs, count = np.unique(
      (keys.astype(np.uint64) << np.uint64(32)) | following.astype(np.uint64), return_counts=True)
  key, token = (pairs >> np.uint64(32)).astype(np.uint32), (pairs & np.uint64(2**32 - 1))
  unique, row = np.unique(key, return_inverse=True)
  total = np.bincount(row, weights=count)
  # By context, the most frequent first.
  ranking = np.lexsort((token, -count, row))
  row, token, count = row[ranking], token[ranking], count[ranking]
  rank = np.arange(len(row)) - np.searchsorted(row, row)
  kept = (rank < successors) & (total[row] >= min_count)
  tokens = np.zeros((len(unique), successors), np.int32)
  shares = np.zeros((len(unique), successors), np.float32)
  tokens[row[kept], rank[kept]] = token[kept]
  shares[row[kept], rank[kept]] = (count[kept] - discount) / total[row[kept]]
  frequent = total >= min_count
  if not frequent.any():
    frequent[:1] = True
    shares[:1] = 0
  return Order(unique[frequent], tokens[frequent], shares[frequent])


def save(path: str | os.PathLike, table: NgramTable, vocabulary: vocabularies.Vocabulary) -> None:
  """Writes a table, and the pieces that its ids stand for, to the `.npz` file `path`."""
  arrays = {'unigram': table.unigram, 'pieces': np.array('\n'.join(vocabulary.pieces()))}
  for size, order in enumerate(table.orders, 1):
    for name in ('keys', 'tokens', 'probabilities'):
      arrays[f'{name}_{size}'] = getattr(order, name)
  partial = pathlib.Path(f'{path}.partial.npz')
  np.savez_compressed(partial, **arrays)
  os.replace(partial, path)


def load(path: str | os.PathLike, vocabulary: vocabularies.Vocabulary) -> NgramTable:
  """Reads what `save` wrote.

  Args:
    path: the file.
    vocabulary: of the target.

  Returns:
    The table.

  Raises:
    UserError: there is no such file, it is none of `save`'s, or it is of another vocabulary.
  """
  try:
    with np.load(paths.resolve(os.fspath(path))) as file:
      arrays = dict(file)
    pieces = str(arrays.pop('pieces')).split('\n')
    sizes = range(1, 1 + sum(name.startswith('keys_') for name in arrays))
    table = NgramTable(arrays['unigram'], tuple(
        Order(*(arrays[f'{name}_{size}'] for name in ('keys', 'tokens', 'probabilities')))
        for size in sizes))
  except FileNotFoundError as error:
    raise UserError(f'n-gram table {path}: expected a file, found none') from error
  except (OSError, ValueError, KeyError) as error:
    raise UserError(f'n-gram table {path}: expected one of speculative_t5x.ngram, found '
                    f'{type(error).__name__}: {" ".join(str(error).split())[:100]}') from error
  expected = vocabulary.pieces()
  if pieces != list(expected):
    differing = next(
        i for i, (a, b) in enumerate(itertools.zip_longest(expected, pieces)) if a != b)
    raise UserError(
        f'n-gram table {path}: expected the vocabulary of the target, found another one: id '
        f'{differing} differs')
  return table


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code, 2 after one line on standard error if refused."""
  parser = argparse.ArgumentParser(
      prog='python -m speculative_t5x.ngram', description=__doc__.splitlines()[0])
  commands = parser.add_subparsers(dest='command', required=True)
  command = commands.add_parser('build', help='count the n-grams of a corpus')
  source = command.add_mutually_exclusive_group(required=True)
  source.add_argument('--corpus', help='text file, one target text a line, or .jsonl with "inputs"')
  source.add_argument('--task', help="seqio task or mixture, whose 'targets' are counted")
  command.add_argument('--split', default='train', help='of the task; default: train')
  command.add_argument('--vocabulary', required=True, help="SentencePiece model, or 'bytes'")
  command.add_argument('--extra_ids', type=int, default=0)
  command.add_argument('--order', type=int, default=2, help='1: unigrams, 2: bigrams, …')
  command.add_argument('--successors', type=int, default=16, help='kept for each context')
  command.add_argument('--output', required=True, help='.npz file')
  args = parser.parse_args(arguments)
  try:
    vocabulary = vocabularies.load_vocabulary(
        paths.resolve(args.vocabulary), extra_ids=args.extra_ids)
    if not args.output.endswith('.npz'):
      raise UserError(f'--output: expected a file ending in .npz, found {args.output}')
    if args.corpus:
      examples, _ = inputs_lib.read_file(args.corpus)
      texts = (_text(example) for example in examples)
    else:
      texts = (
          example.extra['targets'] for example in inputs_lib.read_task(args.task, args.split))
    ids = ([*vocabulary.encode(text), vocabulary.eos_id]
           for text in tqdm(texts, unit=' texts', disable=not sys.stderr.isatty()) if text)
    table = build(ids, vocabulary.size, args.order, successors=args.successors)
    save(args.output, table, vocabulary)
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  contexts = ', '.join(f'{len(order.keys):,}' for order in table.orders) or 'none'
  print(f'{args.output}: order {args.order}, contexts by length: {contexts}; '
        f'{os.path.getsize(args.output) / 1e6:.1f} MB')
  return 0


def _text(example: inputs_lib.Example) -> str:
  if example.error is not None:
    raise UserError(example.error)
  return example.inputs


if __name__ == '__main__':
  sys.exit(main())
