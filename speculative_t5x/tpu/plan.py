"""Compiles a pair's programs for a TPU slice from shapes alone, and sums up what they need.

`B` is the batch, `S` the input length, `L` the output length. Every figure is of one chip.
"""

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import partitioning as nn_partitioning
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from speculative_t5x import analysis, decoding
from speculative_t5x.errors import UserError
from speculative_t5x.network import T5Config, Transformer, tokens_to_logits
from speculative_t5x.pair import Model, Pair
from speculative_t5x.sampling import SamplingRule
from speculative_t5x.tpu import hlo
from speculative_t5x.tpu.chips import chip_of

# Model parallelism by heads, feed-forward units and vocabulary, as T5X's standard rules have it.
RULES = (
    ('batch', 'data'), ('vocab', 'model'), ('heads', 'model'), ('joined_kv', 'model'),
    ('mlp', 'model'), ('embed', None), ('kv', None), ('length', None), ('relpos_buckets', None),
)
REPLICATED = (('batch', 'data'),)


@dataclasses.dataclass(frozen=True)
class Request:
  """What to plan.

  Attributes:
    target: the target's network.
    draft: the draft's.
    topology: such as 'v5p:2x2x1'.
    partitions: chips that share the target's parameters.
    draft_partitioned: whether the draft is spread over them too; it is replicated otherwise.
    gamma: drafts a round.
    batch_size: `B`.
    input_length: `S`.
    output_length: `L`.
    temperature: 0 is greedy.
    alpha: acceptance rate to predict with.
  """

  target: T5Config
  draft: T5Config
  topology: str
  partitions: int = 1
  draft_partitioned: bool = False
  gamma: int = 7
  batch_size: int = 1
  input_length: int = 128
  output_length: int = 128
  temperature: float = 0.0
  alpha: float = 0.75


@dataclasses.dataclass(frozen=True)
class Program:
  """One compiled program.

  Attributes:
    argument_bytes: parameters and other inputs.
    temporary_bytes: caches and intermediate values.
    output_bytes: results that are no inputs.
    traffic_bytes: moved to and from memory in one run, loops counted once.
    flops: operations in one run, loops counted once.
    seconds: the compiler's estimate where it has one of every operation, otherwise the time that
      traffic and operations take at the chip's best.
    collectives: by kind.
  """

  argument_bytes: int
  temporary_bytes: int
  output_bytes: int
  traffic_bytes: int
  flops: float
  seconds: float
  collectives: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a slice needs.

  Attributes:
    request: what was asked for, in words and numbers.
    hbm_bytes: memory of a chip.
    needed_bytes: of the speculative program.
    fits: whether it does.
    largest_batch: that fits, extrapolated from two batch sizes; None when none does.
    programs: 'speculative' and 'plain' decoding; the steps 'target_1', 'target_verify', 'draft_1';
      'encoder'.
    c: time of a draft step / of a target step.
    v: time of the target on gamma + 1 tokens / on one.
    factor: speed over plain decoding that alpha, c and v predict.
    best_gamma: of the formula, v growing evenly up to this one.
    traffic_c: c, by traffic in place of time.
    traffic_v: v, likewise.
    traffic_factor: the factor, likewise.
  """

  request: dict[str, Any]
  hbm_bytes: int
  needed_bytes: int
  fits: bool
  largest_batch: int | None
  programs: dict[str, Program]
  c: float
  v: float
  factor: float
  best_gamma: int
  traffic_c: float
  traffic_v: float
  traffic_factor: float


class DoesNotFit(UserError):
  """A program needs more memory than a chip has."""


class _AnyVocabulary:
  """Plans need a vocabulary's size alone."""

  def __init__(self, size: int):
    self.size, self.eos_id, self.pad_id = size, 1, 0


