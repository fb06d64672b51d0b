"""A whole distillation run: what is read and checked, what the target writes, what is trained."""

import dataclasses
import pathlib
import re
import sys
import time
from collections.abc import Callable, Sequence

import gin
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from speculative_t5x import gin_command, paths, run_output, training, vocabularies
from speculative_t5x import inputs as inputs_lib
from speculative_t5x.distil import evaluation, examples, generation, trainer
from speculative_t5x.distil.recipe import (
    REFERENCES,
    TARGET,
    Recipe,
    check_count,
    distillation_loss,
)
from speculative_t5x.drafters import DrafterConfig
from speculative_t5x.errors import UserError
from speculative_t5x.network import T5Config, Transformer
from speculative_t5x.network.partitioning import (
    REPLICATED,
    RULES,
    check_divides,
    mesh_of,
    param_shapes,
)
from speculative_t5x.pair import Model, Pair, load_model, load_pair
from speculative_t5x.training import Example

# Settings that a run may be continued with other values of.
FREE_SETTINGS = (
    'MODEL_DIR', 'TARGET_OUTPUTS_DIR', 'SAVE_PERIOD', 'EVAL_PERIOD', 'LOG_PERIOD', 'NUM_PARTITIONS',
)
TELL_SECONDS = 10


@gin.configurable(module='speculative_t5x')
def distil(
    input_path: str | None, held_out_path: str | None, *,
    output_dir: str = gin.REQUIRED,
    recipe: Recipe = gin.REQUIRED,
    draft: T5Config | None = None,
    draft_checkpoint_path: str | None = None,
    vocabulary_path: str = gin.REQUIRED,
    extra_ids: int = 0,
    gamma: int = 4,
    mixture_or_task_name: str | None = None,
    split: str = 'train',
    held_out_split: str | None = None,
    num_held_out: int = 64,
    task_feature_lengths: dict[str, int] = gin.REQUIRED,
    prefix: str = '',
    target_outputs_dir: str | None = None,
    save_period: int = 1000,
    eval_period: int = 500,
    log_period: int = 100,
    num_partitions: int = 1,
) -> pathlib.Path:
  """Trains a draft for the target of `load_pair`, or goes on with it.

  Args:
    input_path: a file of inputs, with references if the recipe wants them; None reads the task.
    held_out_path: a file of inputs to measure alpha on, of which the first are taken.
    output_dir: folder of checkpoints, state and log.
    recipe: what is learnt and how.
    draft: the network; None is what its checkpoint says.
    draft_checkpoint_path: where the draft begins; None is parameters drawn at random.
    vocabulary_path: of both models.
    extra_ids: sentinel ids behind its pieces.
    gamma: drafts a round while the target writes texts; only with a draft from a checkpoint.
    mixture_or_task_name: a seqio task, used when there is no `input_path`.
    split: of the task.
    held_out_split: of the task, in place of `held_out_path`.
    num_held_out: inputs to measure alpha on. Without a source of their own they are the last ones
      of the inputs, which are not trained on then.
    task_feature_lengths: tokens of `inputs` and `targets` at most.
    prefix: put before every input.
    target_outputs_dir: where the target's texts for the inputs are kept, so that several runs can
      learn on them; None is a folder in `output_dir`.
    save_period: steps between checkpoints.
    eval_period: steps between measurements of alpha.
    log_period: steps between records of the loss.
    num_partitions: devices that share the target's parameters; the others take other rows of a
      batch. The draft is whole on every device.

  Returns:
    The last checkpoint.

  Raises:
    UserError: something is not what it must be; nothing was changed then.
  """
  lengths = task_feature_lengths
  _check(recipe, lengths, num_held_out, save_period, eval_period, log_period)
  mesh = _mesh(num_partitions, recipe.batch_size)
  vocabulary = vocabularies.load_vocabulary(paths.resolve(vocabulary_path), extra_ids=extra_ids)
  with_targets = recipe.examples == REFERENCES
  read = lambda path, of_split, wanted: examples.encode(
      _read(path, mixture_or_task_name, of_split), vocabulary, lengths, prefix=prefix,
      with_targets=wanted)
  train = read(input_path, split, with_targets)
  if held_out_path is None and held_out_split is None:
    train, held_out = train[:-num_held_out], train[-num_held_out:]
    _tell(f'alpha is measured on the last {len(held_out)} inputs, which are not trained on')
  else:
    held_out = read(held_out_path, held_out_split, False)[:num_held_out]
  if len(train) < recipe.batch_size:
    raise UserError(f'inputs: expected at least BATCH_SIZE {recipe.batch_size} to train on, '
                    f'found {len(train)}')
  if not held_out:
    raise UserError('held-out inputs: expected at least one, found none')
  settings = {'config': _fixed_config(), 'inputs_sha256': examples.digest(train),
              'held_out_sha256': examples.digest([inputs for inputs, _ in held_out])}
  run_output.check_folder(output_dir, settings)
  pair, draft = _load(
      draft, draft_checkpoint_path, gamma, vocabulary, recipe, mesh, num_partitions)
  state = training.init_state(draft.module, recipe.train_config, draft.params)
  run_output.open_folder(output_dir, settings)
  with mesh:
    return _run(
        pair, draft.module, state, recipe, train, held_out, mesh=mesh, lengths=lengths,
        folder=trainer.Folder(output_dir),
        target_outputs_dir=target_outputs_dir or pathlib.Path(output_dir) / 'target_outputs',
        periods={'save_period': save_period, 'eval_period': eval_period, 'log_period': log_period})


