"""Compiles a pair's programs for a TPU slice from shapes alone, and counts what each needs.

`B` is the batch, `S` the input length, `L` the output length. Every figure is of one chip.
"""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import gin
import jax
import jax.numpy as jnp
from flax.linen import partitioning as nn_partitioning
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from speculative_t5x import decoding
from speculative_t5x.errors import UserError
from speculative_t5x.network import DecoderCache, T5Config, Transformer, tokens_to_logits
from speculative_t5x.network.partitioning import (
    REPLICATED,
    RULES,
    check_divides,
    mesh_of,
    param_shapes,
)
from speculative_t5x.pair import Model, Pair
from speculative_t5x.sampling import SamplingRule
from speculative_t5x.tpu import hlo
from speculative_t5x.tpu.chips import chip_of


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
    verify_largest_batch: whether to look for the largest batch with the compiler, some minutes a
      try, or to extrapolate.
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
  verify_largest_batch: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
  """One compiled program.

  Attributes:
    argument_bytes: parameters and other inputs.
    temporary_bytes: caches and intermediate values.
    output_bytes: results that are no inputs.
    traffic_bytes: moved to and from memory in one run, loops counted once.
    flops: operations in one run, loops counted once.
    seconds: that traffic or operations take at the chip's best, whichever takes longer.
    collectives: by kind.
    cycles: the compiler's estimates of its scheduled instructions, loops counted once; a prefetch
      that runs beside other work counts nothing.
    loop_traffic_bytes: of one turn of the loop that moves most, loops inside it left out; 0 without
      a loop.
    loop_copies: bytes that one turn of every loop copies or lays out anew within memory, of arrays
      at least as large as the smallest cache's, by 'caches', 'weights' and 'others'.
    sorts: over the whole vocabulary.
  """

  argument_bytes: int
  temporary_bytes: int
  output_bytes: int
  traffic_bytes: int
  flops: float
  seconds: float
  collectives: dict[str, int]
  cycles: int
  loop_traffic_bytes: int
  loop_copies: dict[str, int]
  sorts: int


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
      UserError: the topology is unknown, there is no TPU compiler, the partitions do not divide, or
        the weights do not fit.
    """
    self.request = request
    self.chip = chip_of(request.topology)
    devices = topology_devices(request.topology)
    if request.partitions < 1 or len(devices) % request.partitions:
      raise UserError(
          f'--partitions: expected a divisor of the {len(devices)} chips of {request.topology}, '
          f'found {request.partitions}')
    check_divides('--partitions', 'target', request.target, request.partitions)
    if request.draft_partitioned:
      check_divides('--partitions', 'draft', request.draft, request.partitions)
    self.mesh = mesh_of(devices[: request.partitions], request.partitions)
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
    self._check_weights()

  def _params(self, module, rules):
    """Shapes of a network's parameters in its dtype, each with its sharding."""
    return param_shapes(module, self.mesh, rules, module.config.dtype)

  def _check_weights(self):
    """Refuses weights that alone are too large, before anything is compiled."""
    a_chip = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(self.params))
    if a_chip > self.chip.hbm_bytes:
      raise DoesNotFit(
          f'{self.request.topology}, {self.request.partitions} partitions: expected weights of at '
          f'most {self.chip.hbm_bytes / 2**20:.0f} MiB a chip, found {a_chip / 2**20:.0f}')

  def _whole(self, shape, dtype=jnp.int32):
    """An argument that every chip holds."""
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(self.mesh, PartitionSpec()))

  def compile(
      self, function, *args, params, laid_out: bool = True, donated: Sequence[int] = (),
      out_shardings: Any = None,
  ) -> tuple[Program, jax.stages.Compiled]:
    """Compiles `function(params, *args)`.

    Args:
      function: pure.
      *args: shapes with shardings.
      params: tree of shapes.
      laid_out: whether the parameters lie as the compiler asks for, see `weight_layouts`,
        or as JAX puts any array.
      donated: positions in `args` of those that results may be written over.
      out_shardings: of the results; None leaves them to the compiler.

    Returns:
      What it needs, and the program.

    Raises:
      DoesNotFit: the compiler says so.
    """
    formats = jax.tree.map(
        lambda x: Format(Layout.AUTO, x.sharding) if laid_out else x.sharding, params)
    others = [jax.tree.map(lambda x: x.sharding, arg) for arg in args]
    with self.mesh, nn_partitioning.axis_rules(RULES):
      lowered = jax.jit(
          function, in_shardings=(formats, *others), out_shardings=out_shardings,
          donate_argnums=tuple(index + 1 for index in donated)).lower(params, *args)
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
    bodies, copied = hlo.loop_bodies(text), dict.fromkeys(('caches', 'weights', 'others'), 0)
    for body in bodies:
      for _, size in hlo.copies(text, min(self.array_bytes['caches']), body):
        kind = next((kind for kind, sizes in self.array_bytes.items() if size in sizes), 'others')
        copied[kind] += size
    counts: dict[str, int] = {}
    for kinds in hlo.collectives(text).values():
      for kind, count in kinds.items():
        counts[kind] = counts.get(kind, 0) + count
    # Not XLA's `optimal_seconds`: it has what is prefetched into the chip two or three times, and
    # changes by a quarter with how much is.
    seconds = max(traffic / self.chip.hbm_bytes_a_second, flops / self.chip.flops)
    return Program(
        argument_bytes=memory.argument_size_in_bytes, temporary_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        traffic_bytes=traffic, flops=flops, seconds=seconds, collectives=counts,
        cycles=hlo.cycles(text),
        loop_traffic_bytes=max((hlo.traffic(text, body) for body in bodies), default=0),
        loop_copies=copied, sorts=hlo.sorts(text, self.pair.vocabulary.size),
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

  def t5x_decode(self) -> tuple[Program, jax.stages.Compiled]:
    """T5X's own decoding of the target, its parameters as T5X puts them.

    Raises:
      ImportError: T5X is not importable.
      UserError: it is, with versions that do not go with it.
    """
    # T5X registers what it offers with gin, whose settings are read already.
    with gin.unlock_config():
      from speculative_t5x.t5x_integration import plan as t5x_plan

    request = self.request
    decode = t5x_plan.target_alone(request.target, self.pair.sampling, request.output_length)
    return self.compile(
        decode, self._whole((request.batch_size, request.input_length)),
        self._whole((2,), jnp.uint32), params=self.params['target'], laid_out=False)

  def cache(self, name: str) -> DecoderCache:
    """Shapes of a model's cache."""
    request, module = self.request, getattr(self.pair, name).module
    slots = decoding.cache_slots(request.output_length, request.gamma)
    return jax.eval_shape(
        lambda params, inputs: module.apply({'params': params}, inputs, slots, method='init_cache'),
        self.params[name], self._whole((request.batch_size, request.input_length)))

  @functools.cached_property
  def array_bytes(self) -> dict[str, set[int]]:
    """Sizes that a chip's parts of both models' caches and weights have.

    Only those of weights that are matrices, for their vectors are as small as any other array.
    """
    sizes = {'caches': set(), 'weights': set()}
    for name in ('target', 'draft'):
      chips = self.request.partitions if self._is_spread(name) else 1
      for x in jax.tree.leaves(self.cache(name).replace(cross_bias=None)):
        sizes['caches'].add(x.size * x.dtype.itemsize // chips)
      for x in jax.tree.leaves(self.params[name]):
        if x.ndim == 2:
          sizes['weights'] |= {x.size * x.dtype.itemsize, x.size * x.dtype.itemsize // chips}
    return sizes

  def _is_spread(self, name):
    return name == 'target' or self.request.draft_partitioned

  def _placed_cache(self, name):
    """The cache, each shape with its sharding: heads are spread as the parameters are."""
    config = getattr(self.pair, name).module.config
    heads = PartitionSpec(None, 'model') if self._is_spread(name) else PartitionSpec()

    def place(x):
      # Of what is kept, the mask alone has no heads.
      spec = heads if x.shape[1] == config.num_heads else PartitionSpec()
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec))

    return jax.tree.map(place, self.cache(name))

  def step(self, name: str, num_tokens: int) -> tuple[Program, jax.stages.Compiled]:
    """One call of a model on `num_tokens` tokens of each row, with its cache updated in place."""
    request = self.request
    module = getattr(self.pair, name).module
    cache = self._placed_cache(name)
    run = lambda params, tokens, positions, cache: tokens_to_logits(
        module, params, self.pair.vocabulary.size)(tokens, positions, cache)
    return self.compile(
        run, self._whole((request.batch_size, num_tokens)), self._whole((request.batch_size,)),
        cache, params=self.params[name], donated=(2,),
        out_shardings=(None, jax.tree.map(lambda x: x.sharding, cache)))

  def encoder(self) -> tuple[Program, jax.stages.Compiled]:
    """The target's encoder with the keys and values of its cross-attention."""
    request, module = self.request, self.pair.target.module
    slots = decoding.cache_slots(request.output_length, request.gamma)
    # Left to the compiler, every chip would get the whole cache.
    return self.compile(
        lambda params, inputs: module.apply(
            {'params': params}, inputs, slots, method='init_cache'),
        self._whole((request.batch_size, request.input_length)), params=self.params['target'],
        out_shardings=jax.tree.map(lambda x: x.sharding, self._placed_cache('target')))


def topology_devices(topology: str) -> Sequence[jax.Device]:
  """The chips of a slice that need not exist.

  Raises:
    UserError: there is no TPU compiler here, another process has it, or it does not know the
      topology.
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
    if 'lockfile' in message:
      raise UserError(f'libtpu: expected it to be free, found another process with it ({message})'
                      ) from error
    raise UserError(f'--topology: expected a TPU slice, found {topology} ({message})') from error
