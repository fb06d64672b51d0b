"""Reading inputs."""

import io
import types

import pytest

from speculative_t5x import inputs
from speculative_t5x.errors import UserError


def test_text_is_an_input_a_line(tmp_path):
  path = tmp_path / 'in.txt'
  path.write_bytes('one\r\n\nübrig\nlast'.encode())
  assert [e.inputs for e in inputs.read_file(str(path))[0]] == ['one', '', 'übrig', 'last']


def test_invalid_utf8_names_the_line_and_spares_the_others(tmp_path):
  path = tmp_path / 'in.txt'
  path.write_bytes(b'one\ntw\xffo\nthree\n')
  found = list(inputs.read_file(str(path))[0])
  assert [e.inputs for e in found] == ['one', '', 'three']
  assert [e.error for e in found] == [
      None, f'{path} line 2: expected UTF-8, found byte 0xff at column 3', None]


def test_jsonl_passes_other_fields_through(tmp_path):
  path = tmp_path / 'in.jsonl'
  path.write_text('{"inputs": "a", "id": 7}\n{"input": 1}\n{"inputs"\n\n[1]\n', encoding='utf-8')
  found = list(inputs.read_file(str(path))[0])
  assert found[0] == inputs.Example('a', {'id': 7})
  assert 'line 2: expected an object' in found[1].error
  assert 'line 3: expected JSON' in found[2].error
  assert found[3] == inputs.Example('')
  assert 'line 5: expected an object' in found[4].error


def test_standard_input(monkeypatch):
  stdin = types.SimpleNamespace(buffer=io.BytesIO(b'a\nb\n'))
  monkeypatch.setattr(inputs.sys, 'stdin', stdin)
  assert [e.inputs for e in inputs.read_file('-')[0]] == ['a', 'b']


def test_missing_file():
  with pytest.raises(UserError, match='found none'):
    inputs.read_file('no/such/file')


def test_seqio_task():
  seqio = pytest.importorskip('seqio')
  import tensorflow as tf

  from speculative_t5x.demo import tasks

  vocabulary = seqio.SentencePieceVocabulary(str(tasks.VOCABULARY))
  features = {k: seqio.Feature(vocabulary, add_eos=True) for k in ('inputs', 'targets')}
  data = {'inputs': ['Open the file.', 'Close.'], 'targets': ['Öffnen.', 'Zu.']}
  seqio.TaskRegistry.add(
      'inputs_test_task',
      source=seqio.FunctionDataSource(
          lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices(data),
          splits=['test']),
      preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
      output_features=features)
  found = list(inputs.read_task('inputs_test_task', 'test'))
  assert [e.inputs for e in found] == data['inputs']
  assert [e.extra['targets'] for e in found] == data['targets']
  with pytest.raises(UserError, match='no_such_task'):
    inputs.read_task('no_such_task', 'test')