def _run(
    pair: Pair, draft: Transformer, state: training.TrainState, recipe: Recipe,
    train: Sequence[Example], held_out: Sequence[Example], *, mesh: Mesh, lengths: dict[str, int],
    folder: trainer.Folder, target_outputs_dir: str | pathlib.Path, periods: dict[str, int],
) -> pathlib.Path:
  """Everything behind the checks; see `distil`."""
  rows, whole = NamedSharding(mesh, PartitionSpec('data')), NamedSharding(mesh, PartitionSpec())
  place = lambda x: jax.device_put(x, rows)
  buckets = examples.buckets_of(lengths)
  vocabulary, batch_size = pair.vocabulary, recipe.batch_size
  rule, draft_rule = pair.sampling, pair.draft_sampling or pair.sampling

  def written_by_target(of_inputs, where, what):
    settings = {
        'CHECKPOINT_PATH': gin_command.macro('CHECKPOINT_PATH'), 'rule': str(rule),
        'seed': recipe.seed, 'max_length': lengths['targets'],
        'inputs_sha256': examples.digest(of_inputs)}
    return generation.target_texts(
        pair, of_inputs, where, settings, batch_size=batch_size, buckets=buckets,
        seed=recipe.seed, place=place, tell=_progress(what))

  inputs = [ids for ids, _ in held_out]
  texts = written_by_target(inputs, folder.path / 'held_out', 'held-out texts')
  held_out_batches = [
      training.Batch(*map(place, batch)) for batch in evaluation.held_out_batches(
          list(zip(inputs, texts, strict=True)), batch_size, buckets)]
  if recipe.examples == TARGET:
    inputs = [ids for ids, _ in train]
    texts = written_by_target(inputs, target_outputs_dir, 'training texts')
    train = list(zip(inputs, texts, strict=True))

  saved = folder.load(state)
  if saved is not None:
    state = saved
    _tell(f'going on from step {int(state.step)}')
  state = jax.device_put(state, whole)
  alpha = evaluation.make_alpha(pair.target.module, draft, vocabulary.size, rule, draft_rule)
  sample = generation.make_sampler(draft, vocabulary, draft_rule, lengths['targets'])
  key = jax.random.fold_in(jax.random.key(recipe.seed), generation.SAMPLING_STREAM)

  def write_texts(params, batches, step):
    texts = lambda x: np.asarray(sample(params, place(x), jax.random.fold_in(key, step)))
    return generation.on_policy(batches, texts, buckets, vocabulary.eos_id)

  state = trainer.train(
      state, folder, recipe,
      train_step=training.make_train_step(
          distillation_loss(draft, pair.target.module, recipe, vocabulary),
          recipe.train_config),
      target_params=pair.target.params if recipe.needs_teacher else None,
      stream=lambda first: training.stream(
          train, lambda _: batch_size, recipe.seed, first, buckets=buckets, fill=True),
      write_texts=write_texts,
      alpha=lambda params: alpha(pair.target.params, params, held_out_batches),
      place=place, eos_id=vocabulary.eos_id, tell=_tell, **periods)
  return folder.checkpoint(int(state.step))


