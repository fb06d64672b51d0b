"""Token ids to train on: inputs, references, and the batches that are made of them.

`M` is the target length.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from speculative_t5x import inputs as inputs_lib
from speculative_t5x.errors import UserError
from speculative_t5x.training import Example
from speculative_t5x.vocabularies import Vocabulary

# Batches are of texts of similar length: up to these shares of the longest.
LENGTHS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)


def encode(
    examples: Iterable[inputs_lib.Example], vocabulary: Vocabulary, lengths: dict[str, int], *,
    prefix: str = '', with_targets: bool = False,
) -> list[Example]:
  """Token ids of inputs, and of their references.

  Args:
    examples: with a text field `targets` each, if `with_targets`. Empty inputs are left out.
    vocabulary: of both models.
    lengths: tokens of `inputs` and `targets` at most. Inputs that are longer lose what is before
      their EOS, targets what is behind, their EOS included.
    prefix: put before every input.
    with_targets: whether references are asked for.

  Returns:
    `(input ids, target ids)` each, the latter empty without `with_targets`.

  Raises:
    UserError: an input could not be read, or has no reference.
  """
  found = []
  for number, example in enumerate(examples, 1):
    if example.error is not None:
      raise UserError(example.error)
    if not example.inputs:
      continue
    targets = []
    if with_targets:
      text = example.extra.get('targets')
      if not isinstance(text, str):
        raise UserError(f"input {number}: expected a text field 'targets' to train on references, "
                        f'found {text!r}')
      targets = [*vocabulary.encode(text), vocabulary.eos_id][: lengths['targets']]
    ids = vocabulary.encode(prefix + example.inputs)[: lengths['inputs'] - 1]
    found.append(([*ids, vocabulary.eos_id], targets))
  return found


def counted(targets: np.ndarray | jax.Array, eos_id: int) -> np.ndarray | jax.Array:
  """Which places of texts count: up to EOS, or all where there is none.

  A draft that has learnt little may well draw the id of padding, which then is a token.

  Args:
    targets: int32 `[..., M]`.
    eos_id: the id that ends a text.

  Returns:
    bool `[..., M]`.
  """
  is_end = targets == eos_id
  return is_end.cumsum(-1) - is_end == 0


def buckets_of(lengths: dict[str, int]) -> list[tuple[int, int]]:
  """`(S, M)` of the batches of texts whose tokens are at most `lengths`."""
  scaled = lambda name, share: max(1, round(lengths[name] * share))
  found = {(scaled('inputs', share), scaled('targets', share)) for share in LENGTHS}
  return sorted(found)


def digest(examples: Sequence[Example]) -> str:
  """SHA-256 of token ids, so that a run is not continued on other ones."""
  return hashlib.sha256(json.dumps(examples).encode()).hexdigest()
