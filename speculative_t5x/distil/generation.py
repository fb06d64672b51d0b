"""Texts that the models write: the target's, kept in a folder, and the draft's, made afresh.

`B` is the batch, `S` the input length, `L` the output length.
"""

import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speculative_t5x import training
from speculative_t5x.distil.examples import counted
from speculative_t5x.network import Transformer
from speculative_t5x.pair import Model, Pair
from speculative_t5x.run_output import RECORDS, RunOutput
from speculative_t5x.sampling import SamplingRule
from speculative_t5x.vocabularies import Vocabulary

# Folded into the seed, so that what the draft draws has nothing to do with its dropout.
SAMPLING_STREAM = 0x5A4D504C


def target_texts(
    pair: Pair, inputs: Sequence[Sequence[int]], folder: str | os.PathLike,
    settings: dict[str, Any], *, batch_size: int, buckets: Sequence[tuple[int, int]], seed: int,
    place: Callable[[np.ndarray], jax.Array], tell: Callable[[int, int], None],
) -> list[list[int]]:
  """What the target decodes for each input, once: `folder` keeps it, and goes on where it stopped.

  Records of `inferences.jsonl` are `{"number", "inputs", "targets", "ids"}`, short inputs first;
  the texts are for the reader, the ids are what the target wrote, which its text may not give back.

  Args:
    pair: decodes at its own rule; with a draft it does so faster, and no less exactly.
    inputs: token ids, EOS included.
    folder: of the records.
    settings: what the outputs depend on; a folder of others is refused.
    batch_size: inputs at once.
    buckets: `(S, L)`; the last has the longest of each.
    seed: of the sampling; an output does not depend on the batch.
    place: puts rows `[B, ...]` where the parameters expect them.
    tell: called with the number of texts done and in all, after each batch.

  Returns:
    Token ids of each text, EOS included unless it was cut at `L`.

  Raises:
    UserError: the folder holds something else.
  """
  max_length = buckets[-1][1]
  output = RunOutput(folder, settings)
  try:
    # A batch ends with its longest text, so alike go together.
    order = sorted(range(len(inputs)), key=lambda i: (len(inputs[i]), i))
    for start in range(output.done, len(order), batch_size):
      chosen = order[start : start + batch_size]
      longest = max(len(inputs[i]) for i in chosen)
      size = next(size for size, _ in buckets if size >= longest)
      # Rows that only fill the batch are a lone EOS.
      rows = [inputs[i] for i in chosen]
      rows += [[pair.vocabulary.eos_id]] * (batch_size - len(chosen))
      result = pair.predict(
          place(training.pad(rows, size)), max_length=max_length, seed=seed,
          example_index=place(np.array(chosen + [0] * (batch_size - len(chosen)), np.int32)))
      records = []
      for i, sequence in zip(chosen, np.asarray(result.sequences[:, 0]), strict=False):
        ids = sequence[counted(sequence, pair.vocabulary.eos_id)].tolist()
        records.append({
            'number': i, 'inputs': pair.vocabulary.decode(inputs[i]),
            'targets': pair.vocabulary.decode(ids), 'ids': ids})
      output.write(records)
      tell(start + len(chosen), len(order))
  finally:
    output.close()
  found = {}
  for line in (pathlib.Path(folder) / RECORDS).read_text(encoding='utf-8').splitlines():
    record = json.loads(line)
    found[record['number']] = record['ids']
  return [found[i] for i in range(len(inputs))]


def make_sampler(
    module: Transformer, vocabulary: Vocabulary, rule: SamplingRule, max_length: int
) -> Callable[[Any, jax.Array, jax.Array], jax.Array]:
  """Compiles plain decoding of a model whose parameters change.

  Args:
    module: the network.
    vocabulary: its vocabulary.
    rule: what its tokens are drawn with.
    max_length: `L`.

  Returns:
    `(params, inputs [B, S] int32, key) → tokens [B, L] int32`, 0 behind EOS.
  """
  pair = Pair(Model(module, None), None, vocabulary, gamma=0, sampling=rule)

  @jax.jit
  def sample(params, inputs, key):
    params = {**pair.params, 'target': params}
    result = pair.decode_from(
        pair.start(params, inputs, max_length, 0), params,
        jnp.zeros((inputs.shape[0], max_length), jnp.int32), gamma=0, rule=rule, decode_rng=key)
    return result.sequences[:, 0]

  return sample


def on_policy(
    batches: Sequence[training.Batch], sample: Callable[[np.ndarray], np.ndarray],
    buckets: Sequence[tuple[int, int]], eos_id: int,
) -> list[training.Batch]:
  """The inputs of `batches` with texts that the draft writes for them, all in one go.

  Args:
    batches: of equally many rows.
    sample: `inputs [rows, S] → tokens [rows, L]`.
    buckets: `(S, L)`, growing; texts are padded to the first that holds the longest.
    eos_id: the id that ends a text.

  Returns:
    Batches of the same inputs.
  """
  size = max(batch.inputs.shape[1] for batch in batches)
  widened = [np.pad(batch.inputs, ((0, 0), (0, size - batch.inputs.shape[1]))) for batch in batches]
  sampled = np.split(sample(np.concatenate(widened)), len(batches))
  found = []
  for batch, texts in zip(batches, sampled, strict=True):
    longest = int(np.max(np.sum(counted(texts, eos_id), axis=1)))
    length = next(length for _, length in buckets if length >= longest)
    found.append(training.Batch(batch.inputs, texts[:, :length]))
  return found
