"""Comparison of seqio vocabularies."""

from collections.abc import Sequence

import seqio

from speculative_t5x import vocabularies
from speculative_t5x.errors import UserError


class _SeqioVocabulary:
  """The part of `vocabularies.Vocabulary` that a comparison reads."""

  def __init__(self, vocabulary: seqio.SentencePieceVocabulary):
    self._vocabulary = vocabulary
    self.eos_id = vocabulary.eos_id

  def pieces(self) -> Sequence[str]:
    tokenizer = self._vocabulary.tokenizer
    return [tokenizer.id_to_piece(i) for i in range(self._vocabulary.vocab_size)]


def check_same(target: seqio.Vocabulary, draft: seqio.Vocabulary) -> None:
  """Refuses a draft whose ids do not mean what the target's mean.

  Args:
    target: the target's output vocabulary.
    draft: the draft's.

  Raises:
    UserError: they differ; names the first id that does when both are SentencePiece models.
  """
  if target == draft:
    return
  if all(isinstance(found, seqio.SentencePieceVocabulary) for found in (target, draft)):
    vocabularies.check_same(_SeqioVocabulary(target), _SeqioVocabulary(draft))
    return
  describe = lambda found: f'{type(found).__name__} of {found.vocab_size} ids'
  raise UserError(
      f'draft vocabulary: expected the {describe(target)} of the target, found another '
      f'{describe(draft)}'
  )
