"""The README's figures are those of the committed results."""

import importlib.util
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]


def load_script():
  spec = importlib.util.spec_from_file_location('readme', ROOT / 'scripts/readme/readme.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_readme_is_what_its_script_gives():
  assert load_script().render() == (ROOT / 'README.md').read_text(), (
      'run python scripts/readme/readme.py')


def test_no_speed_is_written_by_hand():
  """A factor or rate belongs into a result file; the paper's are quoted as the paper's."""
  text = (ROOT / 'scripts/readme/README.template.md').read_text()
  assert re.findall(r'\d+\.\d+ ?x\b|\d+ tokens/s', text) == []


def test_linked_files_exist():
  links = re.findall(r'\]\((?!https?:)([^)#]+)\)', (ROOT / 'README.md').read_text())
  assert len(links) > 10
  assert [link for link in links if not (ROOT / link).exists()] == []


def test_a_changed_result_changes_the_readme(monkeypatch):
  script = load_script()
  before, read = script.render(), script.read

  def doubled(path):
    found = read(path)
    for record in found.get('gammas', ()) if isinstance(found, dict) else ():
      record['factor'] *= 2
    return found

  monkeypatch.setattr(script, 'read', doubled)
  assert script.render() != before
