"""A pair in a notebook, as T5X's `InteractiveModel` is used.

T5X's own class restores one checkpoint, and native ones only; this one has its constructor's and
methods' names where they mean the same, restores both sides of either format, and does not train.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import seqio
import tensorflow as tf
from t5x import interactive_model, partitioning, utils

from speculative_t5x.errors import UserError
from speculative_t5x.t5x_integration import tasks
from speculative_t5x.t5x_integration.model import SpeculativeModel
from speculative_t5x.t5x_integration.restore import PairRestoreCheckpointConfig, restore

Example = str | dict[str, str]


class InteractiveModel:
  """A restored pair that predicts and scores texts.

  Attributes:
    model: the pair's model.
    train_state: its parameters, `{'target': …, 'draft': …}`.
  """

  def __init__(
      self,
      model: SpeculativeModel,
      checkpoint_path: str,
      draft_checkpoint_path: str,
      task_feature_lengths: Mapping[str, int],
      batch_size: int = 8,
      partitioner: partitioning.BasePartitioner | None = None,
      dtype: str | None = 'float32',
      restore_mode: str = 'specific',
      use_orbax: bool = True,
      add_eos: bool = True,
  ):
    """Restores both checkpoints.

    Args:
      model: the pair's model.
      checkpoint_path: the target's checkpoint, native T5X or Orbax.
      draft_checkpoint_path: the draft's.
      task_feature_lengths: tokens of `inputs` and `targets` at most; longer ones are cut.
      batch_size: examples in one program run.
      partitioner: of the mesh; None is one device.
      dtype: of the parameters; None is as saved.
      restore_mode: 'specific', or 'latest' in a folder of checkpoints.
      use_orbax: whether T5X's Orbax manager reads, which reads native checkpoints too.
      add_eos: whether inputs and targets end in EOS.

    Raises:
      UserError: a checkpoint is missing, or lengths are.
    """
    missing = {'inputs', 'targets'} - {*task_feature_lengths}
    if missing:
      raise UserError(
          f'task_feature_lengths: expected inputs and targets, found {dict(task_feature_lengths)}'
      )
    self.model = model
    self._task_feature_lengths = dict(task_feature_lengths)
    self._batch_size = batch_size
    self._partitioner = partitioner or partitioning.PjitPartitioner(num_partitions=1)
    self._converter = model.FEATURE_CONVERTER_CLS(pack=False)
    self._features = {
        'inputs': seqio.Feature(model.input_vocabulary, add_eos=add_eos),
        'targets': seqio.Feature(model.output_vocabulary, add_eos=add_eos),
    }
    side = functools.partial(utils.RestoreCheckpointConfig, mode=restore_mode, dtype=dtype)
    config = PairRestoreCheckpointConfig(
        target=side(path=checkpoint_path), draft=side(path=draft_checkpoint_path))
    element_spec = self._model_dataset(['']).element_spec
    self.train_state, self._axes = restore(
        model, config, element_spec, batch_size, self._partitioner, use_orbax)
    # A method is compiled once for the same keyword arguments.
    self._infer_fn = functools.cache(self._compile)

  def predict_with_aux(
      self, examples: Sequence[Example], seed: int = 0, **kwargs: Any
  ) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Decodes texts.

    Args:
      examples: texts, or T5X's objects with a text `input` and `target`.
      seed: of the sampling.
      **kwargs: of `SpeculativeModel.predict_batch_with_aux` that are not arrays, such as
        `num_decodes`.

    Returns:
      `(input, prediction)` of each; and `scores` and `statistics`, lists in the same order.
    """
    outputs, aux = self._infer('predict_batch_with_aux', examples, seed, kwargs)
    decode = self.model.output_vocabulary.decode_tf
    predictions = [decode(tf.constant(ids)).numpy().decode('utf-8') for ids in outputs]
    texts = [example if isinstance(example, str) else example['input'] for example in examples]
    return list(zip(texts, predictions, strict=True)), aux

  def predict(self, examples: Sequence[Example], seed: int = 0, **kwargs: Any) -> list[str]:
    """The predictions of `predict_with_aux`."""
    return [found for _, found in self.predict_with_aux(examples, seed, **kwargs)[0]]

  def score(self, examples: Sequence[dict[str, str]]) -> list[float]:
    """Log-likelihood of each example's `target` under the target model."""
    return self._infer('score_batch', examples, 0, {})[0]

  def _infer(self, method, examples, seed, kwargs):
    """Outputs of a method of the model, and its auxiliary values, in the examples' order."""
    infer_fn = self._infer_fn(method, tuple(sorted(kwargs.items())))
    found = infer_fn(
        self._model_dataset(examples).enumerate(), train_state=self.train_state,
        rng=jax.random.PRNGKey(seed))
    found, aux = found if isinstance(found, tuple) else (found, {})
    order = np.argsort([index for index, _ in found])
    pick = lambda values: [values[i] for i in order]
    return pick([output for _, output in found]), jax.tree.map(
        pick, aux, is_leaf=lambda x: isinstance(x, list))

  def _compile(self, method, kwargs):
    return utils.get_infer_fn(
        infer_step=functools.partial(getattr(self.model, method), **dict(kwargs)),
        batch_size=self._batch_size, train_state_axes=self._axes, partitioner=self._partitioner)

  def _model_dataset(self, examples: Sequence[Example]) -> tf.data.Dataset:
    """The model's features of texts."""
    pairs = [
        {'input': example, 'target': ''} if isinstance(example, str)
        else {'target': '', **example} for example in examples
    ]
    dataset = interactive_model.get_dataset_from_natural_text_examples(
        pairs, preprocessors=tasks.PREPROCESSORS,
        task_feature_lengths=self._task_feature_lengths, features=self._features)
    converted = self._converter(dataset, task_feature_lengths=self._task_feature_lengths)
    # One batch of all, unbatched: T5X asks for the dataset's length.
    return tf.data.Dataset.from_tensor_slices(
        converted.padded_batch(len(pairs)).get_single_element())
