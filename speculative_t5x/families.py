"""What model a checkpoint holds: its family, its sizes, and what could draft for it.

A Hugging Face folder says everything in `config.json`. A T5X or Orbax checkpoint has no such file,
so names and shapes are read: the number of heads is that of the relative biases, whose place says
whether every layer has its own; logits without `logits_dense` are tied to the embedding, and
scaled. Shapes do not tell an activation: two kernels `wi_0` and `wi_1` are taken for T5 1.1's gated
gelu, one `wi` for T5 1.0's relu. A network without an encoder whose decoder holds the embedding is
T5X's decoder-only one. Nor do shapes tell the largest distance (128) and the epsilon of
layer norms (1e-6), which are the same in all of T5X.
"""

import dataclasses
import math
import os
import re
from collections.abc import Collection, Mapping

import flax
import jax
import jax.numpy as jnp

from speculative_t5x import checkpoints, huggingface
from speculative_t5x.errors import UserError
from speculative_t5x.network import DecoderOnly, T5Config
from speculative_t5x.stored import StoredArray
from speculative_t5x.vocabularies import Vocabulary

T5_1_0, T5_1_1, MT5, BYT5, UMT5, MADLAD, DECODER_ONLY, OTHER = (
    'T5 1.0', 'T5 1.1', 'mT5', 'ByT5', 'umT5', 'MADLAD-400', 'decoder-only', 'T5 variant'
)

# Rows of the embedding, where a family is told by them.
VOCAB_SIZES = {
    T5_1_0: 32128, T5_1_1: 32128, MT5: 250112, BYT5: 384, UMT5: 256384, MADLAD: 256000,
}
MODEL_TYPES = {MT5: 'mt5', UMT5: 'umt5'}

# emb_dim, num_heads, head_dim, encoder and decoder layers, mlp_dim of the published sizes.
_T5_1_1_SIZES = {
    'small': (512, 6, 64, 8, 8, 1024), 'base': (768, 12, 64, 12, 12, 2048),
    'large': (1024, 16, 64, 24, 24, 2816), 'xl': (2048, 32, 64, 24, 24, 5120),
    'xxl': (4096, 64, 64, 24, 24, 10240),
}
STANDARD_SIZES = {
    T5_1_0: {
        'small': (512, 8, 64, 6, 6, 2048), 'base': (768, 12, 64, 12, 12, 3072),
        'large': (1024, 16, 64, 24, 24, 4096), '3b': (1024, 32, 128, 24, 24, 16384),
        '11b': (1024, 128, 128, 24, 24, 65536),
    },
    T5_1_1: _T5_1_1_SIZES,
    MT5: _T5_1_1_SIZES,
    UMT5: {name: size for name, size in _T5_1_1_SIZES.items() if name != 'large'},
    BYT5: {
        'small': (1472, 6, 64, 12, 4, 3584), 'base': (1536, 12, 64, 18, 6, 3968),
        'large': (1536, 16, 64, 36, 12, 3840), 'xl': (2560, 32, 64, 36, 12, 6720),
        'xxl': (4672, 64, 64, 36, 12, 12352),
    },
    MADLAD: {
        '3b': (1024, 16, 128, 32, 32, 8192), '7b': (2048, 16, 128, 48, 48, 8192),
        '10b': (2048, 32, 128, 32, 32, 16384),
    },
}

# Choices of whoever runs the network; no checkpoint decides them.
RUN_FIELDS = ('dtype', 'dropout_rate')
# What names and shapes do not tell.
UNSEEN_FIELDS = (
    'relative_attention_max_distance', 'layer_norm_epsilon', 'scale_logits_via_embedding',
)


@dataclasses.dataclass(frozen=True)
class Description:
  """What a checkpoint says of its model.

  Attributes:
    path: the checkpoint.
    layout: 'T5X', 'Orbax' or 'Hugging Face'.
    family: such as 'T5 1.1', which Flan-T5 and LM-adapted models cannot be told from.
    config: the network; activations are float32.
    eos_id: the id that ends a text; None where the checkpoint does not say.
    arrays: the parameters by name, not read.
  """

  path: str
  layout: str
  family: str
  config: T5Config
  eos_id: int | None
  arrays: Mapping[str, StoredArray]

  @property
  def num_parameters(self) -> int:
    """How many numbers the parameters are."""
    return sum(array.size for array in self.arrays.values())

  @property
  def dtypes(self) -> tuple[str, ...]:
    """Names of the dtypes that parameters are stored in."""
    return tuple(sorted({array.dtype.name for array in self.arrays.values()}))

  @property
  def model_type(self) -> str:
    """What transformers calls the model."""
    return MODEL_TYPES.get(self.family, 't5')


