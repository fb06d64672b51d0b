"""SentencePiece and byte vocabularies with T5's ids, without seqio and TensorFlow.

The ids are those of `seqio.SentencePieceVocabulary` (pad 0, then the model's pieces, then
`extra_ids` sentinels, the first of which has the highest id) and of `seqio.ByteVocabulary`.
"""

import os
import struct
from collections.abc import Sequence
from typing import Protocol

import sentencepiece

from speculative_t5x import paths
from speculative_t5x.errors import UserError

# The type of a piece that is never split, in SentencePiece's `ModelProto`.
USER_DEFINED = 4


class Vocabulary(Protocol):
  """What decoding needs to know of a vocabulary.

  Attributes:
    size: number of ids, sentinels included.
    eos_id: the id that ends a text.
    pad_id: the id behind the end.
  """

  size: int
  eos_id: int
  pad_id: int

  def encode(self, text: str) -> list[int]:
    """The ids of `text`, without EOS."""
    ...

  def decode(self, ids: Sequence[int]) -> str:
    """The text of `ids`; they may end in EOS and padding, which give no text."""
    ...

  def pieces(self) -> list[str]:
    """The piece of every id, in order."""
    ...


class SentencePieceVocabulary:
  """A SentencePiece model file.

  Attributes:
    path: the file.
    size: number of ids, sentinels included.
    eos_id: the id that ends a text.
    pad_id: the id behind the end; always 0.
    unk_id: the id of what the model does not know.
  """

  def __init__(self, path: str, extra_ids: int = 0):
    """Loads a model file.

    Args:
      path: a SentencePiece model, local or `gs://`.
      extra_ids: number of sentinels `<extra_id_0>`, … behind the model's pieces.

    Raises:
      UserError: the file is missing or damaged, its pad is not 0, it has no EOS, or `extra_ids`
        is negative.
    """
    if extra_ids < 0:
      raise UserError(f'extra_ids: expected at least 0, found {extra_ids}')
    self.path = os.path.expanduser(os.fspath(path))
    try:
      content = paths.read_bytes(self.path)
    except OSError as error:
      raise UserError(
          f'vocabulary {path}: expected a SentencePiece model, found: {error.strerror}'
      ) from error
    sentinels = b''.join(_piece(f'▁<extra_id_{i}>') for i in reversed(range(extra_ids)))
    self._model = sentencepiece.SentencePieceProcessor()
    # An empty file is a valid message but not a model, and without content the loader waits for
    # a name.
    parsed = bool(content)
    if parsed:
      try:
        self._model.LoadFromSerializedProto(content + sentinels)
      except (RuntimeError, ValueError):
        parsed = False
    if not parsed:
      raise UserError(
          f'vocabulary {path}: expected a SentencePiece model, found a truncated file or another '
          f'format of {len(content)} bytes'
      )
    self.size = self._model.get_piece_size()
    self.eos_id = self._model.eos_id()
    self.unk_id = self._model.unk_id()
    # As in seqio, 0 is padding where a model has no piece for it (MADLAD-400).
    if self._model.pad_id() not in (-1, 0):
      raise UserError(f'vocabulary {path}: expected pad id 0, found {self._model.pad_id()}')
    self.pad_id = 0
    if self.eos_id < 0:
      raise UserError(f'vocabulary {path}: expected an EOS piece, found none')

  def encode(self, text: str) -> list[int]:
    """The ids of `text`, without EOS."""
    return self._model.encode(text)

  def decode(self, ids: Sequence[int]) -> str:
    """The text of `ids` before the first EOS; ids beyond the vocabulary read as unknown."""
    ids = [int(i) for i in ids]
    if self.eos_id in ids:
      ids = ids[: ids.index(self.eos_id)]
    known = [i if 0 <= i < self.size else self.unk_id for i in ids if i != self.pad_id]
    return self._model.decode(known)

  def pieces(self) -> list[str]:
    """The piece of every id, in order; a leading `▁` is a space."""
    return [self._model.id_to_piece(i) for i in range(self.size)]


