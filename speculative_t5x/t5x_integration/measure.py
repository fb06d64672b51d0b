r"""`python -m speculative_t5x.measure` for a pair of T5X models.

    python -m speculative_t5x.t5x_integration.measure --gin_file=… --gin.CHECKPOINT_PATH=… \
        --output_dir=measured --gammas 1 3 5 7

Everything but the arguments of the measurement is as for `python -m t5x.infer`: the same gin files
and bindings.
"""

import argparse
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gin
import jax
import jax.numpy as jnp
import numpy as np
import seqio
import t5x
from flax.linen import partitioning as flax_partitioning
from t5x import models, partitioning, utils

from speculative_t5x import gin_command
from speculative_t5x.errors import UserError
from speculative_t5x.measure import __main__ as command
from speculative_t5x.measure.subject import Decoded, ModelSteps
from speculative_t5x.sampling import SamplingRule
from speculative_t5x.t5x_integration import adapters
from speculative_t5x.t5x_integration.model import SpeculativeModel
from speculative_t5x.t5x_integration.restore import PairRestoreCheckpointConfig, restore


class ModelSubject:
  """A restored `SpeculativeModel` on batches of its features; see `measure.subject.Subject`.

  Steps and acceptance are measured for an encoder-decoder target. A decoder-only one has its
  decoding measured.
  """

  def __init__(
      self, model: SpeculativeModel, params: Mapping[str, Any],
      batches: Sequence[Mapping[str, np.ndarray]], rule: SamplingRule, draft_rule: SamplingRule,
      partitioner: partitioning.BasePartitioner, seed: int = 0,
  ):
    """See the class.

    Args:
      model: the pair.
      params: its parameters, `{'target': …, 'draft': …}`.
      batches: features of the target's converter, `[B, …]` each.
      rule: the target's sampling rule.
      draft_rule: the draft's.
      partitioner: of the mesh that `params` lie on.
      seed: of the sampling.
    """
    self.model = model
    self.params = params
    self.rule = rule
    self.draft_rule = draft_rule
    self.max_length = batches[0]['decoder_input_tokens'].shape[1]
    self._batches = [jax.tree.map(jnp.asarray, dict(batch)) for batch in batches]
    self.shapes = [
        tuple(next(iter(batch.values())).shape) for batch in self._batches]
    self._partitioner = partitioner
    self._key = jax.random.PRNGKey(seed)
    self._programs = {}

  def program(self, batch: int, gamma: int) -> jax.stages.Compiled:
    """See `Subject.program`."""
    shape = self.shapes[batch]
    if (shape, gamma) not in self._programs:
      decode = functools.partial(
          self.model.predict_batch_with_aux, decoder_params={'gamma': gamma}, num_decodes=1,
          return_all_decodes=False)
      with self._partitioner.mesh, flax_partitioning.axis_rules(
          self._partitioner.logical_axis_rules):
        self._programs[shape, gamma] = jax.jit(decode).lower(
            self.params, self._batches[batch], self._key).compile()
    return self._programs[shape, gamma]

  def run(self, program: jax.stages.Compiled, batch: int) -> Decoded:
    """See `Subject.run`."""
    sequences, aux = program(self.params, self._batches[batch], self._key)
    return Decoded(sequences, aux['statistics'])

  def models(self, batch: int, slots: int) -> dict[str, ModelSteps]:
    """See `Subject.models`."""
    prompt = adapters.prompt_of(self.model.target, self._batches[batch], False)

    def steps(name, model):
      prepare = lambda params: adapters.prepare(
          model, params, prompt, num_slots=slots, num_decodes=1,
          vocab_size=self.model.output_vocabulary.vocab_size)
      return ModelSteps(
          self.params[name], lambda params: prepare(params).cache,
          lambda params, *args: prepare(params).tokens_to_logits(*args))

    found = {'target': steps('target', self.model.target)}
    is_encoder_decoder = isinstance(self.model.target, models.EncoderDecoderModel)
    if self.model.draft is not None and is_encoder_decoder:
      found['draft'] = steps('draft', self.model.draft)
    return found


class Configured(NamedTuple):
  """What the gin files say, see T5X's `infer`."""

  model: SpeculativeModel
  dataset_cfg: utils.DatasetConfig
  restore_checkpoint_cfg: PairRestoreCheckpointConfig
  partitioner: partitioning.BasePartitioner
  use_orbax: bool


def infer(
    *, model: SpeculativeModel, dataset_cfg: utils.DatasetConfig,
    restore_checkpoint_cfg: PairRestoreCheckpointConfig,
    partitioner: partitioning.BasePartitioner, use_orbax: bool = True, **unused: Any,
) -> Configured:
  """Named as T5X's function, so that the same gin files bind it; returns its arguments."""
  del unused
  return Configured(model, dataset_cfg, restore_checkpoint_cfg, partitioner, use_orbax)


def subject_of(found: Configured, num_inputs: int, batch_size: int) -> ModelSubject:
  """Reads inputs and restores both checkpoints.

  Args:
    found: model, task and checkpoints.
    num_inputs: of the task's first examples, how many at most.
    batch_size: examples in one program run; an incomplete batch is left out.

  Returns:
    The subject.

  Raises:
    UserError: the model is no pair, or there are too few inputs.
  """
  model, config = found.model, found.dataset_cfg
  if not isinstance(model, SpeculativeModel):
    raise UserError(f'model: expected a SpeculativeModel, found {type(model).__name__}')
  if config.module:
    utils.import_module(config.module)
  dataset = seqio.maybe_get_mixture_or_task(config.mixture_or_task_name).get_dataset(
      sequence_length=config.task_feature_lengths, split=config.split, shuffle=False,
      num_epochs=1, use_cached=config.use_cached, seed=config.seed)
  examples = model.FEATURE_CONVERTER_CLS(pack=False)(dataset, config.task_feature_lengths)
  batches = list(
      examples.take(num_inputs).batch(batch_size, drop_remainder=True).as_numpy_iterator())
  if not batches:
    raise UserError(f'inputs: expected at least --batch_size {batch_size}, found fewer')
  state, _ = restore(
      model, found.restore_checkpoint_cfg, examples.element_spec, batch_size, found.partitioner,
      found.use_orbax)
  values = lambda prefix: [
      gin_command.macro(prefix + name) for name in ('TEMPERATURE', 'TOPK', 'TOPP')]
  rule = SamplingRule(*values(''))
  return ModelSubject(
      model, state.params, batches, rule, rule.override(*values('DRAFT_')), found.partitioner)


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code."""
  infer_using_gin = gin.configurable(infer)

  def run():
    parser = argparse.ArgumentParser(
        prog='python -m speculative_t5x.t5x_integration.measure',
        description=__doc__.splitlines()[0], allow_abbrev=False)
    command.add_arguments(parser)
    args = gin_command.parse(parser, arguments)
    args.gin_search_paths += ',' + os.path.dirname(os.path.dirname(t5x.__file__))
    command.configure(args)
    command.finish(subject_of(infer_using_gin(), args.num_inputs, args.batch_size), args)
    return 0

  return gin_command.run(run)


if __name__ == '__main__':
  sys.exit(main())
