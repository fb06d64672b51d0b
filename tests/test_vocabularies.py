"""Vocabularies."""

import pytest

from speculative_t5x import vocabularies
from speculative_t5x.demo import tasks
from speculative_t5x.errors import UserError


class Listed:
  """A vocabulary given by its pieces."""

  pad_id, eos_id, unk_id = 0, 1, 2

  def __init__(self, *pieces):
    self._pieces = pieces
    self.size = len(pieces)

  def pieces(self):
    return self._pieces


def test_text_goes_there_and_back():
  vocabulary = vocabularies.load_vocabulary(tasks.VOCABULARY)
  assert (vocabulary.size, vocabulary.eos_id) == (4096, 1)
  ids = vocabulary.encode('Open the file.')
  assert vocabulary.decode([*ids, 1, 0, 0]) == 'Open the file.'
  assert len(vocabulary.pieces()) == 4096


def test_sentinels_stand_behind_the_pieces_last_one_first():
  vocabulary = vocabularies.load_vocabulary(tasks.VOCABULARY, extra_ids=100)
  assert vocabulary.size == 4196
  assert vocabulary.pieces()[4195] == '▁<extra_id_0>'
  word = vocabulary.encode('Open')
  assert vocabulary.decode([*word, 4195, *word]) == 'Open <extra_id_0> Open'


def trained(folder, **ids):
  """A SentencePiece model with these special ids."""
  import sentencepiece

  corpus = folder / 'corpus.txt'
  corpus.write_text('open the file\nclose the door\n' * 20, encoding='utf-8')
  sentencepiece.SentencePieceTrainer.train(
      input=str(corpus), model_prefix=str(folder / 'sp'), model_type='char', vocab_size=24,
      hard_vocab_limit=False, bos_id=-1, minloglevel=2, **ids)
  return folder / 'sp.model'


def test_padding_is_0_where_a_model_has_no_piece_for_it(tmp_path):
  """As MADLAD-400's has not: `<unk>` is 0 and EOS is 2."""
  vocabulary = vocabularies.load_vocabulary(trained(tmp_path, unk_id=0, pad_id=-1, eos_id=2))
  assert (vocabulary.pad_id, vocabulary.eos_id) == (0, 2)
  ids = vocabulary.encode('open the door')
  assert vocabulary.decode([*ids, 2, 0, 0]) == 'open the door'


def test_padding_elsewhere_is_refused(tmp_path):
  with pytest.raises(UserError, match='expected pad id 0, found 3'):
    vocabularies.load_vocabulary(trained(tmp_path, unk_id=0, eos_id=1, pad_id=3))


def test_bytes_are_those_of_seqio():
  import seqio

  for extra_ids in (0, 100):
    expected = seqio.ByteVocabulary(extra_ids)
    vocabulary = vocabularies.load_vocabulary('bytes', extra_ids=extra_ids)
    assert (vocabulary.size, vocabulary.eos_id) == (expected.vocab_size, expected.eos_id)
    assert len(vocabulary.pieces()) == vocabulary.size
    text = 'Größe 2 € — ok'
    ids = vocabulary.encode(text)
    assert ids == list(expected.encode(text))
    assert vocabulary.decode([*ids, 1, 70, 0]) == text
    # A character cut in two, and ids that are no bytes.
    assert vocabulary.decode([ids[2], 2, 70, 300]) == expected.decode([ids[2], 2, 70, 300])


@pytest.mark.parametrize(
    ('draft', 'named'),
    [(Listed('a', 'b', 'x'), "id 2 differs: expected 'c'"), (Listed('a', 'b'), 'id 2 differs'),
     (Listed('a', 'b', 'c', 'd'), 'id 3 differs')])
def test_the_first_id_that_differs_is_named(draft, named):
  with pytest.raises(UserError, match=named):
    vocabularies.check_same(Listed('a', 'b', 'c'), draft)


def test_same_content_is_the_same():
  vocabularies.check_same(Listed('a', 'b'), Listed('a', 'b'))


def test_missing_and_foreign_files_are_refused(tmp_path):
  with pytest.raises(UserError, match='No such file'):
    vocabularies.load_vocabulary(tmp_path / 'none.model')
  (tmp_path / 'other.model').write_bytes(b'other')
  with pytest.raises(UserError, match='expected a SentencePiece model'):
    vocabularies.load_vocabulary(tmp_path / 'other.model')


def test_a_vocabulary_in_a_bucket_is_read(monkeypatch):
  import tensorstore as ts

  # The memory driver in the place of a bucket.
  store = ts.KvStore.open({'driver': 'memory'}).result()
  store.write('vocabs/sp.model', tasks.VOCABULARY.read_bytes()).result()
  opened = []

  def open_bucket(spec):
    opened.append(spec)
    return Ready(store)

  monkeypatch.setattr(ts.KvStore, 'open', open_bucket)
  assert vocabularies.load_vocabulary('gs://t5-data/vocabs/sp.model').size == 4096
  assert opened == [{'driver': 'gcs', 'bucket': 't5-data'}]
  with pytest.raises(UserError, match='No such file'):
    vocabularies.load_vocabulary('gs://t5-data/vocabs/none.model')


class Ready:
  """A future that has its result."""

  def __init__(self, value):
    self._value = value

  def result(self):
    return self._value
