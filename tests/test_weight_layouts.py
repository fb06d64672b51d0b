"""Weights laid out for a compiled program: nothing else about a pair changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from speculative_t5x import infer, weight_layouts
from speculative_t5x.demo.__main__ import load_demo_pair
from speculative_t5x.sampling import SamplingRule

INPUTS = np.array([[5, 9, 30, 1, 0, 0], [7, 1, 0, 0, 0, 0]], np.int32)


def transposed(array):
  """The array's numbers as they are, its matrix stored column by column."""
  order = tuple(reversed(range(array.ndim)))
  return jax.device_put(array, Format(Layout(order), array.sharding))


def test_outputs_are_the_same_and_weights_lie_as_the_program_reads_them():
  """Also from a layout that no program asks for, with arrays that are given up."""
  plain = load_demo_pair()
  expected = plain.predict(INPUTS, max_length=12, gamma=3)
  params = jax.tree.map(lambda x: transposed(jnp.asarray(x)), plain.params)
  kernel = params['target']['encoder']['layers_0']['mlp']['wo']['kernel']
  assert kernel.format.layout.major_to_minor == (1, 0)
  formats = weight_layouts.wanted(plain, plain.params, *INPUTS.shape, 12)
  laid_out = jax.tree.map(weight_layouts.put, params, formats)
  assert jax.tree.leaves(jax.tree.map(lambda x: x.format, laid_out)) == jax.tree.leaves(formats)
  assert kernel.is_deleted()
  pair = weight_layouts.lay_out(plain, *INPUTS.shape, 12)
  assert all(x.committed for x in jax.tree.leaves(pair.params))
  for params in (laid_out, pair.params):
    program = plain.program(3, plain.sampling)
    found = program(
        params, jnp.asarray(INPUTS), np.zeros((2, 12), np.int32), jnp.arange(2),
        jax.random.key(0), None)
    np.testing.assert_array_equal(found.sequences, expected.sequences)
  np.testing.assert_array_equal(
      pair.predict(INPUTS, max_length=12, gamma=3).sequences, expected.sequences)
  assert pair.num_decodes == plain.num_decodes and pair.sampling == SamplingRule()


@pytest.mark.parametrize('backend, calls', [('cpu', 0), ('tpu', 1)])
def test_inference_lays_weights_out_on_a_tpu_alone(backend, calls, monkeypatch, tmp_path):
  found = []
  monkeypatch.setattr(infer.jax, 'default_backend', lambda: backend)
  monkeypatch.setattr(infer, 'load_pair', load_demo_pair)
  monkeypatch.setattr(
      weight_layouts, 'lay_out', lambda pair, *sizes: found.append(sizes) or pair)
  (tmp_path / 'in.txt').write_text('Save the file.\n', encoding='utf-8')
  code = infer.infer(
      str(tmp_path / 'in.txt'), str(tmp_path / 'out'), batch_size=1,
      task_feature_lengths={'inputs': 16, 'targets': 8})
  assert code == 0 and found == [(1, 16, 8)] * calls
