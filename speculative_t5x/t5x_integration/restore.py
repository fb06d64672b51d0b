"""Restoring a target and a draft, each from its own checkpoint, by T5X's own code.

T5X restores one train state from one path. The state of a pair nests both models' parameters; it
is sliced by `target` and `draft`, each part restored as a state of its own, and the two merged.
Each checkpoint may be a native T5X one or Orbax's.
"""

import copy
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import core as flax_core
from t5x import models, partitioning, utils
from t5x import train_state as train_state_lib
from tensorflow.io import gfile

from speculative_t5x import checkpoints, paths
from speculative_t5x.drafters import DrafterConfig
from speculative_t5x.errors import UserError

SIDES = ('target', 'draft')


@dataclasses.dataclass
class PairRestoreCheckpointConfig(utils.RestoreCheckpointConfig):
  """Two `RestoreCheckpointConfig`s in the place of one.

  Attributes:
    target: where and how to restore the target; its `mode` may be 'specific' or 'latest'.
    draft: likewise; not needed when no model drafts.
    drafter: what guesses, as `SpeculativeModel.drafter`; some have no model to restore.

  Every other attribute is set here and left alone.
  """

  path: str | Sequence[str] = ''
  mode: str = 'specific'
  target: utils.RestoreCheckpointConfig | None = None
  draft: utils.RestoreCheckpointConfig | None = None
  drafter: DrafterConfig = DrafterConfig()  # noqa: RUF009 - frozen

  def __post_init__(self):
    """Checks both sides; T5X asks `checkpoint_manager_cls` or `checkpointer_cls` for the state.

    Raises:
      UserError: a side is missing, or its mode or its path is of no use here.
    """
    for side in self.sides:
      check_side(side, getattr(self, side))
    self.path = self.target.path
    self.mode = 'specific'
    # T5X calls the one with `use_orbax` and the other without it.
    self.checkpoint_manager_cls = lambda **kwargs: PairCheckpointManager(self, **kwargs)
    self.checkpointer_cls = lambda **kwargs: PairCheckpointer(self, **kwargs)
    super().__post_init__()

  @property
  def sides(self) -> tuple[str, ...]:
    """The names of the models that are restored."""
    return SIDES if self.drafter.has_model else SIDES[:1]


def restore(
    model: models.BaseTransformerModel, config: PairRestoreCheckpointConfig,
    element_spec: Mapping[str, Any], batch_size: int, partitioner: partitioning.BasePartitioner,
    use_orbax: bool,
) -> tuple[Any, Any]:
  """Restores a pair outside T5X's own commands.

  Args:
    model: a `SpeculativeModel`.
    config: where from.
    element_spec: shape and dtype of the features of one example.
    batch_size: examples in one program run.
    partitioner: of the mesh.
    use_orbax: whether T5X's Orbax manager reads, which reads native checkpoints too.

  Returns:
    The train state, and its axes.
  """
  initializer = utils.TrainStateInitializer(
      optimizer_def=None, init_fn=model.get_initial_variables,
      input_shapes={name: (batch_size, *spec.shape) for name, spec in element_spec.items()},
      input_types={name: spec.dtype.as_numpy_dtype for name, spec in element_spec.items()},
      partitioner=partitioner,
  )
  train_state, _ = utils.create_checkpoint_manager_and_restore(
      initializer, partitioner, config, config.path, None, use_orbax=use_orbax)
  return train_state, initializer.train_state_axes


def check_side(side: str, config: utils.RestoreCheckpointConfig | None) -> None:
  """Refuses a configuration that restores no single checkpoint.

  Raises:
    UserError: it is missing, its mode is 'all', or nothing is at its path.
  """
  if config is None:
    raise UserError(f'{side} checkpoint: expected a RestoreCheckpointConfig, found None')
  if config.mode == 'all' or not isinstance(config.path, (str, os.PathLike)):
    raise UserError(
        f"{side} checkpoint: expected one path and mode 'specific' or 'latest', found "
        f'{config.path!r} and {config.mode!r}'
    )


def find_path(side: str, config: utils.RestoreCheckpointConfig) -> str:
  """The checkpoint that a configuration means.

  Args:
    side: 'target' or 'draft', for the error.
    config: its configuration.

  Returns:
    A path.

  Raises:
    UserError: there is none.
  """
  config = dataclasses.replace(config, path=paths.resolve(os.fspath(config.path)))
  try:
    _, found = utils.get_first_valid_restore_config_and_paths([config])
  except ValueError as error:
    raise UserError(f'{side} checkpoint: expected a folder at {config.path}, found none'
                    ) from error
  found = [path for path in found if _exists(path)]
  if not found:
    raise UserError(f'{side} checkpoint: expected one at {config.path} (mode '
                    f'{config.mode!r}), found none')
  # Orbax refuses relative paths.
  return found[0] if '://' in found[0] else os.path.abspath(found[0])


