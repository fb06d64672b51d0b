"""The output folder."""

import json

import pytest

from speculative_t5x.errors import UserError
from speculative_t5x.run_output import RECORDS, RunOutput


def test_a_run_continues_behind_its_last_whole_line(tmp_path):
  output = RunOutput(tmp_path / 'out', {'a': 1})
  output.write([{'n': 0}, {'n': 1}])
  output.close()
  with (tmp_path / 'out' / RECORDS).open('ab') as file:
    file.write(b'{"n": ')
  output = RunOutput(tmp_path / 'out', {'a': 1})
  assert output.done == 2
  output.write([{'n': 2}])
  output.close()
  lines = (tmp_path / 'out' / RECORDS).read_text(encoding='utf-8').splitlines()
  assert [json.loads(line)['n'] for line in lines] == [0, 1, 2]


def test_another_run_is_refused_and_left_alone(tmp_path):
  output = RunOutput(tmp_path, {'gamma': 4})
  output.write([{'n': 0}])
  output.close()
  before = (tmp_path / RECORDS).read_bytes()
  with pytest.raises(UserError, match="another run; gamma: expected '7', found '4'"):
    RunOutput(tmp_path, {'gamma': 7})
  assert (tmp_path / RECORDS).read_bytes() == before


def test_records_without_a_run_are_refused(tmp_path):
  (tmp_path / RECORDS).write_text('{}\n', encoding='utf-8')
  with pytest.raises(UserError, match='found none'):
    RunOutput(tmp_path, {})


@pytest.mark.parametrize('content', [b'[]', b'null', b'{', b'\xff'])
def test_a_foreign_run_file_is_refused(tmp_path, content):
  (tmp_path / 'run.json').write_bytes(content)
  with pytest.raises(UserError, match='expected a JSON object'):
    RunOutput(tmp_path, {})
