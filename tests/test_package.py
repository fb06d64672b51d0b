"""The package as it is installed: what importing costs, what is in it, what the README promises."""

import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import itertools
import os
import pathlib
import re
import shlex
import subprocess
import sys

import gin
import pytest

import gin_configs
import speculative_t5x
from speculative_t5x.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]

# Imported only where they are used: slow to import, or not there for everybody.
HEAVY = ('t5x', 'tensorflow', 'seqio', 'orbax', 'tensorstore')

# Files without which a command does not run.
ASSETS = ('demo/data/test_libreoffice.tsv.gz', 'demo/vocabulary/sp4k.model', 'py.typed')
CONFIGS = ('examples/demo.gin',)


# What imports T5X; everything else does without.
EDGE = 'speculative_t5x.t5x_integration'


def modules() -> list[str]:
  """Names of all modules of the package but those of `EDGE`."""
  root = pathlib.Path(speculative_t5x.__file__).parent
  names = {
      '.'.join(path.relative_to(root.parent).with_suffix('').parts).removesuffix('.__init__')
      for path in root.rglob('*.py')
  }
  return sorted(name for name in names if not name.startswith(EDGE))


def run(code: str, cwd: pathlib.Path = ROOT, *arguments: str) -> str:
  """Runs code in an interpreter of its own and returns what it prints."""
  done = subprocess.run(
      [sys.executable, *arguments, '-c', code], cwd=cwd, check=True, capture_output=True, text=True,
      env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )
  return done.stdout


def test_import_is_light():
  code = f'import sys, speculative_t5x; print([x for x in {HEAVY} if x in sys.modules])'
  assert run(code).strip() == '[]'


def test_no_module_needs_t5x_or_tensorflow_to_be_imported():
  code = (
      f'import importlib, sys\nfor name in {modules()}:\n  importlib.import_module(name)\n'
      'print([x for x in ("t5x", "tensorflow", "seqio") if x in sys.modules])'
  )
  assert run(code).strip() == '[]'


@pytest.mark.parametrize('name', modules())
def test_module_imports_and_says_what_it_is_for(name):
  # What was configured before this must not forbid a module to register with gin.
  with gin.unlock_config():
    assert importlib.import_module(name).__doc__


def test_the_edge_says_that_t5x_is_missing():
  if importlib.util.find_spec('t5x') and importlib.util.find_spec('t5x').origin:
    pytest.skip('T5X is installed')
  with pytest.raises(UserError, match=r't5x\.decoding: expected T5X to import.*install'):
    importlib.import_module(EDGE)


def test_version():
  assert re.fullmatch(r'\d+\.\d+\.\d+(\.dev\d+)?', speculative_t5x.__version__)


@pytest.mark.parametrize('path', ASSETS)
def test_asset_is_found(path):
  assert importlib.resources.files('speculative_t5x').joinpath(path).is_file()


@pytest.mark.parametrize('model', ['target', 'draft'])
def test_weights_are_found(model):
  folder = importlib.resources.files('speculative_t5x').joinpath('demo', model)
  (checkpoint,) = folder.iterdir()
  assert checkpoint.name.startswith('checkpoint_')
  assert checkpoint.joinpath('checkpoint').is_file()


@pytest.mark.parametrize('path', CONFIGS)
def test_config_is_found(path):
  assert importlib.resources.files('gin_configs').joinpath(path).is_file()


def test_every_folder_of_configs_is_a_package():
  # T5X's gin loader imports the folder that a config is in.
  folders = {path.parent for path in pathlib.Path(gin_configs.__path__[0]).rglob('*.gin')}
  assert folders
  for folder in folders:
    for parent in (folder, *folder.parents):
      assert (parent / '__init__.py').is_file()
      if parent.name == 'gin_configs':
        break


def test_installed_package_has_every_file(tmp_path):
  # From a folder where the checkout is out of sight (-I: PYTHONPATH too).
  listing = (
      'import importlib.resources as r\n'
      'def walk(x, name):\n'
      '  for y in x.iterdir():\n'
      '    path = name + "/" + y.name\n'
      '    walk(y, path) if y.is_dir() else print(path)\n'
      'for name in ("speculative_t5x", "gin_configs"):\n'
      '  walk(r.files(name), name)\n'
  )
  try:
    found = run(listing, tmp_path, '-I').splitlines()
  except subprocess.CalledProcessError as error:
    if 'No module named' not in error.stderr:
      raise
    pytest.skip('needs the package installed in this environment')
  # Checkpoints have hidden files, which packaging tools drop easily.
  expected = {
      str(path.relative_to(ROOT)) for name in ('speculative_t5x', 'gin_configs')
      for path in (ROOT / name).rglob('*')
      if path.is_file() and '__pycache__' not in path.parts
  }
  assert expected <= set(found)


def test_installed_metadata():
  try:
    distribution = importlib.metadata.distribution('speculative_t5x')
  except importlib.metadata.PackageNotFoundError:
    pytest.skip('needs the package installed in this environment')
  assert distribution.version == speculative_t5x.__version__
  licences = {pathlib.PurePath(x).name for x in distribution.metadata.get_all('License-File')}
  assert licences == {'LICENSE', 'LICENSE.md', 'MPL-2.0.txt'}


def bash_blocks() -> list[str]:
  """The commands that the README prints."""
  return re.findall(r'^```bash\n(.*?)^```$', (ROOT / 'README.md').read_text(), re.M | re.S)


def test_readme_prints_the_commands():
  text = ''.join(bash_blocks())
  for command in ('bash scripts/quickstart.sh', 'bash scripts/test.sh', 'speculative_t5x.infer'):
    assert command in text


@pytest.mark.parametrize('block', bash_blocks())
def test_files_of_a_readme_command_exist(block):
  words = shlex.split(re.sub(r"<<'EOF'\n.*?^EOF$", '', block, flags=re.M | re.S))
  # An ellipsis stands for what is the reader's own.
  files = [word.split('=', 1)[-1] for word in words if '/' in word and '…' not in word]
  files += [
      ROOT / name.replace('.', '/') for word, name in itertools.pairwise(words)
      if word == '-m' and not name.startswith('t5x.')
  ]
  assert files
  for file in files:
    path = ROOT / file
    # A file, a module, a package, or a checkpoint.
    candidates = [path, path.with_suffix('.py'), path / '__main__.py', path / 'checkpoint']
    assert any(candidate.is_file() for candidate in candidates), file


@pytest.mark.parametrize('path', ['scripts/quickstart.sh', 'scripts/test.sh', '.ci/run'])
def test_script_parses_and_can_be_run(path):
  subprocess.run(['bash', '-n', ROOT / path], check=True)
  assert os.access(ROOT / path, os.X_OK)


def test_scripts_refuse_an_unsuitable_python(tmp_path):
  # A fresh machine whose only Python is too old.
  fake = tmp_path / 'python3'
  fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.8.1" && exit 0\nexit 1\n')
  fake.chmod(0o755)
  done = subprocess.run(
      ['bash', ROOT / 'scripts' / 'quickstart.sh'], capture_output=True, text=True, cwd=tmp_path,
      env=os.environ | {'PYTHON': str(fake), 'VENV': str(tmp_path / 'venv')},
  )
  assert done.returncode == 2
  assert 'expected Python 3.11 or 3.12' in done.stderr
  assert 'Python 3.8.1' in done.stderr