class ByteVocabulary:
  """ByT5's vocabulary: pad 0, EOS 1, unknown 2, then the 256 bytes of UTF-8.

  Attributes:
    size: number of ids, sentinels included.
    eos_id: the id that ends a text.
    pad_id: the id behind the end.
    unk_id: the id of what is not known.
  """

  eos_id, pad_id, unk_id = 1, 0, 2
  _FIRST_BYTE = 3

  def __init__(self, extra_ids: int = 0):
    """Makes the vocabulary.

    Args:
      extra_ids: number of sentinels behind the bytes.

    Raises:
      UserError: `extra_ids` is negative.
    """
    if extra_ids < 0:
      raise UserError(f'extra_ids: expected at least 0, found {extra_ids}')
    self.size = self._FIRST_BYTE + 256 + extra_ids

  def encode(self, text: str) -> list[int]:
    """The ids of `text`, without EOS."""
    return [byte + self._FIRST_BYTE for byte in text.encode('utf-8')]

  def decode(self, ids: Sequence[int]) -> str:
    """The text of `ids` before the first EOS; what is no UTF-8, or no byte, is left out."""
    ids = [int(i) for i in ids]
    if self.eos_id in ids:
      ids = ids[: ids.index(self.eos_id)]
    found = [i - self._FIRST_BYTE for i in ids]
    return bytes(b for b in found if 0 <= b < 256).decode('utf-8', errors='ignore')

  def pieces(self) -> list[str]:
    """A name for every id, in order: a character of ASCII as it is, other bytes as `<0xC3>`."""
    names = [chr(b) if 32 <= b < 127 else f'<0x{b:02X}>' for b in range(256)]
    sentinels = [f'<extra_id_{i}>' for i in reversed(range(self.size - self._FIRST_BYTE - 256))]
    return ['<pad>', '</s>', '<unk>', *names, *sentinels]


def load_vocabulary(path: str, *, extra_ids: int = 0) -> SentencePieceVocabulary | ByteVocabulary:
  """Loads a vocabulary; see `SentencePieceVocabulary` and `ByteVocabulary`.

  Args:
    path: a SentencePiece model file, or 'bytes' for ByT5's bytes.
    extra_ids: number of sentinels behind its pieces.

  Returns:
    The vocabulary.

  Raises:
    UserError: the file is missing, damaged or not usable.
  """
  if os.fspath(path) == 'bytes':
    return ByteVocabulary(extra_ids)
  return SentencePieceVocabulary(path, extra_ids)


def check_same(target: Vocabulary, draft: Vocabulary) -> None:
  """Refuses a draft whose ids do not mean what the target's mean.

  Args:
    target: the target's vocabulary.
    draft: the draft's vocabulary.

  Raises:
    UserError: they differ; names the first id that does, and both pieces.
  """
  expected, found = target.pieces(), draft.pieces()
  for id_ in range(max(len(expected), len(found))):
    pair = [repr(pieces[id_]) if id_ < len(pieces) else 'no piece' for pieces in (expected, found)]
    if pair[0] != pair[1]:
      raise UserError(
          f'draft vocabulary: id {id_} differs: expected {pair[0]} as in the target, '
          f'found {pair[1]}'
      )
  if target.eos_id != draft.eos_id:
    raise UserError(
        f'draft vocabulary: expected EOS id {target.eos_id} as in the target, '
        f'found {draft.eos_id}'
    )


def _piece(text: str) -> bytes:
  """One more entry of `ModelProto.pieces` on the wire.

  Repeated fields concatenate, so this spares a dependency on protobuf.
  """
  name = text.encode()
  body = b'\x0a' + bytes([len(name)]) + name + b'\x15' + struct.pack('<f', 0.0)
  body += b'\x18' + bytes([USER_DEFINED])
  return b'\x0a' + bytes([len(body)]) + body
