"""The command, on the embedded pair."""

import json
import pathlib

import pytest

from speculative_t5x import convert, infer
from speculative_t5x.demo import tasks
from speculative_t5x.pair import Pair

GIN = '--gin_file=gin_configs/examples/demo.gin'
SHORT = "--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 32}"
LINES = [
    'restore: open the file and click ok', '', 'restore: save the document',
    'translate English to German: Open the file.', 'restore: choose insert table',
]


@pytest.fixture
def sentences(tmp_path):
  path = tmp_path / 'sentences.txt'
  path.write_text('\n'.join(LINES) + '\n', encoding='utf-8')
  return path


def run(sentences, folder, *arguments):
  """Runs the command; returns its exit code and the records."""
  code = infer.main([GIN, SHORT, f'--input={sentences}', f'--output_dir={folder}', *arguments])
  path = pathlib.Path(folder) / 'inferences.jsonl'
  lines = path.read_text(encoding='utf-8').splitlines() if path.exists() else []
  return code, [json.loads(line) for line in lines]


@pytest.fixture(scope='module')
def expected(tmp_path_factory):
  """Records of an undisturbed plain run."""
  folder = tmp_path_factory.mktemp('plain')
  path = folder / 'sentences.txt'
  path.write_text('\n'.join(LINES) + '\n', encoding='utf-8')
  code, records = run(path, folder / 'out', '--gin.GAMMA=0')
  assert code == 0
  return records


def test_outputs_equal_plain_greedy_ones_in_input_order(sentences, tmp_path, expected):
  code, records = run(sentences, tmp_path / 'out', '--gin.GAMMA=5', '--gin.BATCH_SIZE=2')
  assert code == 0
  assert [r['inputs'] for r in records] == LINES
  for record, plain in zip(records, expected, strict=True):
    assert record['prediction'] == plain['prediction']
    assert record['score'] == pytest.approx(plain['score'], abs=1e-3)
  empty = records[1]
  assert (empty['prediction'], empty['score'], empty['statistics']['rounds']) == ('', 0.0, 0)
  statistics = records[0]['statistics']
  assert statistics['emitted'] > statistics['rounds'] > 0
  assert statistics['accepted'] == sum(statistics['accepted_at_position'])


def test_an_interrupted_run_resumes(sentences, tmp_path, expected, monkeypatch):
  predict, calls = Pair.predict, []

  def interrupted(self, *args, **kwargs):
    calls.append(1)
    if len(calls) == 2:
      raise KeyboardInterrupt
    return predict(self, *args, **kwargs)

  folder = tmp_path / 'out'
  with monkeypatch.context() as patch:
    patch.setattr(Pair, 'predict', interrupted)
    with pytest.raises(KeyboardInterrupt):
      run(sentences, folder, '--gin.BATCH_SIZE=2')
  written = (folder / 'inferences.jsonl').read_text(encoding='utf-8')
  assert written.count('\n') == 2
  code, records = run(sentences, folder, '--gin.BATCH_SIZE=2')
  assert code == 0
  assert [r['prediction'] for r in records] == [r['prediction'] for r in expected]
  # Run once more: nothing is left to do, nothing is repeated.
  assert len(run(sentences, folder, '--gin.BATCH_SIZE=2')[1]) == len(LINES)


def test_sampled_outputs_do_not_depend_on_the_batch_size(sentences, tmp_path):
  outputs = [
      [r['prediction'] for r in run(
          sentences, tmp_path / f'out{size}', '--gin.TEMPERATURE=1.0',
          f'--gin.BATCH_SIZE={size}')[1]]
      for size in (1, 4)
  ]
  assert outputs[0] == outputs[1]


def test_long_inputs_are_cut_and_marked_or_refused(tmp_path):
  path = tmp_path / 'in.txt'
  path.write_text('restore: save it\nrestore: ' + 'open the file ' * 30 + '\n', encoding='utf-8')
  code, records = run(path, tmp_path / 'cut')
  assert code == 0
  assert records[1]['truncated'] and records[1]['prediction']
  assert 'truncated' not in records[0]
  code, records = run(path, tmp_path / 'refused', "--gin.infer.on_long_input='error'")
  assert code == 1
  assert 'expected at most 32 tokens' in records[1]['error']
  assert records[0]['prediction']