class Planner:
  """Compiles one request's programs."""

  def __init__(self, request: Request):
    """Finds the slice.

    Args:
      request: what to plan.

    Raises:
      UserError: the topology is unknown, there is no TPU compiler, or the partitions do not divide.
    """
    self.request = request
    self.chip = chip_of(request.topology)
    devices = topology_devices(request.topology)
    if request.partitions < 1 or len(devices) % request.partitions:
      raise UserError(
          f'--partitions: expected a divisor of the {len(devices)} chips of {request.topology}, '
          f'found {request.partitions}')
    self._check_divides('target', request.target)
    if request.draft_partitioned:
      self._check_divides('draft', request.draft)
    self.mesh = Mesh(
        np.array(devices[: request.partitions]).reshape(1, request.partitions), ('data', 'model'))
    self.pair = Pair(
        *(Model(Transformer(config), None) for config in (request.target, request.draft)),
        _AnyVocabulary(min(request.target.vocab_size, request.draft.vocab_size)),
        gamma=request.gamma, sampling=SamplingRule(request.temperature))
    self.params = {
        'target': self._params(self.pair.target.module, RULES),
        'draft': self._params(
            self.pair.draft.module, RULES if request.draft_partitioned else REPLICATED),
        'ngram_table': None,
    }

  def _check_divides(self, name, config):
    """Refuses partitions that leave a part over."""
    for field in ('num_heads', 'mlp_dim', 'vocab_size'):
      size = getattr(config, field)
      if size % self.request.partitions:
        raise UserError(
            f'--partitions: expected a divisor of the {name} {field} {size}, found '
            f'{self.request.partitions}')

  def _params(self, module, rules):
    """Shapes of a network's parameters in its dtype, each with its sharding."""
    tokens = jnp.ones((1, 1), jnp.int32)
    variables = jax.eval_shape(module.init, jax.random.key(0), tokens, tokens)
    axes = flax.core.unfreeze(nn_partitioning.get_axis_names(variables['params_axes']))

    def place(leaf, names):
      spec = nn_partitioning.logical_to_mesh_axes(names, rules)
      return jax.ShapeDtypeStruct(
          leaf.shape, module.config.dtype, sharding=NamedSharding(self.mesh, spec))

    return jax.tree.map(
        place, variables['params'], axes, is_leaf=lambda x: isinstance(x, PartitionSpec))

  def _whole(self, shape, dtype=jnp.int32):
    """An argument that every chip holds."""
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(self.mesh, PartitionSpec()))

  def compile(self, function, *args, params) -> tuple[Program, jax.stages.Compiled]:
    """Compiles `function(params, *args)`, the parameters in the layout that the compiler asks for.

    Args:
      function: pure.
      *args: shapes with shardings.
      params: tree of shapes.

    Returns:
      What it needs, and the program.

    Raises:
      DoesNotFit: the compiler says so.
    """
    formats = jax.tree.map(lambda x: Format(Layout.AUTO, x.sharding), params)
    others = [jax.tree.map(lambda x: x.sharding, arg) for arg in args]
    with self.mesh, nn_partitioning.axis_rules(RULES):
      lowered = jax.jit(function, in_shardings=(formats, *others)).lower(params, *args)
      try:
        compiled = lowered.compile()
      except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
          raise
        sizes = re.findall(r'\(([\d.]+[KMGT])\)', str(error))
        raise DoesNotFit(
            f'{self.request.topology}, {self.request.partitions} partitions, batch '
            f'{args[0].shape[0]}: expected at most {sizes[-1] if sizes else "its memory"} a chip, '
            f'found {sizes[0] if sizes else "more"}') from error
    memory, text = compiled.memory_analysis(), compiled.as_text()
    cost = compiled.cost_analysis() or {}
    traffic, flops = hlo.traffic(text), float(cost.get('flops', 0.0))
    counts: dict[str, int] = {}
    for kinds in hlo.collectives(text).values():
      for kind, count in kinds.items():
        counts[kind] = counts.get(kind, 0) + count
    estimate = float(cost.get('optimal_seconds', 0.0)) if self.chip.has_cost_model else 0.0
    seconds = max(traffic / self.chip.hbm_bytes_a_second, flops / self.chip.flops)
    return Program(
        argument_bytes=memory.argument_size_in_bytes, temporary_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        traffic_bytes=traffic, flops=flops, seconds=max(seconds, estimate), collectives=counts,
    ), compiled

  def decode(self, gamma: int, batch_size: int) -> tuple[Program, jax.stages.Compiled]:
    """The whole decoding; gamma 0 is plain."""
    request = self.request

    def program(params, inputs, key):
      nothing = jnp.zeros((batch_size, request.output_length), jnp.int32)
      result = self.pair.decode_from(
          self.pair.start(params, inputs, request.output_length, gamma), params, nothing,
          gamma=gamma, rule=self.pair.sampling, decode_rng=jax.random.wrap_key_data(key))
      return result.sequences, result.scores

    params = dict(self.params)
    if not gamma:
      params['draft'] = None
    return self.compile(
        program, self._whole((batch_size, request.input_length)),
        self._whole((2,), jnp.uint32), params=params)

  def step(self, name: str, num_tokens: int) -> tuple[Program, jax.stages.Compiled]:
    """One call of a model on `num_tokens` tokens of each row, with its cache updated in place."""
    request = self.request
    module = getattr(self.pair, name).module
    slots = decoding.cache_slots(request.output_length, request.gamma)
    cache = jax.eval_shape(
        lambda params, inputs: module.apply({'params': params}, inputs, slots, method='init_cache'),
        self.params[name], self._whole((request.batch_size, request.input_length)))
    cache = jax.tree.map(lambda x: self._whole(x.shape, x.dtype), cache)
    run = lambda params, tokens, positions, cache: tokens_to_logits(
        module, params, self.pair.vocabulary.size)(tokens, positions, cache)
    return self.compile(
        run, self._whole((request.batch_size, num_tokens)), self._whole((request.batch_size,)),
        cache, params=self.params[name])

  def encoder(self) -> tuple[Program, jax.stages.Compiled]:
    """The target's encoder with the keys and values of its cross-attention."""
    request, module = self.request, self.pair.target.module
    slots = decoding.cache_slots(request.output_length, request.gamma)
    return self.compile(
        lambda params, inputs: module.apply(
            {'params': params}, inputs, slots, method='init_cache'),
        self._whole((request.batch_size, request.input_length)), params=self.params['target'])


