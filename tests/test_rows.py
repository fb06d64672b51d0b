"""Rows that are read and written at places of their own."""

import jax.numpy as jnp
import numpy as np
import pytest

from speculative_t5x import rows

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize('shape, axis, length', [
    ((3, 9), 0, 4), ((3, 2, 9, 5), 1, 4), ((3, 2, 5, 9), -1, 1), ((1, 9, 2), 0, 2),
])
def test_each_row_is_written_at_its_own_place(shape, axis, length):
  at = 1 + axis % (len(shape) - 1)
  old = RANDOM.normal(size=shape).astype(np.float32)
  values = RANDOM.normal(size=(*shape[:at], length, *shape[at + 1 :])).astype(np.float32)
  start = np.array([5, 0, 3], np.int32)[: shape[0]]
  expected = old.copy()
  for row, place in enumerate(start):
    np.moveaxis(expected[row], at - 1, 0)[place : place + length] = np.moveaxis(
        values[row], at - 1, 0)
  found = rows.write_rows(jnp.asarray(old), jnp.asarray(values), jnp.asarray(start), axis=axis)
  np.testing.assert_array_equal(found, expected)


def test_each_row_is_read_at_its_own_place():
  found = rows.read_rows(jnp.arange(20).reshape(2, 10), jnp.array([3, 0]), 2)
  np.testing.assert_array_equal(found, [[3, 4], [10, 11]])
