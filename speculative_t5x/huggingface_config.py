"""What a Hugging Face `config.json` says of a T5 network, and writing one.

The models are transformers' T5 (also of Flan-T5, ByT5, LM-adapted and MADLAD-400), mT5 and umT5.
Whatever would change a logit or the end of a text is honoured or refused, never ignored.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from speculative_t5x.errors import UserError
from speculative_t5x.network import T5Config

ARCHITECTURES = {
    't5': 'T5ForConditionalGeneration',
    'mt5': 'MT5ForConditionalGeneration',
    'umt5': 'UMT5ForConditionalGeneration',
}
# The first T5 was published under a name that transformers has given up.
OLD_ARCHITECTURES = ('T5WithLMHeadModel',)

# transformers' defaults, for the keys that a file may leave out.
DEFAULTS = {
    'd_model': 512, 'd_kv': 64, 'num_layers': 6, 'num_heads': 8,
    'relative_attention_num_buckets': 32, 'relative_attention_max_distance': 128,
    'layer_norm_epsilon': 1e-6, 'eos_token_id': 1, 'pad_token_id': 0,
}
MODEL_DEFAULTS = {
    't5': {'vocab_size': 32128, 'd_ff': 2048, 'feed_forward_proj': 'relu'},
    'mt5': {'vocab_size': 250112, 'd_ff': 1024, 'num_layers': 8, 'num_heads': 6,
            'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False},
    'umt5': {'vocab_size': 250112, 'd_ff': 1024, 'num_layers': 8, 'num_heads': 6,
             'feed_forward_proj': 'gated-gelu'},
}

# Sizes, by the names of `T5Config`.
SIZES = {
    'vocab_size': 'vocab_size', 'emb_dim': 'd_model', 'num_heads': 'num_heads',
    'num_encoder_layers': 'num_layers', 'num_decoder_layers': 'num_decoder_layers',
    'head_dim': 'd_kv', 'mlp_dim': 'd_ff',
    'relative_attention_num_buckets': 'relative_attention_num_buckets',
    'relative_attention_max_distance': 'relative_attention_max_distance',
}

# transformers' name of an activation -> ours. Its plain 'gelu' is the exact one, which T5X has not,
# but 'gated-gelu' means 'gelu_new', the approximation of T5X.
ACTIVATIONS = {
    'relu': 'relu', 'gelu_new': 'gelu', 'gelu_pytorch_tanh': 'gelu', 'silu': 'silu',
    'swish': 'silu', 'linear': 'linear',
}

TOKEN_IDS = ('eos_token_id', 'pad_token_id', 'decoder_start_token_id')
# Settings of transformers' generation that force or forbid tokens.
FORCED_TOKENS = (
    'forced_bos_token_id', 'forced_eos_token_id', 'forced_decoder_ids', 'suppress_tokens',
    'begin_suppress_tokens', 'bad_words_ids',
)


@dataclasses.dataclass(frozen=True)
class FolderConfig:
  """What the JSON files of a folder say.

  Attributes:
    model_type: 't5', 'mt5' or 'umt5'.
    config: the network; its activations are float32.
    eos_id: the id that ends a text.
  """

  model_type: str
  config: T5Config
  eos_id: int


def parse_json(path: str, name: str, content: bytes) -> dict[str, Any]:
  """The object in a JSON file; a `UserError` says what is wrong with it."""
  try:
    parsed = json.loads(content)
  except ValueError as error:
    raise UserError(
        f'{path}: {name}: expected complete JSON, found a truncated or damaged file of '
        f'{len(content)} bytes'
    ) from error
  if not isinstance(parsed, dict):
    raise UserError(f'{path}: {name}: expected an object, found {type(parsed).__name__}')
  return parsed


def parse(
    path: str, config: Mapping[str, Any], generation: Mapping[str, Any], *, has_lm_head: bool
) -> FolderConfig:
  """Reads a configuration.

  Args:
    path: the folder, for messages.
    config: of `config.json`.
    generation: of `generation_config.json`, empty without one; its token ids take precedence, as
      in transformers.
    has_lm_head: whether `lm_head.weight` is among the tensors.

  Returns:
    What they say.

  Raises:
    UserError: another model or architecture, or a setting that is not supported.
  """
  where = f'{path}: config.json:'
  model_type = config.get('model_type')
  if model_type not in ARCHITECTURES:
    raise UserError(
        f'{where} model_type: expected {", ".join(ARCHITECTURES)}, found {model_type!r}'
    )
  allowed = (ARCHITECTURES[model_type], *OLD_ARCHITECTURES)
  architectures = config.get('architectures') or allowed[:1]
  if not set(architectures) & set(allowed):
    raise UserError(
        f'{where} architectures: expected {allowed[0]}, found {", ".join(map(str, architectures))}'
    )
  if config.get('quantization_config'):
    raise UserError(f'{where} quantization_config: expected none, found a quantised model')
  values = DEFAULTS | MODEL_DEFAULTS[model_type] | {
      key: value for key, value in config.items() if value is not None
  }
  if not values.get('is_encoder_decoder', True):
    raise UserError(f'{where} is_encoder_decoder: expected true, found false')
  values.setdefault('num_decoder_layers', values['num_layers'])
  tied, scaled = _logits(where, model_type, config, values, has_lm_head=has_lm_head)
  sizes = {ours: values[theirs] for ours, theirs in SIZES.items()}
  for ours, value in sizes.items():
    if not isinstance(value, int) or isinstance(value, bool):
      raise UserError(f'{where} {SIZES[ours]}: expected a whole number, found {value!r}')
  if sizes['num_encoder_layers'] < 1:
    raise UserError(
        f'{where} num_layers: expected at least 1, found {sizes["num_encoder_layers"]}')
  try:
    network = T5Config(
        **sizes, mlp_activations=_activations(where, values['feed_forward_proj']),
        layer_norm_epsilon=values['layer_norm_epsilon'], logits_via_embedding=tied,
        scale_logits_via_embedding=scaled or not tied,
        relative_bias_per_layer=model_type == 'umt5',
    )
  except (ValueError, TypeError) as error:
    raise UserError(f'{where} {error}') from error
  return FolderConfig(model_type, network, _eos_id(path, config, generation))


def _activations(where: str, projection: Any) -> tuple[str, ...]:
  """Our names of `feed_forward_proj`."""
  gated, name = False, projection
  if isinstance(projection, str) and projection.startswith('gated-'):
    gated, name = True, projection.removeprefix('gated-')
    name = 'gelu_new' if name == 'gelu' else name
  if name not in ACTIVATIONS:
    known = [x for x in ACTIVATIONS if x != 'linear']
    raise UserError(
        f'{where} feed_forward_proj: expected gated-gelu, or one of {", ".join(known)} with or '
        f"without 'gated-' before it, found {projection!r}"
    )
  return (ACTIVATIONS[name], 'linear') if gated else (ACTIVATIONS[name],)


def _logits(where, model_type, config, values, *, has_lm_head) -> tuple[bool, bool]:
  """Whether logits are tied to the embedding, and whether tied ones are scaled.

  `tie_word_embeddings` once decided both. Since release 5, transformers writes it as true for
  every model, ties whatever has no `lm_head.weight`, and keeps the scale of T5 and umT5 as
  `scale_decoder_outputs`; its mT5 has none.
  """
  ties = values.get('tie_word_embeddings', True)
  scaled = values.get('scale_decoder_outputs', ties)
  release = str(config.get('transformers_version')).split('.')[0]
  if model_type == 'mt5' and ties:
    if not has_lm_head or not release.isdigit() or int(release) < 5:
      raise UserError(
          f'{where} tie_word_embeddings: expected false for mt5 (releases of transformers scale '
          'its tied logits differently), found true'
      )
    scaled = False
  if has_lm_head and not scaled:
    return False, False
  if not has_lm_head and not ties:
    raise UserError(
        f"{where} tie_word_embeddings: expected a tensor 'lm_head.weight' where it is false, "
        'found none'
    )
  return True, scaled


def _eos_id(path: str, config: Mapping[str, Any], generation: Mapping[str, Any]) -> int:
  """The id that ends a text; refuses what decoding here could not do."""
  ids = {}
  for file, values in (('config.json', config), ('generation_config.json', generation)):
    ids |= {
        key: (file, values[key]) for key in TOKEN_IDS
        if values.get(key) is not None
    }
    for key in FORCED_TOKENS:
      if values.get(key):
        raise UserError(f'{path}: {file}: {key}: expected none, found {values[key]!r}')
  default = lambda key, value: ids.get(key, ('config.json', value))
  file, eos = default('eos_token_id', DEFAULTS['eos_token_id'])
  if isinstance(eos, list) and len(eos) == 1:
    eos = eos[0]
  if not isinstance(eos, int):
    raise UserError(f'{path}: {file}: eos_token_id: expected one id, found {eos!r}')
  # Padding is masked in the input and comes after EOS in the output, so its id has no influence;
  # but 0 is masked here as in T5X, and must not be a token. MADLAD-400 says 1, its start token,
  # and has the unknown token at 0, which T5X masked in training.
  file, pad = default('pad_token_id', DEFAULTS['pad_token_id'])
  if pad != 0 and (pad, eos) != (1, 2):
    raise UserError(
        f'{path}: {file}: pad_token_id: expected 0 (or 1 with eos_token_id 2, as of MADLAD-400), '
        f'found {pad!r}'
    )
  file, start = default('decoder_start_token_id', pad)
  if start != 0:
    raise UserError(f'{path}: {file}: decoder_start_token_id: expected 0, found {start!r}')
  return eos


def render(
    config: T5Config, *, model_type: str, eos_id: int, dtype: str
) -> dict[str, Any]:
  """The `config.json` of a network.

  Args:
    config: the network.
    model_type: 't5', 'mt5' or 'umt5'.
    eos_id: the id that ends a text.
    dtype: of the parameters, for transformers' choice of its own.

  Returns:
    The object to write.

  Raises:
    UserError: transformers has no such network.
  """
  if config.is_decoder_only:
    raise UserError(
        'num_encoder_layers: expected at least 1 for transformers, whose T5 has an encoder, '
        'found 0')
  theirs = {'relu': 'relu', 'gelu': 'gelu_new', 'silu': 'silu', 'swish': 'silu'}
  match config.mlp_activations:
    case (name,) if name in theirs:
      projection = theirs[name]
    case (name, 'linear') if name in theirs:
      projection = 'gated-gelu' if name == 'gelu' else f'gated-{theirs[name]}'
    case _:
      raise UserError(
          'mlp_activations: expected one activation, alone or with linear, for transformers, '
          f'found {config.mlp_activations}'
      )
  if config.relative_bias_per_layer != (model_type == 'umt5'):
    raise UserError(
        f'relative_bias_per_layer: expected {model_type == "umt5"} for {model_type}, '
        f'found {config.relative_bias_per_layer}'
    )
  if config.logits_via_embedding and model_type == 'mt5':
    raise UserError('logits_via_embedding: expected False for mt5, found True')
  values = {
      'architectures': [ARCHITECTURES[model_type]],
      'model_type': model_type,
      'is_encoder_decoder': True,
      **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
      'feed_forward_proj': projection,
      'layer_norm_epsilon': config.layer_norm_epsilon,
      'tie_word_embeddings': config.logits_via_embedding,
      'eos_token_id': eos_id,
      'pad_token_id': 1 if eos_id == 2 else 0,
      'decoder_start_token_id': 0,
      'torch_dtype': dtype,
  }
  if config.logits_via_embedding and not config.scale_logits_via_embedding:
    values['scale_decoder_outputs'] = False
  return values
