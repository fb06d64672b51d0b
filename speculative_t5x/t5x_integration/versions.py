"""Whether the T5X and the libraries that are installed are ones this package can work with."""

import importlib
import importlib.metadata
import re

from speculative_t5x.errors import UserError

# The commit that the tests are run with. T5X has no releases.
T5X_COMMIT = 'cc342d419ec3e3e9c4bf1df33c82330cafdc1e16'
HOW_TO_GET = (
    'T5X, AirIO and jestimator are source checkouts on PYTHONPATH: see scripts/tpu_vm/install.sh '
    f'(T5X at {T5X_COMMIT[:7]})'
)
LOWER_BOUNDS = {'jax': (0, 7), 'flax': (0, 11)}
# What is used of T5X that earlier versions do not have.
NEEDED = {
    't5x.decoding': ('temperature_sample', 'SamplingLoopState'),
    't5x.models': ('DecoderOnlyModel', 'DecoderParams', 'EncoderDecoderModel', 'remove_prefix'),
    't5x.partitioning': ('PjitPartitioner', 'standard_logical_axis_rules'),
    't5x.train_state': ('InferenceState',),
    't5x.utils': (
        'LegacyCheckpointManager', 'RestoreCheckpointConfig', 'TrainStateInitializer',
        'create_checkpoint_manager_and_restore', 'create_orbax_checkpoint_manager', 'get_infer_fn',
    ),
}


def check_versions() -> None:
  """Refuses libraries that are too old, and a T5X that is missing or another one.

  Raises:
    UserError: in one line, with what was expected and found.
  """
  for library, least in LOWER_BOUNDS.items():
    found = importlib.metadata.version(library)
    if tuple(int(part) for part in re.findall(r'\d+', found)[:2]) < least:
      raise UserError(
          f'{library}: expected at least version {".".join(map(str, least))}, found {found}')
  for module, names in NEEDED.items():
    try:
      imported = importlib.import_module(module)
    except Exception as error:
      # T5X breaks in many ways when a library of another time is beside it.
      cause = ' '.join(str(error).split())[:200]
      raise UserError(
          f'{module}: expected T5X to import, found {type(error).__name__}: {cause}; {HOW_TO_GET}'
      ) from error
    missing = [name for name in names if not hasattr(imported, name)]
    if missing:
      raise UserError(f'{module}: expected {missing[0]}, found a T5X without it; {HOW_TO_GET}')