def check_parameters(
    side: str, path: str, config: utils.RestoreCheckpointConfig,
    state: train_state_lib.InferenceState,
) -> None:
  """Compares names and shapes before arrays are read: T5X cuts and pads those of Orbax in silence.

  Args:
    side: 'target' or 'draft', for the error.
    path: its checkpoint; TensorFlow's are left to T5X.
    config: its configuration; one that transforms the checkpoint is left to T5X.
    state: shapes of its state.

  Raises:
    UserError: there is no checkpoint at `path`, or a parameter differs.
  """
  if config.state_transformation_fns or gfile.exists(f'{path}.index'):
    return
  try:
    checkpoints.check_params(path, state.params)
  except UserError as error:
    raise UserError(f'{side} checkpoint: {error}') from error


def _exists(path: str) -> bool:
  # TensorFlow's checkpoints are a prefix of several files.
  return gfile.exists(path) or gfile.exists(f'{path}.index')


class PairRestorer:
  """Restores both sides; what `PairCheckpointManager` and `PairCheckpointer` have in common."""

  def __init__(
      self, config: PairRestoreCheckpointConfig, train_state: train_state_lib.TrainState,
      partitioner: partitioning.BasePartitioner, use_orbax: bool,
  ):
    """Checks that both checkpoints are there, before anything is read.

    Args:
      config: of the pair.
      train_state: shapes of the pair's state, parameters nested under `target` and `draft`.
      partitioner: of the mesh.
      use_orbax: whether T5X's Orbax manager reads (native checkpoints too), or its own.

    Raises:
      UserError: a checkpoint is missing.
    """
    self._config = config
    self._train_state = train_state
    self._partitioner = partitioner
    self._use_orbax = use_orbax
    self._paths = {side: find_path(side, getattr(config, side)) for side in config.sides}

  def restore(self, **kwargs: Any) -> train_state_lib.TrainState:
    """Both sides as one state; its step is the target's. T5X's arguments name the target alone."""
    del kwargs
    return merge(self._train_state, {side: self._restore_side(side) for side in self._paths})

  def restore_from_tf_checkpoint(self, *args: Any, **kwargs: Any) -> train_state_lib.TrainState:
    """What T5X calls in place of `restore` where the target's checkpoint is TensorFlow's."""
    del args, kwargs
    return self.restore()

  def _restore_side(self, side: str) -> train_state_lib.TrainState:
    # T5X's commands allow for what an optimizer leaves in the configuration of the pair.
    config = copy.copy(getattr(self._config, side))
    config.strict = self._config.strict
    path = self._paths[side]
    state = slice_state(self._train_state, side)
    check_parameters(side, path, config, state)
    if self._use_orbax:
      manager = utils.create_orbax_checkpoint_manager(
          restore_cfg=config, train_state=state, partitioner=self._partitioner,
          model_dir=path)
      restored = utils.restore(manager, [path], config)
      manager.close()
    else:
      manager = utils.LegacyCheckpointManager(
          save_cfg=None, restore_cfg=config, train_state_shape=state,
          partitioner=self._partitioner)
      restored = manager.restore([path], config)
    return restored


def slice_state(
    state: train_state_lib.InferenceState, side: str
) -> train_state_lib.InferenceState:
  """The part of a pair's state that is one side's.

  Args:
    state: of the pair.
    side: 'target' or 'draft'.

  Returns:
    A state as the side's own model has it.

  Raises:
    UserError: the state is one for training.
  """
  if not isinstance(state, train_state_lib.InferenceState):
    raise UserError(
        'train state: expected an InferenceState (a pair is trained a model at a time), found '
        f'{type(state).__name__}'
    )
  part = lambda tree: tree if tree is None else tree[side]
  each = lambda tree: tree and flax_core.freeze({name: tree[name][side] for name in tree})
  return state.replace(
      params=part(state.params), params_axes=part(state.params_axes),
      flax_mutables=each(state.flax_mutables), flax_mutables_axes=each(state.flax_mutables_axes))


def merge(
    state: train_state_lib.InferenceState, sides: dict[str, train_state_lib.InferenceState]
) -> train_state_lib.InferenceState:
  """`state` with what both sides hold; its step is the target's."""
  return state.replace(
      step=sides['target'].step,
      params=flax_core.freeze({side: found.params for side, found in sides.items()}),
      flax_mutables=flax_core.freeze({
          name: {side: found.flax_mutables[name] for side, found in sides.items()}
          for name in state.flax_mutables
      }))


class PairCheckpointManager(PairRestorer):
  """Takes the place of T5X's `OrbaxCheckpointManagerInterface` where it only restores."""

  def __init__(
      self, config: PairRestoreCheckpointConfig, *, directory: str,
      train_state: train_state_lib.TrainState, partitioner: partitioning.BasePartitioner,
      restore_dtype: jnp.dtype | None = None, **kwargs: Any,
  ):
    """See `checkpoints.CheckpointManagerConstructor`; a pair is not saved."""
    del directory, restore_dtype, kwargs
    super().__init__(config, train_state, partitioner, use_orbax=True)


class PairCheckpointer(PairRestorer):
  """Takes the place of T5X's `Checkpointer` where it only restores."""

  def __init__(
      self, config: PairRestoreCheckpointConfig, *, train_state: train_state_lib.TrainState,
      partitioner: partitioning.BasePartitioner, **kwargs: Any,
  ):
    """See `checkpoints.CheckpointerConstructor`; a pair is not saved."""
    del kwargs
    super().__init__(config, train_state, partitioner, use_orbax=False)
