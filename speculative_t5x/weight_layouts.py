"""Weights laid out once, in the layout that the compiled decoding asks for.

A TPU's compiler prefers some matrices transposed. A program that gets them as JAX puts any array
lays them out anew in every call, and holds both copies meanwhile. Programs compiled later take
weights as they lie.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from speculative_t5x.pair import Pair


def lay_out(pair: Pair, batch_size: int, input_length: int, output_length: int) -> Pair:
  """Puts a pair's weights where and how its decoding reads them.

  The program is compiled here once for the layouts alone, and again by the first `predict`.

  Args:
    pair: its weights are given up where their layout changes, so that no more than one array is
      held twice; use what is returned in its place.
    batch_size: of the batches to come.
    input_length: likewise.
    output_length: likewise.

  Returns:
    The pair, whose outputs are the same.
  """
  params = jax.tree.map(jnp.asarray, pair.params)
  params = jax.tree.map(put, params, wanted(pair, params, batch_size, input_length, output_length))
  placed = lambda name: (model := getattr(pair, name)) and dataclasses.replace(
      model, params=params[name])
  return dataclasses.replace(
      pair, target=placed('target'), draft=placed('draft'), ngram_table=params['ngram_table'])


def wanted(
    pair: Pair, params: Any, batch_size: int, input_length: int, output_length: int
) -> Any:
  """The format of every array of `params` in the pair's own decoding, as its compiler wants it."""
  tokens = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
  formats = jax.tree.map(lambda x: Format(Layout.AUTO, x.sharding), params)
  # What the compiler does not read keeps its place among the arguments.
  program = jax.jit(
      pair.program(pair.gamma, pair.sampling), in_shardings=(formats, *[None] * 5),
      keep_unused=True)
  compiled = program.lower(
      shapes, tokens(batch_size, input_length), tokens(batch_size, output_length),
      tokens(batch_size), jax.eval_shape(jax.random.key, 0), None).compile()
  return compiled.input_formats[0][0]


def put(array: jax.Array, wanted: Format) -> jax.Array:
  """`array` in the format `wanted`; itself where it lies so, otherwise it is given up."""
  if array.format == wanted and array.committed:
    return array
  return jax.device_put(array, wanted, donate=array.format != wanted)