def test_bad_lines_leave_the_others_alone(tmp_path, capsys):
  path = tmp_path / 'in.jsonl'
  path.write_bytes(b'{"inputs": "restore: save it", "id": 3}\nnot json\n{"inputs": "\xff"}\n')
  code, records = run(path, tmp_path / 'out')
  assert code == 1
  assert records[0]['prediction'] and records[0]['id'] == 3
  assert 'line 2' in records[1]['error'] and 'line 3' in records[2]['error']
  assert 'line 2' in capsys.readouterr().err


def test_num_decodes(sentences, tmp_path):
  _, records = run(sentences, tmp_path / 'out', '--gin.NUM_DECODES=3', '--gin.TEMPERATURE=1.0')
  assert len(records[0]['predictions']) == 3
  assert records[0]['scores'] == sorted(records[0]['scores'])
  assert records[0]['prediction'] == records[0]['predictions'][-1]


TASK_MODULE = """
import seqio
import tensorflow as tf

from speculative_t5x.demo import tasks

vocabulary = seqio.SentencePieceVocabulary(str(tasks.VOCABULARY), 0)
texts = {'inputs': ['restore: open the file', 'restore: save it'], 'targets': ['Open.', 'Save.']}
seqio.TaskRegistry.add(
    'own_task',
    source=seqio.FunctionDataSource(
        lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices(texts),
        splits=['test']),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    output_features={name: seqio.Feature(vocabulary) for name in texts},
)
"""


def test_a_seqio_task_is_decoded(tmp_path, monkeypatch):
  """A task of the user's own module, which a gin file imports as T5X's do."""
  (tmp_path / 'own_tasks.py').write_text(TASK_MODULE, encoding='utf-8')
  (tmp_path / 'own.gin').write_text('import own_tasks\n', encoding='utf-8')
  monkeypatch.syspath_prepend(tmp_path)
  folder = tmp_path / 'out'
  task = [f'--gin_file={tmp_path / "own.gin"}', SHORT, f'--output_dir={folder}']
  assert infer.main([GIN, *task, '--gin.MIXTURE_OR_TASK_NAME=own_task']) == 0
  lines = (folder / 'inferences.jsonl').read_text(encoding='utf-8').splitlines()
  records = [json.loads(line) for line in lines]
  assert [r['inputs'] for r in records] == ['restore: open the file', 'restore: save it']
  assert [r['targets'] for r in records] == ['Open.', 'Save.']
  assert all(r['prediction'] for r in records)
  assert infer.main([GIN, *task, '--gin.MIXTURE_OR_TASK_NAME=no_task']) == 2


def test_a_lossy_run_says_so(sentences, tmp_path):
  _, exact = run(sentences, tmp_path / 'exact')
  assert not any('lenience' in record for record in exact)
  _, lossy = run(sentences, tmp_path / 'lossy', '--gin.LENIENCE=0.1')
  assert all(record['lenience'] == 0.1 for record in lossy if record['prediction'])


def test_drafters_are_chosen_in_gin(sentences, tmp_path):
  outputs = lambda records: [record['prediction'] for record in records]
  drafted = lambda records: sum(
      record['statistics']['drafted'] for record in records if record['prediction'])
  _, expected = run(sentences, tmp_path / 'model')
  for name, arguments in {
      'mixed': ['--gin.DRAFTER="mixed"', '--gin.MIN_CONFIDENCE=0.4'],
      'cascade': ['--gin.DRAFTER="cascade"', '--gin.CASCADE_GAMMA=1', '--gin.DRAFT_TOPK=2'],
      'copying': ['--gin.DRAFTER="copying"', '--gin.DRAFT_CHECKPOINT_PATH=None'],
  }.items():
    code, found = run(sentences, tmp_path / name, *arguments)
    assert code == 0 and outputs(found) == outputs(expected)
    if name != 'cascade':
      assert 0 < drafted(found) != drafted(expected)


