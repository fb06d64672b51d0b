"""Where a network's parameters lie on a mesh of devices, by the logical names of their axes.

A mesh has the axes `data`, over which the rows of a batch are spread, and `model`, over which a
large network is.
"""

from collections.abc import Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import partitioning as nn_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from speculative_t5x.errors import UserError
from speculative_t5x.network.config import T5Config
from speculative_t5x.network.transformer import Transformer

LogicalAxisRules = Sequence[tuple[str, str | None]]

# Model parallelism by heads, feed-forward units and vocabulary, as T5X's standard rules have it.
RULES: LogicalAxisRules = (
    ('batch', 'data'), ('vocab', 'model'), ('heads', 'model'), ('joined_kv', 'model'),
    ('mlp', 'model'), ('embed', None), ('kv', None), ('length', None), ('relpos_buckets', None),
)
# Rows are spread; parameters are whole everywhere.
REPLICATED: LogicalAxisRules = (('batch', 'data'),)


def mesh_of(devices: Sequence[jax.Device], partitions: int) -> Mesh:
  """A mesh of `devices`, each `partitions` of which share the parameters of a network.

  Args:
    devices: a multiple of `partitions`.
    partitions: size of the axis `model`.

  Returns:
    The mesh `[data, model]`.
  """
  return Mesh(np.array(devices).reshape(-1, partitions), ('data', 'model'))


def check_divides(setting: str, name: str, config: T5Config, partitions: int) -> None:
  """Refuses partitions that leave a part of a network over.

  Args:
    setting: what the user set, for messages.
    name: the network, for messages.
    config: its sizes.
    partitions: that share it under `RULES`.

  Raises:
    UserError: a size that is cut is no multiple of them.
  """
  for field in ('num_heads', 'mlp_dim', 'vocab_size'):
    size = getattr(config, field)
    if size % partitions:
      raise UserError(
          f'{setting}: expected a divisor of the {name} {field} {size}, found {partitions}')


def param_shapes(
    module: Transformer, mesh: Mesh, rules: LogicalAxisRules, dtype: Any = jnp.float32
) -> Any:
  """Shapes of a network's parameters, each with where it lies.

  Args:
    module: the network.
    mesh: the devices.
    rules: axis of the mesh for each logical name.
    dtype: of the parameters.

  Returns:
    A tree of `jax.ShapeDtypeStruct` as the parameters are.
  """
  tokens = jnp.ones((1, 1), jnp.int32)
  variables = jax.eval_shape(module.init, jax.random.key(0), tokens, tokens)
  axes = flax.core.unfreeze(nn_partitioning.get_axis_names(variables['params_axes']))

  def place(leaf, names):
    spec = nn_partitioning.logical_to_mesh_axes(names, rules)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=NamedSharding(mesh, spec))

  return jax.tree.map(
      place, variables['params'], axes, is_leaf=lambda x: isinstance(x, PartitionSpec))
