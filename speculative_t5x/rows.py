"""Slices of rows that each begin at a place of their own."""

import jax


def read_rows(rows: jax.Array, start: jax.Array, length: int) -> jax.Array:
  """Reads a part of every row.

  Args:
    rows: `[B, T]`.
    start: int32 `[B]`.
    length: of each part.

  Returns:
    `rows[b, start[b] : start[b] + length]`, `[B, length]`.
  """
  return jax.vmap(lambda row, i: jax.lax.dynamic_slice_in_dim(row, i, length))(rows, start)


def write_rows(rows: jax.Array, values: jax.Array, start: jax.Array, axis: int = 0) -> jax.Array:
  """Overwrites a part of every row.

  Args:
    rows: `[B, ...]`.
    values: `[B, ...]`, as `rows` but for its length along `axis`, and no longer than what is left
      of a row, or the write would be shifted.
    start: int32 `[B]`, where `values` go along `axis`.
    axis: of one row.

  Returns:
    The rows.
  """
  return jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))(rows, values, start, axis)
