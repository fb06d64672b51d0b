"""The interactive model, and the check of what is installed."""

import functools
import importlib.metadata
import sys

import numpy as np
import pytest

from speculative_t5x.demo import tasks as demo_tasks
from speculative_t5x.demo.__main__ import load_demo_pair
from speculative_t5x.errors import UserError

# A submodule: this folder itself would pass for a package `t5x` without T5X.
models = pytest.importorskip('t5x.models', reason='needs T5X, which is not on PyPI')

from speculative_t5x.t5x_integration import (  # noqa: E402
  decoding,
  interactive,
  network,
  tasks,
  versions,
)
from speculative_t5x.t5x_integration import model as model_lib  # noqa: E402

LENGTHS = {'inputs': 64, 'targets': 64}


@pytest.fixture(scope='module')
def demo():
  return load_demo_pair()


@pytest.fixture(scope='module')
def pair_model(demo):
  vocabulary = tasks.vocabulary(str(demo_tasks.VOCABULARY))

  def side(found):
    return models.EncoderDecoderModel(
        network.Transformer(found.module.config), vocabulary, vocabulary, None)

  return model_lib.SpeculativeModel(
      side(demo.target), side(demo.draft), gamma=4,
      decode_fn=functools.partial(
          decoding.speculative_decode, temperature=0.0, rescale_log_probs=False))


def checkpoints():
  return {
      name: str(next((demo_tasks.ASSETS / side).iterdir()))
      for name, side in (('checkpoint_path', 'target'), ('draft_checkpoint_path', 'draft'))
  }


@pytest.fixture(scope='module')
def interactive_model(pair_model):
  return interactive.InteractiveModel(
      pair_model, **checkpoints(), task_feature_lengths=LENGTHS, batch_size=2)


def test_predictions_are_those_of_the_pair(demo, interactive_model):
  # Three texts in batches of two: the last one is padded.
  texts = [text for text, _ in demo_tasks.examples(
      demo_tasks.read_pairs(demo_tasks.HELD_OUT), 'restoration') if len(text) < 80][:3]
  found, aux = interactive_model.predict_with_aux(texts)
  ids = [[*demo.vocabulary.encode(text), demo.vocabulary.eos_id] for text in texts]
  inputs = np.zeros((3, 64), np.int32)
  for row, row_ids in zip(inputs, ids, strict=True):
    row[: len(row_ids)] = row_ids
  expected = demo.predict(inputs, max_length=64, gamma=4)
  assert found == [
      (text, demo.vocabulary.decode(sequence[0]))
      for text, sequence in zip(texts, np.asarray(expected.sequences), strict=True)
  ]
  np.testing.assert_allclose(aux['scores'], expected.scores[:, 0], atol=1e-3)
  np.testing.assert_array_equal(
      aux['statistics']['accepted'], np.asarray(expected.statistics.accepted)[:, 0])
  assert interactive_model.predict(texts[:1]) == [found[0][1]]


def test_scores_prefer_the_prediction(interactive_model):
  text = 'restore: open the file and click ok'
  [best] = interactive_model.predict([text])
  scores = interactive_model.score(
      [{'input': text, 'target': best}, {'input': text, 'target': 'Open the window.'}])
  _, aux = interactive_model.predict_with_aux([text])
  assert scores[0] == pytest.approx(aux['scores'][0], abs=1e-3)
  assert scores[0] > scores[1]


def test_missing_checkpoints_and_lengths_are_named(pair_model, tmp_path):
  build = functools.partial(interactive.InteractiveModel, pair_model)
  with pytest.raises(UserError, match=r'draft checkpoint: expected one at .*none'):
    build(**{**checkpoints(), 'draft_checkpoint_path': str(tmp_path / 'none')},
          task_feature_lengths=LENGTHS)
  with pytest.raises(UserError, match='task_feature_lengths: expected inputs and targets'):
    build(**checkpoints(), task_feature_lengths={'inputs': 8})


def test_libraries_of_another_time_are_named(monkeypatch):
  versions.check_versions()
  with monkeypatch.context() as patch:
    patch.setattr(importlib.metadata, 'version', lambda name: '0.6.2')
    with pytest.raises(UserError, match=r'jax: expected at least version 0\.7, found 0\.6\.2'):
      versions.check_versions()
  with monkeypatch.context() as patch:
    patch.delattr('t5x.models.DecoderParams')
    with pytest.raises(UserError, match='expected DecoderParams, found a T5X without it'):
      versions.check_versions()
  # None in sys.modules makes an import fail.
  monkeypatch.setitem(sys.modules, 't5x.utils', None)
  with pytest.raises(UserError, match=r't5x\.utils: expected T5X to import'):
    versions.check_versions()