def test_hugging_face_folders_are_decoded_without_a_network_in_gin(sentences, tmp_path):
  _, expected = run(sentences, tmp_path / 'demo')
  paths = []
  for name in ('target', 'draft'):
    [checkpoint] = (tasks.ASSETS / name).glob('checkpoint_*')
    convert.convert(checkpoint, tmp_path / name, 'huggingface')
    paths.append(tmp_path / name)
  folder = tmp_path / 'out'
  assert infer.main([
      '--gin_file=gin_configs/models/from_checkpoint.gin',
      '--gin_file=gin_configs/runs/infer_standalone.gin', SHORT, f'--input={sentences}',
      f'--output_dir={folder}', f'--gin.CHECKPOINT_PATH={paths[0]}',
      f'--gin.DRAFT_CHECKPOINT_PATH={paths[1]}', f'--gin.VOCABULARY_PATH={tasks.VOCABULARY}']) == 0
  lines = (folder / 'inferences.jsonl').read_text(encoding='utf-8').splitlines()
  assert [json.loads(x)['prediction'] for x in lines] == [x['prediction'] for x in expected]


@pytest.mark.parametrize(
    ('arguments', 'named'),
    [
        (['--gin.draft/T5Config.num_heads=8'], 'num_heads: expected 8 as in the given T5Config'),
        (['--gin.BEAM_ALPHA=0.6', '--gin.NUM_DECODES=4', '--gin.DRAFT_WIDTH=3'], 'draft_width'),
        (['--gin.BEAM_ALPHA=0.6', '--gin.NUM_DECODES=5000'], '5000'),
        (['--gin.DRAFTER="guess"'], 'drafter: expected one of'),
        (['--gin.DRAFTER="ngram"'], 'NGRAM_PATH: expected a table'),
        (['--gin.MIN_CONFIDENCE=1.5'], 'min_confidence: expected a number in'),
        (['--gin.CASCADE="model"'], 'cascade: expected one of'),
        (['--gin.DRAFT_TOPK=3', '--gin.DRAFT_TOPP=0.5'], 'topk and topp'),
        (['--gin.LENIENCE=0.0'], 'lenience'),
        (['--gin.VERIFICATION="best"'], 'verification'),
        (['--gin.GAMMA=-1'], 'gamma: expected at least 0, found -1'),
        (['--gin.TEMPERATURE=-1.0'], 'temperature'),
        (['--gin.TOPK=3', '--gin.TOPP=0.5'], 'topk and topp'),
        (['--gin.CHECKPOINT_PATH=/no/such/checkpoint'], '/no/such/checkpoint'),
        (['--gin.VOCABULARY_PATH=/no/such.model'], '/no/such.model'),
        (["--gin.TASK_FEATURE_LENGTHS={'inputs': 3}"], 'TASK_FEATURE_LENGTHS'),
        (['--gin.BATCH_SIZE=0'], 'BATCH_SIZE'),
        (['--gin.BATCH_SIZE="two"'], 'BATCH_SIZE'),
        (['--gin.draft/T5Config.emb_dim=64'], 'emb_dim: expected 64'),
        (['--gin.no_such.thing=3'], 'no_such'),
        (['--typo=3'], '--typo=3'),
        (['--gin_file=no/such.gin'], 'no/such.gin'),
        (['--input=no/such.txt'], 'no/such.txt'),
    ],
)
def test_bad_settings_are_one_line_and_exit_code_2(arguments, named, sentences, tmp_path, capsys):
  code, records = run(sentences, tmp_path / 'out', *arguments)
  lines = [x for x in capsys.readouterr().err.splitlines() if x]
  assert code == 2
  assert records == []
  assert len(lines) == 1 and lines[0].startswith('error: ') and named in lines[0]


def test_a_folder_of_another_run_is_refused(sentences, tmp_path, capsys):
  run(sentences, tmp_path / 'out', '--gin.GAMMA=2')
  before = (tmp_path / 'out' / 'inferences.jsonl').read_bytes()
  code, _ = run(sentences, tmp_path / 'out', '--gin.GAMMA=3')
  assert code == 2
  assert 'another run' in capsys.readouterr().err
  assert (tmp_path / 'out' / 'inferences.jsonl').read_bytes() == before
