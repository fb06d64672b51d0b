"""Logical axis rules for two models on one mesh.

The draft is replicated unless it is given rules of its own: it is small, its heads may not divide
by the mesh, and replicating it spares its collectives.
"""

from collections.abc import Sequence
from typing import Any

import jax
from flax.linen import partitioning as flax_partitioning
from t5x import partitioning as t5x_partitioning

LogicalAxisRules = Sequence[tuple[str, str | None]]

# Rows are spread as the target's are; everything else is whole everywhere.
REPLICATED: LogicalAxisRules = (('batch', 'data'),)
DRAFT = 'draft/'


def pair_logical_axis_rules(
    target_rules: LogicalAxisRules | None = None, draft_rules: LogicalAxisRules | None = None
) -> LogicalAxisRules:
  """Rules for the partitioner of a target and a draft.

  Args:
    target_rules: of the target; None is `t5x.partitioning.standard_logical_axis_rules()`.
    draft_rules: of the draft, as `SpeculativeModel.draft_logical_axis_rules`; None replicates it.

  Returns:
    The rules; the draft's parameters have axes named `draft/…`.
  """
  if target_rules is None:
    target_rules = t5x_partitioning.standard_logical_axis_rules()
  if draft_rules is None:
    draft_rules = REPLICATED
  return [*target_rules, *((DRAFT + name, mesh_axis) for name, mesh_axis in draft_rules)]


def draft_axes(params_axes: Any, is_partitioned: bool) -> Any:
  """Logical axes of the draft's parameters, apart from the target's.

  Args:
    params_axes: the draft's `params_axes` collection.
    is_partitioned: whether the partitioner has rules for `draft/…` axes.

  Returns:
    The collection with names `draft/…`, or with none.
  """
  def rename(axes):
    if not isinstance(axes, flax_partitioning.AxisMetadata):
      return axes
    names = tuple(
        None if name is None or not is_partitioned else DRAFT + name for name in axes.names)
    return flax_partitioning.AxisMetadata(names)

  return jax.tree.map(
      rename, params_axes, is_leaf=lambda x: isinstance(x, flax_partitioning.AxisMetadata))