def describe(path: str | os.PathLike) -> Description:
  """Finds out what model a checkpoint holds, without reading a parameter.

  Args:
    path: T5X, Orbax or Hugging Face checkpoint, local or `gs://`.

  Returns:
    The description.

  Raises:
    UserError: it is none of these, it is damaged, or its model is no T5.
  """
  path = os.path.expanduser(os.fspath(path))
  if huggingface.is_folder(path):
    said, arrays = huggingface.open_folder(path)
    family = family_of(said.config, said.model_type, said.eos_id)
    return Description(path, 'Hugging Face', family, said.config, said.eos_id, arrays)
  layout, arrays = checkpoints.open_params(path)
  config = config_of_shapes(path, arrays)
  return Description(path, layout, family_of(config), config, None, arrays)


def config_of(path: str | os.PathLike) -> T5Config:
  """The network of a checkpoint; see `describe`."""
  return describe(path).config


def config_of_shapes(path: str, arrays: Mapping[str, StoredArray]) -> T5Config:
  """The network that parameters of these names and shapes belong to.

  Args:
    path: the checkpoint, for messages.
    arrays: by name, as from `checkpoints.open_params`.

  Returns:
    The network.

  Raises:
    UserError: they are of no T5.
  """
  if is_decoder_only(arrays):
    return _decoder_only_config(path, arrays)

  def shape(*names: str) -> tuple[int, ...]:
    for name in names:
      if name in arrays and len(arrays[name].shape) == 2:
        return arrays[name].shape
    raise UserError(
        f"{path}: parameter '{names[0]}': expected a matrix, as in every T5 encoder-decoder, "
        f'found {arrays[names[0]].shape if names[0] in arrays else "none"}'
    )

  def depth(stack: str) -> int:
    layers = (re.match(rf'{stack}/layers_(\d+)/', name) for name in arrays)
    return 1 + max((int(match[1]) for match in layers if match), default=-1)

  per_layer = 'encoder/layers_0/relpos_bias/rel_embedding' in arrays
  vocab_size, emb_dim = shape('token_embedder/embedding')
  num_heads, num_buckets = shape(
      'encoder/relpos_bias/rel_embedding', 'encoder/layers_0/relpos_bias/rel_embedding'
  )
  joined = shape('encoder/layers_0/attention/query/kernel')[1]
  if not num_heads or joined % num_heads:
    raise UserError(
        f"{path}: parameter 'encoder/layers_0/attention/query/kernel': expected columns for "
        f'{num_heads} heads, as the relative biases have, found {joined}'
    )
  gated = 'encoder/layers_0/mlp/wi_0/kernel' in arrays
  try:
    config = T5Config(
        vocab_size=vocab_size, emb_dim=emb_dim, num_heads=num_heads, head_dim=joined // num_heads,
        num_encoder_layers=depth('encoder'), num_decoder_layers=depth('decoder'),
        mlp_dim=shape(f'encoder/layers_0/mlp/{"wi_0" if gated else "wi"}/kernel')[1],
        mlp_activations=('gelu', 'linear') if gated else ('relu',),
        logits_via_embedding='decoder/logits_dense/kernel' not in arrays,
        relative_bias_per_layer=per_layer, relative_attention_num_buckets=num_buckets,
    )
  except ValueError as error:
    raise UserError(f'{path}: {error}') from error
  checkpoints.check_shapes(path, arrays, shapes(config))
  return config


def is_decoder_only(arrays: Collection[str]) -> bool:
  """Whether parameters of these names are of T5X's decoder-only network."""
  return 'decoder/token_embedder/embedding' in arrays and not any(
      name.startswith('encoder/') for name in arrays)


def _decoder_only_config(path: str, arrays: Mapping[str, StoredArray]) -> T5Config:
  """`config_of_shapes` of a decoder-only network."""
  def shape(name: str) -> tuple[int, int]:
    found = arrays[name].shape if name in arrays else None
    if found is None or len(found) != 2:
      raise UserError(f"{path}: parameter '{name}': expected a matrix, as in every decoder-only "
                      f'T5, found {"none" if found is None else found}')
    return found

  layers = (re.match(r'decoder/layers_(\d+)/', name) for name in arrays)
  vocab_size, emb_dim = shape('decoder/token_embedder/embedding')
  num_heads, num_buckets = shape('decoder/relpos_bias/rel_embedding')
  joined = shape('decoder/layers_0/self_attention/query/kernel')[1]
  if not num_heads or joined % num_heads:
    raise UserError(
        f"{path}: parameter 'decoder/layers_0/self_attention/query/kernel': expected columns for "
        f'{num_heads} heads, as the relative biases have, found {joined}')
  gated = 'decoder/layers_0/mlp/wi_0/kernel' in arrays
  try:
    config = T5Config(
        vocab_size=vocab_size, emb_dim=emb_dim, num_heads=num_heads, head_dim=joined // num_heads,
        num_encoder_layers=0,
        num_decoder_layers=1 + max((int(match[1]) for match in layers if match), default=-1),
        mlp_dim=shape(f'decoder/layers_0/mlp/{"wi_0" if gated else "wi"}/kernel')[1],
        mlp_activations=('gelu', 'linear') if gated else ('relu',),
        logits_via_embedding='decoder/logits_dense/kernel' not in arrays,
        relative_attention_num_buckets=num_buckets,
    )
  except ValueError as error:
    raise UserError(f'{path}: {error}') from error
  checkpoints.check_shapes(path, arrays, shapes(config))
  return config


