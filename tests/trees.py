"""Parameter trees for tests."""

import flax
import jax
import numpy as np


def flatten(tree):
  """Leaves by their path, as 'decoder/layers_0/…'."""
  return flax.traverse_util.flatten_dict(flax.core.unfreeze(tree), sep='/')


def random_params(shapes, head_dim):
  """Parameters of `shapes`, none at its initial value: ones would hide a scale left out."""
  random = np.random.default_rng(0)

  def draw(path, leaf):
    match path[-1].key:
      case 'scale':
        value = random.uniform(0.5, 1.5, leaf.shape)
      case 'kernel':
        value = random.normal(size=leaf.shape) * leaf.shape[0] ** -0.5
        # Attention that is nearly one-hot would hide wrong biases and magnify rounding.
        value *= head_dim ** -0.5 if path[-2].key == 'query' else 1.0
      case _:
        value = random.normal(size=leaf.shape)
    return value.astype(np.float32)

  return jax.tree_util.tree_map_with_path(draw, flax.core.unfreeze(shapes))


def assert_same(found, expected, dtype=np.float32):
  """That both hold the same values under the same names, `found` in `dtype`."""
  found, expected = flatten(found), flatten(expected)
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    assert found[name].dtype == dtype, name
    np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(value).astype(dtype), name)
