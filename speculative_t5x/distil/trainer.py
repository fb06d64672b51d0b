"""The loop of a distillation: steps, the log, what is saved, and going on from it.

A folder holds `state.msgpack` (all that a run needs to go on), `checkpoint_N` (the draft in T5X's
format, at every save) and `log.jsonl`. A run that goes on does what an uninterrupted one would have
done from there.
"""

import collections
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from speculative_t5x import checkpoints, training
from speculative_t5x.distil.examples import counted
from speculative_t5x.distil.recipe import DRAFT, Recipe
from speculative_t5x.training import Batch, TrainState


class Folder:
  """Where a run keeps what it has reached."""

  def __init__(self, path: str | os.PathLike):
    """Makes the folder if need be, and removes what an interruption left half written."""
    self.path = pathlib.Path(path)
    self.path.mkdir(parents=True, exist_ok=True)
    for partial in self.path.glob('checkpoint_*.tmp-*'):
      shutil.rmtree(partial)

  def checkpoint(self, step: int) -> pathlib.Path:
    """The draft's checkpoint of a step."""
    return self.path / f'checkpoint_{step}'

  def load(self, like: TrainState) -> TrainState | None:
    """The state that was saved last, in the structure of `like`; None when there is none."""
    if not (self.path / training.STATE).exists():
      return None
    state = training.load_state(self.path / training.STATE, like)
    # The state is written first: an interruption may have come between the two.
    self._write_checkpoint(state)
    return state

  def save(self, state: TrainState) -> None:
    """Writes the state, then the checkpoint."""
    state = jax.device_get(state)
    training.save_state(self.path / training.STATE, state)
    self._write_checkpoint(state)

  def _write_checkpoint(self, state):
    path = self.checkpoint(int(state.step))
    if not path.exists():
      checkpoints.save_params(path, state.params, step=int(state.step))

  def log(self, record: dict[str, Any]) -> None:
    """Appends a record to the log."""
    with (self.path / training.LOG).open('a', encoding='utf-8') as file:
      file.write(json.dumps(record) + '\n')

  def read_log(self, last_step: int) -> list[dict[str, Any]]:
    """Records up to a step; later ones, which will be made again, are removed from the file."""
    path = self.path / training.LOG
    if not path.exists():
      return []
    # A last line may be cut.
    whole = path.read_text(encoding='utf-8').rpartition('\n')[0].splitlines()
    records = [json.loads(line) for line in whole]
    kept = [record for record in records if record['step'] <= last_step]
    partial = path.with_suffix('.partial')
    partial.write_text(''.join(json.dumps(record) + '\n' for record in kept), encoding='utf-8')
    os.replace(partial, path)
    return kept


def draft_writes(recipe: Recipe, step: int) -> bool:
  """Whether the texts of the batch at `step` are the draft's own: one draw a sample period."""
  if recipe.examples == DRAFT:
    return True
  period = step // recipe.sample_period
  return np.random.default_rng((recipe.seed, 1, period)).random() < recipe.draft_fraction


def train(
    state: TrainState, folder: Folder, recipe: Recipe, *,
    train_step: Callable[..., tuple[TrainState, jax.Array]], target_params: Any,
    stream: Callable[[int], Iterator[Batch]],
    write_texts: Callable[[Any, list[Batch], int], list[Batch]],
    alpha: Callable[[Any], float], place: Callable[[np.ndarray], jax.Array],
    eos_id: int, save_period: int, eval_period: int, log_period: int, tell: Callable[[str], None],
) -> TrainState:
  """Trains from `state` to the recipe's last step.

  Args:
    state: where to begin; used up. Its step is a multiple of the recipe's `sample_period`.
    folder: gets what is reached.
    recipe: how to train.
    train_step: `(state, batch, target_params, reference_weight) → (state, loss)`.
    target_params: of the target; None where the loss asks none.
    stream: batches of the examples from a step on.
    write_texts: `(params, batches, step) → batches` with texts of the draft in place.
    alpha: the acceptance rate of the draft's parameters on held-out inputs.
    place: puts rows `[B, ...]` where a step expects them.
    eos_id: the id that ends a text.
    save_period: steps between saves; a multiple of the recipe's `sample_period`.
    eval_period: steps between evaluations.
    log_period: steps between records of the loss.
    tell: takes a line of progress.

  Returns:
    The last state.
  """
  first = int(state.step)
  earlier = folder.read_log(first)
  seconds = earlier[-1]['seconds'] if earlier else 0.0
  if not earlier:
    record = {'step': first, 'seconds': seconds, 'alpha': round(alpha(state.params), 6)}
    folder.log(record)
    tell(_line(record, recipe.train_steps))
  batches = stream(first)
  queue: collections.deque[tuple[Batch, float]] = collections.deque()
  losses, tokens, started = [], 0, time.monotonic()
  for step in range(first, recipe.train_steps):
    if not queue:
      found = [next(batches) for _ in range(recipe.sample_period)]
      weight = recipe.reference_weight
      if draft_writes(recipe, step):
        found, weight = write_texts(state.params, found, step), 0.0
      queue.extend((batch, weight) for batch in found)
    batch, weight = queue.popleft()
    tokens += int(np.sum(counted(batch.targets, eos_id)))
    state, loss = train_step(
        state, jax.tree.map(place, batch), target_params, np.float32(weight))
    losses.append(loss)
    done = step + 1
    is_last = done == recipe.train_steps
    saves, evaluates = (is_last or done % period == 0 for period in (save_period, eval_period))
    # A record ends where a save does, so that a run that goes on has the same ones.
    if saves or evaluates or done % log_period == 0:
      mean_loss = float(np.mean([float(x) for x in losses]))
      passed = time.monotonic() - started
      seconds += passed
      record = {'step': done, 'seconds': round(seconds, 2), 'loss': round(mean_loss, 6),
                'tokens_a_second': round(tokens / passed, 1)}
      if evaluates:
        record['alpha'] = round(alpha(state.params), 6)
      folder.log(record)
      tell(_line(record, recipe.train_steps))
      if saves:
        folder.save(state)
      # Evaluating and saving are no training.
      losses, tokens, started = [], 0, time.monotonic()
  return state


def _line(record: dict[str, Any], last: int) -> str:
  """A record as a line for the console."""
  parts = [f'step {record["step"]} of {last}']
  if 'loss' in record:
    parts.append(f'loss {record["loss"]:.4f}')
  if 'alpha' in record:
    parts.append(f'alpha {record["alpha"]:.4f}')
  if 'tokens_a_second' in record:
    parts.append(f'{record["tokens_a_second"]:.0f} tokens a second')
  return ', '.join(parts)
