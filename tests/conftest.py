"""Fixtures of the whole suite."""

import pathlib

import pytest


@pytest.fixture(scope='session')
def shared_data() -> pathlib.Path:
  """The folder of data that is shared with, but not part of, the repository."""
  folder = pathlib.Path(__file__).parents[1].parent / 'shared' / 'data'
  if not folder.is_dir():
    pytest.skip(f'needs the shared data, which are not at {folder}')
  return folder
