"""The notebook: as it is committed, and run from top to bottom in a kernel of its own."""

import ast
import base64
import html
import importlib.util
import json
import os
import pathlib
import struct
import sys
import types

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

from speculative_t5x.demo.results import Kind

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOK = ROOT / 'scripts' / 'notebooks' / 'speculative_t5x.ipynb'

# The least that leaves every cell something to do. Gamma 7 is compiled before section 5.
PARAMETERS = 'NUM_SENTENCES = 2\nREPEATS = 1\nGAMMAS = (1, 7)'

# Prints what the notebook's variables hold behind the last cell.
PROBE = """
import json
print(json.dumps({
    'identical': {k: np.array_equal(x.sequences, y.sequences) for k, (x, y) in decoded.items()},
    'texts': {k: pair.vocabulary.decode(x.sequences[0, 0]) for k, (x, _) in decoded.items()},
    'runs': {k: [int(z.statistics.rounds[0, 0]) for z in way] for k, way in decoded.items()},
    'kinds': [
        token.kind for x in results for shown in x.sentences for line in shown.rounds
        for token in line.tokens
    ],
    'points': {
        task: [[x.gamma, x.num_measured, x.identical, x.tokens_per_round] for x in points]
        for task, points in measured.items()
    },
}))
"""


def read():
  return nbformat.read(NOTEBOOK, as_version=nbformat.NO_CONVERT)


def code_cells(notebook):
  """Code cells by id."""
  return {cell.id: cell for cell in notebook.cells if cell.cell_type == 'code'}


def names(code):
  """Names that a cell of assignments sets."""
  return {statement.targets[0].id for statement in ast.parse(code).body}


@pytest.fixture(scope='module')
def executed(tmp_path_factory):
  """Code cells with their outputs; the last one, 'probe', prints what the tests ask for."""
  notebook = read()
  (parameters,) = [x for x in notebook.cells if 'parameters' in x.metadata.get('tags', ())]
  assert names(parameters.source) == names(PARAMETERS)
  parameters.source = PARAMETERS
  notebook.cells.append(nbformat.v4.new_code_cell(PROBE, id='probe'))
  folder = str(tmp_path_factory.mktemp('notebook'))
  client = NotebookClient(
      notebook, timeout=600, kernel_name='python3', resources={'metadata': {'path': folder}}
  )
  client.execute(env=os.environ | {
      'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu', 'IPYTHONDIR': folder,
      # The last section compiles what the first ones did.
      'JAX_COMPILATION_CACHE_DIR': folder, 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  })
  return code_cells(notebook)


@pytest.fixture(scope='module')
def found(executed):
  """What `PROBE` printed."""
  return json.loads(executed['probe'].outputs[0].text)


def test_committed_notebook_is_clean():
  notebook = read()
  nbformat.validate(notebook)
  assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
  assert notebook.metadata.kernelspec.name == 'python3'
  cells = code_cells(notebook).values()
  assert len(cells) > 5
  assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)


@pytest.mark.parametrize('id_', code_cells(read()))
def test_code_has_no_syntax_error(id_):
  ast.parse(TransformerManager().transform_cell(code_cells(read())[id_].source))


@pytest.mark.parametrize('where', ['checkout', 'installed', 'elsewhere'])
def test_pip_is_asked_only_where_the_package_is_missing(where, tmp_path, monkeypatch):
  monkeypatch.chdir(NOTEBOOK.parent if where == 'checkout' else tmp_path)
  monkeypatch.setattr(sys, 'path', ['first'])
  spec = object() if where == 'installed' else None
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: spec)
  calls = []
  shell = types.SimpleNamespace(run_line_magic=lambda *call: calls.append(call))
  code = TransformerManager().transform_cell(code_cells(read())['install'].source)
  exec(code, {'get_ipython': lambda: shell})
  asked = [('pip', 'install --quiet "{SOURCE}" matplotlib')]
  assert calls == (asked if where == 'elsewhere' else [])
  assert sys.path == ([str(ROOT), 'first'] if where == 'checkout' else ['first'])


def test_every_cell_runs(executed):
  assert all(cell.execution_count for cell in executed.values())
  assert [x for cell in executed.values() for x in cell.outputs if x.output_type == 'error'] == []
  assert executed['install'].outputs == []


def test_outputs_are_those_of_plain_decoding(executed, found):
  assert found['identical'] == {'restoration': True, 'translation': True, 'own': True}
  outputs = executed['decode'].outputs + executed['swap'].outputs
  printed = ''.join(x.text for x in outputs if x.get('name') == 'stdout')
  for task, text in found['texts'].items():
    speculative, plain = found['runs'][task]
    assert text
    assert f'speculative  {text}\nplain        {text}\nidentical    yes\n' in printed
    assert f'target runs  {speculative} for {plain} tokens' in printed
    assert speculative < plain


def test_page_shows_every_token_of_every_round(executed, found):
  page = html.unescape(executed['rounds'].outputs[-1].data['text/html'])
  assert {Kind.ACCEPTED, Kind.TARGET} <= set(found['kinds'])
  for kind in Kind:
    assert page.count(f' title="{kind}"') == found['kinds'].count(kind)


def test_every_gamma_is_measured(found):
  assert set(found['points']) == {'restoration', 'translation'}
  for points in found['points'].values():
    assert [gamma for gamma, *_ in points] == [1, 7]
    for gamma, num_measured, identical, tokens_per_round in points:
      assert num_measured == identical == 2
      assert 1 <= tokens_per_round <= gamma + 1


def test_figure_is_drawn(executed):
  (image,) = [
      x.data['image/png'] for x in executed['gamma'].outputs if 'image/png' in x.get('data', {})
  ]
  content = base64.b64decode(image)
  assert content.startswith(b'\x89PNG\r\n\x1a\n')
  width, height = struct.unpack('>II', content[16:24])
  assert width > 2 * height