def topology_devices(topology: str) -> Sequence[jax.Device]:
  """The chips of a slice that need not exist.

  Raises:
    UserError: there is no TPU compiler here, or it does not know the topology.
  """
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  try:
    import libtpu  # noqa: F401 - JAX's topologies need it, and say so less clearly.
  except ImportError as error:
    raise UserError(
        "libtpu: expected it beside jax (pip install 'speculative_t5x[tpu]'), found none"
    ) from error
  from jax.experimental import topologies

  try:
    return topologies.get_topology_desc(topology, 'tpu').devices
  except Exception as error:
    # The compiler raises what it likes.
    message = ' '.join(str(error).split())[:200]
    raise UserError(f'--topology: expected a TPU slice, found {topology} ({message})') from error


def plan(request: Request) -> Plan:
  """Compiles all programs of a request.

  Args:
    request: what to plan.

  Returns:
    The plan.

  Raises:
    UserError: see `Planner`; `DoesNotFit` where the compiler finds so.
  """
  planner = Planner(request)
  chip = planner.chip
  programs = {}
  for name, (found, _) in {
      'speculative': planner.decode(request.gamma, request.batch_size),
      'plain': planner.decode(0, request.batch_size),
      'target_1': planner.step('target', 1),
      'target_verify': planner.step('target', request.gamma + 1),
      'draft_1': planner.step('draft', 1),
      'encoder': planner.encoder(),
  }.items():
    programs[name] = found
  needed = _needed(programs['speculative'])
  try:
    larger, _ = planner.decode(request.gamma, 2 * request.batch_size)
    a_row = (_needed(larger) - needed) / request.batch_size
    largest = int(request.batch_size + (chip.hbm_bytes - needed) // max(a_row, 1))
  except DoesNotFit:
    largest = request.batch_size
  ratio = lambda name, field: getattr(programs[name], field) / getattr(programs['target_1'], field)
  c, v = ratio('draft_1', 'seconds'), ratio('target_verify', 'seconds')
  traffic_c = ratio('draft_1', 'traffic_bytes')
  traffic_v = ratio('target_verify', 'traffic_bytes')
  factor = lambda c, v: float(analysis.walltime_improvement(request.alpha, request.gamma, c, v))
  return Plan(
      request={
          **{field.name: getattr(request, field.name) for field in dataclasses.fields(request)
             if field.name not in ('target', 'draft')},
          **{name: _sizes(getattr(request, name)) for name in ('target', 'draft')},
      },
      hbm_bytes=chip.hbm_bytes, needed_bytes=needed, fits=needed <= chip.hbm_bytes,
      largest_batch=largest if largest >= 1 else None, programs=programs,
      c=c, v=v, factor=factor(c, v),
      best_gamma=analysis.best_gamma(
          request.alpha, c, lambda gamma: 1 + max(v - 1, 0) * gamma / request.gamma,
          gamma_max=32),
      traffic_c=traffic_c, traffic_v=traffic_v, traffic_factor=factor(traffic_c, traffic_v),
  )


def _needed(program: Program) -> int:
  return program.argument_bytes + program.temporary_bytes + program.output_bytes


def _sizes(config: T5Config) -> dict[str, Any]:
  """A network's sizes, as JSON can hold them."""
  return {
      name: str(value) if name == 'dtype' else value
      for name, value in dataclasses.asdict(config).items()
  }