def _check(recipe, lengths, num_held_out, save_period, eval_period, log_period) -> None:
  """Refuses what no run can have."""
  if jax.process_count() > 1:
    raise UserError(f'processes: expected 1 with all devices, found {jax.process_count()}')
  if not isinstance(lengths, dict) or {'inputs', 'targets'} - {*lengths}:
    raise UserError(
        f"TASK_FEATURE_LENGTHS: expected {{'inputs': …, 'targets': …}}, found {lengths!r}")
  counts = {f'TASK_FEATURE_LENGTHS {name}': lengths[name] for name in ('inputs', 'targets')}
  counts |= {'NUM_HELD_OUT': num_held_out, 'SAVE_PERIOD': save_period,
             'EVAL_PERIOD': eval_period, 'LOG_PERIOD': log_period}
  for name, value in counts.items():
    check_count(name, value, 1)
  if recipe.uses_draft and save_period % recipe.sample_period:
    raise UserError(f'SAVE_PERIOD: expected a multiple of SAMPLE_PERIOD {recipe.sample_period}, '
                    f'found {save_period}')


def _mesh(num_partitions: int, batch_size: int) -> Mesh:
  """All devices, each `num_partitions` of which share a target."""
  check_count('NUM_PARTITIONS', num_partitions, 1)
  devices = jax.devices()
  if len(devices) % num_partitions:
    raise UserError(f'NUM_PARTITIONS: expected a divisor of the {len(devices)} devices, '
                    f'found {num_partitions}')
  spread = len(devices) // num_partitions
  if batch_size % spread:
    raise UserError(f'BATCH_SIZE: expected a multiple of {spread}, over which rows are spread '
                    f'({len(devices)} devices, NUM_PARTITIONS {num_partitions}), '
                    f'found {batch_size}')
  return mesh_of(devices, num_partitions)


def _read(path: str | None, task: str | None, split: str | None):
  """The inputs of a file, or of a task's split."""
  if (path is None) == (task is None or split is None):
    raise UserError('inputs: expected either a file or MIXTURE_OR_TASK_NAME with a split, found '
                    f'{path!r}, {task!r} and {split!r}')
  if path is not None:
    return inputs_lib.read_file(path)[0]
  return inputs_lib.read_task(task, split)


def _fixed_config() -> str:
  """The gin configuration without what a run may be continued with other values of."""
  lines = gin.config_str(max_line_length=10**6).splitlines()
  pattern = re.compile(f'({"|".join(FREE_SETTINGS)}) = ')
  return '\n'.join(line for line in lines if not pattern.match(line))


def _load(
    config: T5Config | None, path: str | None, gamma: int, vocabulary: vocabularies.Vocabulary,
    recipe: Recipe, mesh: Mesh, num_partitions: int,
) -> tuple[Pair, Model]:
  """The pair that writes the target's texts, and the draft to train; its `params` may be None."""
  if path is None and config is None:
    raise UserError('DRAFT: expected a network, or DRAFT_CHECKPOINT_PATH, found neither')
  params = None
  if path is not None:
    loaded = load_model(path, config, 'float32', vocabulary)
    config, params = loaded.module.config, loaded.params
  for name, least in (('vocab_size', vocabulary.size), ('num_encoder_layers', 1)):
    if getattr(config, name) < least:
      raise UserError(f'DRAFT: expected {name} of at least {least}, found {getattr(config, name)}')
  draft = Transformer(dataclasses.replace(config, dropout_rate=recipe.dropout_rate))

  def shardings(module):
    if module.config.num_encoder_layers < 1:
      raise UserError('TARGET: expected a network with an encoder, found a decoder-only one')
    check_divides('NUM_PARTITIONS', 'target', module.config, num_partitions)
    rules = RULES if num_partitions > 1 else REPLICATED
    return jax.tree.map(lambda x: x.sharding, param_shapes(module, mesh, rules))

  # How texts are decoded for users is no matter here: one text an input, exactly the target's.
  pair = load_pair(
      gamma=0, drafter=DrafterConfig(), lenience=1.0, num_decodes=1, beam_alpha=None,
      max_decode_steps=None, target_shardings=shardings)
  if params is None:
    return pair, Model(draft, None)
  params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
  # The state is used up as training goes on, so it gets arrays of its own.
  own = jax.tree.map(lambda x: x.copy(), params)
  return dataclasses.replace(pair, draft=Model(draft, params), gamma=gamma), Model(draft, own)


def _tell(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


def _progress(what: str) -> Callable[[int, int], None]:
  """Tells how many texts are done, not too often."""
  told = -TELL_SECONDS

  def tell(done, of_all):
    nonlocal told
    now = time.monotonic()
    if done == of_all or now - told > TELL_SECONDS:
      told = now
      _tell(f'{what} by the target: {done} of {of_all}')

  return tell
