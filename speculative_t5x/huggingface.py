"""Hugging Face folders: `config.json` beside one or more safetensors files.

Names and shapes of transformers' state dict against ours, in both directions: torch keeps a linear
map as `[out, in]` and a table of relative biases as `[buckets, heads]`, so every matrix but the
embedding is transposed. The embedding is stored as `shared.weight` or as the encoder's or the
decoder's `embed_tokens.weight` (MADLAD-400), and tied logits may be stored once more as
`lm_head.weight`; a copy that differs is refused.

Only headers are read until parts of tensors are asked for, locally and in a bucket.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from speculative_t5x import huggingface_config, tensor_files
from speculative_t5x.errors import UserError
from speculative_t5x.huggingface_config import FolderConfig
from speculative_t5x.network import T5Config
from speculative_t5x.stored import StoredArray, transposed
from speculative_t5x.tensor_files import TensorFile

CONFIG = 'config.json'
GENERATION_CONFIG = 'generation_config.json'
SINGLE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'

EMBEDDING = 'token_embedder/embedding'
EMBEDDINGS = ('shared.weight', 'encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
LM_HEAD = 'lm_head.weight'
# Stored by early conversions, and used by no version of transformers.
UNUSED = re.compile(
    r'decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight'
)

# transformers' own default for new files.
MAX_SHARD_BYTES = 5 * 10**9


class Tensor(NamedTuple):
  """What a parameter is called and how it is stored by transformers.

  Attributes:
    name: in the state dict.
    shape: ours.
    transposed: whether theirs is the transpose.
  """

  name: str
  shape: tuple[int, ...]
  transposed: bool


def tensors(config: T5Config) -> dict[str, Tensor]:
  """The parameters of a network and their names in transformers.

  Args:
    config: the network.

  Returns:
    The tensor of each parameter, by our name, `/` between levels.
  """
  width, joined = config.emb_dim, config.num_heads * config.head_dim
  table = (config.num_heads, config.relative_attention_num_buckets)
  found = {EMBEDDING: Tensor(EMBEDDINGS[0], (config.vocab_size, width), False)}

  def matrix(ours: str, theirs: str, *shape: int):
    found[ours] = Tensor(f'{theirs}.weight', shape, True)

  def scale(ours: str, theirs: str):
    found[f'{ours}/scale'] = Tensor(f'{theirs}.weight', (width,), False)

  def attention(ours: str, theirs: str):
    for name, letter in (('query', 'q'), ('key', 'k'), ('value', 'v')):
      matrix(f'{ours}/{name}/kernel', f'{theirs}.{letter}', width, joined)
    matrix(f'{ours}/out/kernel', f'{theirs}.o', joined, width)

  def relative_bias(ours: str, theirs: str):
    matrix(f'{ours}/relpos_bias/rel_embedding', f'{theirs}.relative_attention_bias', *table)

  def mlp(ours: str, theirs: str):
    count = len(config.mlp_activations)
    for index in range(count):
      name = 'wi' if count == 1 else f'wi_{index}'
      matrix(f'{ours}/{name}/kernel', f'{theirs}.{name}', width, config.mlp_dim)
    matrix(f'{ours}/wo/kernel', f'{theirs}.wo', config.mlp_dim, width)

  for stack, depth in (('encoder', config.num_encoder_layers),
                       ('decoder', config.num_decoder_layers)):
    for index in range(depth):
      ours, theirs = f'{stack}/layers_{index}', f'{stack}.block.{index}.layer'
      if config.relative_bias_per_layer or index == 0:
        owner = ours if config.relative_bias_per_layer else stack
        relative_bias(owner, f'{theirs}.0.SelfAttention')
      if stack == 'encoder':
        attention(f'{ours}/attention', f'{theirs}.0.SelfAttention')
        norms = ('pre_attention_layer_norm', 'pre_mlp_layer_norm')
      else:
        attention(f'{ours}/self_attention', f'{theirs}.0.SelfAttention')
        attention(f'{ours}/encoder_decoder_attention', f'{theirs}.1.EncDecAttention')
        norms = ('pre_self_attention_layer_norm', 'pre_cross_attention_layer_norm',
                 'pre_mlp_layer_norm')
      for sublayer, name in enumerate(norms):
        scale(f'{ours}/{name}', f'{theirs}.{sublayer}.layer_norm')
      mlp(f'{ours}/mlp', f'{theirs}.{len(norms) - 1}.DenseReluDense')
    scale(f'{stack}/{stack}_norm', f'{stack}.final_layer_norm')
  if not config.logits_via_embedding:
    matrix('decoder/logits_dense/kernel', 'lm_head', width, config.vocab_size)
  return found


def is_folder(path: str) -> bool:
  """Whether `path` looks like a Hugging Face folder, by the files in it, local or `gs://`."""
  has = lambda *names: any(tensor_files.exists(path, name) for name in names)
  if tensor_files.is_remote(path):
    return has(CONFIG)
  return has(CONFIG, SINGLE, INDEX) and not has('checkpoint', '_METADATA')


def open_folder(path: str) -> tuple[FolderConfig, dict[str, StoredArray]]:
  """Reads the configuration of a folder and finds its parameters, without reading a tensor.

  Args:
    path: the folder, local or `gs://`.

  Returns:
    What the configuration says, and the arrays by our names, `/` between levels.

  Raises:
    UserError: a file is missing or truncated, the model is of another architecture, or a tensor
      is missing, too many, or of another shape or kind than `config.json` says.
  """
  files = _Files(path)
  said = _read_config(path, files)
  expected = tensors(said.config)
  embeddings = [name for name in EMBEDDINGS if name in files.names]
  copies = embeddings[1:]
  if embeddings:
    expected[EMBEDDING] = expected[EMBEDDING]._replace(name=embeddings[0])
    if 'decoder/logits_dense/kernel' not in expected and LM_HEAD in files.names:
      copies.append(LM_HEAD)
  used = {tensor.name for tensor in expected.values()}.union(copies)
  if unused := sorted(name for name in files.names - used if not UNUSED.fullmatch(name)):
    raise UserError(f"{path}: tensor '{unused[0]}': expected no such tensor by {CONFIG}, found one")
  return said, {
      ours: _stored(path, files, tensor, copies if ours == EMBEDDING else ())
      for ours, tensor in expected.items()
  }


def _stored(path: str, files: '_Files', tensor: Tensor, copies: Iterable[str]) -> StoredArray:
  """One tensor as an array of ours; parts are compared with those of `copies` when read."""
  shape = tensor.shape[::-1] if tensor.transposed else tensor.shape
  array, *others = (files.array(name, shape) for name in (tensor.name, *copies))
  if others:
    array = _compared(path, tensor.name, array, dict(zip(copies, others, strict=True)))
  return transposed(array) if tensor.transposed else array


def _compared(
    path: str, name: str, array: StoredArray, copies: Mapping[str, StoredArray]
) -> StoredArray:
  """`array`, of which no part is read that differs from that of a copy."""
  def start(index, out):
    shape = [part.stop - part.start for part in index]
    found = {None: array, **copies}
    parts = {copy: np.empty(shape, x.dtype) for copy, x in found.items()}
    waits = [x.start(index, parts[copy]) for copy, x in found.items()]

    def finish():
      for wait in waits:
        wait()
      own = parts.pop(None)
      for copy, part in parts.items():
        # Bytes, so that a NaN equals itself.
        if part.dtype != own.dtype or not np.array_equal(part.view(np.uint8), own.view(np.uint8)):
          hint = ' (an untied model has tie_word_embeddings false in config.json)'
          raise UserError(
              f"{path}: tensor '{copy}': expected a copy of '{name}', found other values"
              f'{hint if copy == LM_HEAD else ""}'
          )
      out[...] = own

    return finish

  return dataclasses.replace(array, start=start)


def _read_config(path: str, files: '_Files') -> FolderConfig:
  if (content := tensor_files.read_file(path, CONFIG)) is None:
    raise UserError(f'{path}: expected {CONFIG} beside the safetensors files, found none')
  generation = tensor_files.read_file(path, GENERATION_CONFIG)
  return huggingface_config.parse(
      path, huggingface_config.parse_json(path, CONFIG, content),
      huggingface_config.parse_json(path, GENERATION_CONFIG, generation) if generation else {},
      has_lm_head=LM_HEAD in files.names,
  )


class _Files:
  """The safetensors files of a folder.

  Attributes:
    names: of all tensors.
  """

  def __init__(self, path: str):
    self._path = path
    self._open = {}
    if (index := tensor_files.read_file(path, INDEX)) is not None:
      where = huggingface_config.parse_json(path, INDEX, index).get('weight_map')
      if not isinstance(where, dict) or not all(isinstance(x, str) for x in where.values()):
        raise UserError(f"{path}: {INDEX}: expected 'weight_map', found none")
      for file in sorted(set(where.values())):
        if pathlib.PurePath(file).name != file:
          raise UserError(f'{path}: {INDEX}: expected names of files beside it, found {file!r}')
      self._where = where
      for name, file in where.items():
        if name not in self._file(file).tensors:
          raise UserError(f"{path}: {file}: expected tensor '{name}' as in {INDEX}, found none")
    else:
      self._where = dict.fromkeys(self._file(SINGLE).tensors, SINGLE)
    self.names = self._where.keys()

  def array(self, name: str, shape: tuple[int, ...]) -> StoredArray:
    """A tensor, as it is stored, which must be of this shape."""
    if name not in self._where:
      raise UserError(f"{self._path}: expected tensor '{name}' by {CONFIG}, found none")
    file = self._file(self._where[name])
    found, dtype = tuple(file.tensors[name]['shape']), file.tensors[name]['dtype']
    if found != shape:
      raise UserError(
          f"{self._path}: tensor '{name}': expected shape {shape} by {CONFIG}, found {found}"
      )
    if dtype not in tensor_files.DTYPES:
      raise UserError(
          f"{self._path}: tensor '{name}': expected a dtype among "
          f'{", ".join(tensor_files.DTYPES)}, found {dtype}'
      )
    return file.array(name)

  def _file(self, name: str) -> TensorFile:
    """One of the files; its header is read once."""
    if name not in self._open:
      if (file := tensor_files.open_file(self._path, name)) is None:
        raise UserError(self._missing(name))
      self._open[name] = file
    return self._open[name]

  def _missing(self, file: str) -> str:
    if file != SINGLE:
      return f'{self._path}: {INDEX} names {file}: expected this file, found none'
    message = f'{self._path}: expected {SINGLE} or {INDEX}, found neither'
    others = ('pytorch_model.bin', 'pytorch_model.bin.index.json', 'flax_model.msgpack',
              'tf_model.h5')
    if there := [name for name in others if tensor_files.exists(self._path, name)]:
      message += f" (only {there[0]}: load and save it with transformers' save_pretrained)"
    return message


def write_folder(
    folder: pathlib.Path, arrays: Mapping[str, StoredArray], config: T5Config,
    values: Iterable[tuple[str, np.ndarray]], *, model_type: str, eos_id: int,
) -> None:
  """Writes what transformers' `from_pretrained` reads into an empty folder.

  Args:
    folder: where to.
    arrays: the parameters of `config`, by our names.
    config: the network.
    values: name and array of each of `arrays`, in their order; one file's are held at once.
    model_type: 't5', 'mt5' or 'umt5'.
    eos_id: the id that ends a text.

  Raises:
    UserError: transformers has no such network, or safetensors no such dtype.
  """
  import safetensors.numpy

  names = tensors(config)
  dtypes = {array.dtype.name for array in arrays.values()}
  if unknown := dtypes - set(tensor_files.DTYPES.values()):
    raise UserError(f'parameters: expected floating dtypes, found {sorted(unknown)[0]}')
  rendered = huggingface_config.render(
      config, model_type=model_type, eos_id=eos_id,
      dtype=dtypes.pop() if len(dtypes) == 1 else 'float32',
  )
  shards, room = [], 0
  for name, array in arrays.items():
    if not shards or array.num_bytes > room:
      shards.append(set())
      room = MAX_SHARD_BYTES
    shards[-1].add(name)
    room -= array.num_bytes
  where, values = {}, iter(values)
  for number, shard in enumerate(shards, 1):
    file = SINGLE
    if len(shards) > 1:
      file = f'model-{number:05d}-of-{len(shards):05d}.safetensors'
    held = {}
    for _ in shard:
      name, value = next(values)
      tensor = names[name]
      held[tensor.name] = np.ascontiguousarray(value.T if tensor.transposed else value)
      where[tensor.name] = file
    safetensors.numpy.save_file(held, folder / file, metadata={'format': 'pt'})
  if len(shards) > 1:
    total = sum(array.num_bytes for array in arrays.values())
    index = {'metadata': {'total_size': total}, 'weight_map': dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + '\n')
  # Last: without it the folder is not a model.
  (folder / CONFIG).write_text(json.dumps(rendered, indent=2, sort_keys=True) + '\n')