def shapes(config: T5Config) -> dict[str, tuple[int, ...]]:
  """The shape of every parameter of a network, by name, `/` between levels."""
  if config.is_decoder_only:
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    found = jax.eval_shape(DecoderOnly(config).init, jax.random.key(0), tokens)['params']
    found = flax.traverse_util.flatten_dict(flax.core.unfreeze(found), sep='/')
    return {name: x.shape for name, x in found.items()}
  return {name: tensor.shape for name, tensor in huggingface.tensors(config).items()}


def family_of(config: T5Config, model_type: str | None = None, eos_id: int | None = None) -> str:
  """The family of a network.

  Args:
    config: the network.
    model_type: what transformers calls it; None where that is unknown.
    eos_id: the id that ends a text; None where that is unknown.

  Returns:
    A name of this module, 'T5 variant' for a network that no published model has.
  """
  if config.is_decoder_only:
    return DECODER_ONLY
  if config.relative_bias_per_layer:
    return UMT5
  gated_gelu = config.mlp_activations == ('gelu', 'linear') and not config.logits_via_embedding
  if config.mlp_activations == ('relu',) and config.logits_via_embedding:
    return T5_1_0 if model_type != 'mt5' else OTHER
  if model_type == 'mt5':
    return MT5
  if not gated_gelu:
    return OTHER
  if config.vocab_size == VOCAB_SIZES[MADLAD] and eos_id in (None, 2):
    return MADLAD
  if config.vocab_size == VOCAB_SIZES[MT5]:
    return MT5
  if config.vocab_size == VOCAB_SIZES[BYT5]:
    return BYT5
  return T5_1_1


def default_eos_id(family: str) -> int:
  """The EOS id of a family's vocabulary."""
  return 2 if family == MADLAD else 1


def drafts_for(description: Description) -> dict[str, int]:
  """Published sizes of the same family that are smaller.

  Args:
    description: of the target.

  Returns:
    Parameters by name of the size, from the smallest; empty for a vocabulary of its own.
  """
  family, config = description.family, description.config
  if config.vocab_size != VOCAB_SIZES.get(family):
    return {}
  found = {}
  for name, (emb_dim, heads, head_dim, encoder, decoder, mlp) in STANDARD_SIZES[family].items():
    size = dataclasses.replace(
        config, emb_dim=emb_dim, num_heads=heads, head_dim=head_dim, num_encoder_layers=encoder,
        num_decoder_layers=decoder, mlp_dim=mlp,
    )
    count = sum(math.prod(shape) for shape in shapes(size).values())
    if count < description.num_parameters:
      found[name] = count
  return found


def check_config(description: Description, config: T5Config) -> None:
  """Refuses a configuration that contradicts a checkpoint.

  Only what the checkpoint tells is compared; see the module.

  Args:
    description: of the checkpoint.
    config: what it is to be read into.

  Raises:
    UserError: the first field that differs, with both values.
  """
  unseen = RUN_FIELDS
  if description.layout != 'Hugging Face':
    unseen += UNSEEN_FIELDS
  for field in dataclasses.fields(T5Config):
    given, found = (getattr(x, field.name) for x in (config, description.config))
    if field.name in unseen or given == found:
      continue
    if field.name == 'mlp_activations':
      if description.layout != 'Hugging Face' and len(given) == len(found):
        continue
      # Two names of one function.
      given = tuple('silu' if name == 'swish' else name for name in given)
      if given == found:
        continue
    if field.name == 'scale_logits_via_embedding' and not config.logits_via_embedding:
      continue
    raise UserError(
        f'{description.path}: {field.name}: expected {given} as in the given T5Config, '
        f'found {found} in the checkpoint'
    )


def check_vocabulary(description: Description, vocabulary: Vocabulary) -> None:
  """Refuses a vocabulary that ends texts otherwise, or has more ids, than a checkpoint.

  Args:
    description: of the checkpoint.
    vocabulary: to decode with.

  Raises:
    UserError: they differ; names both values.
  """
  if description.eos_id is not None and vocabulary.eos_id != description.eos_id:
    raise UserError(
        f'{description.path}: eos_token_id: expected {vocabulary.eos_id} as in the vocabulary, '
        f'found {description.eos_id}'
    )
  if vocabulary.size > description.config.vocab_size:
    raise UserError(
        f"{description.path}: vocab_size: expected at least the vocabulary's {vocabulary.size}, "
        f'found {description.config.vocab_size}'
    )
