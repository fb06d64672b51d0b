"""Makes `tests/goldens`: models of HuggingFace transformers' own T5 family, and their logits.

The tests read the files and need neither torch nor transformers. To make it again, in an
environment of its own (made with torch 2.13.0 on CPU; the file names the versions):

    pip install torch transformers numpy
    python scripts/goldens/make_transformers_goldens.py

`transformers_t5.npz` has two networks, each with a decoder deeper than its encoder and heads that
do not fill the residual stream: T5 1.0 (relu, tied logits) and T5 1.1 (gated gelu, untied).
Sequences are longer than 128 tokens, so that every bucket of the relative positions is used, and
some inputs are padded.

For each network NAME the file holds
    NAME/config                   JSON, keyword arguments of `T5Config`
    NAME/encoder_input_tokens     int32 [B, S], 0 is padding
    NAME/decoder_input_tokens     int32 [B, M], begins with 0
    NAME/logits                   float32 [B, M, V]
    NAME/params/...               float32, by the names of our parameter tree

`huggingface/NAME` is what `save_pretrained` writes for one network of every family, and one with
unusual settings, with `golden.npz` beside it: the tokens and logits as above.
"""

import argparse
import json
import pathlib

import numpy as np
import torch
import transformers

OUTPUT = pathlib.Path(__file__).parents[2] / 'tests' / 'goldens'

SIZES = {
    'vocab_size': 32, 'emb_dim': 12, 'num_heads': 3, 'num_encoder_layers': 2,
    'num_decoder_layers': 3, 'head_dim': 5, 'mlp_dim': 20,
}
# Name -> (seed, our choices, the same choice in transformers' words).
NETWORKS = {
    't5_1_0': (0, {'mlp_activations': ['relu'], 'logits_via_embedding': True}, 'relu'),
    't5_1_1': (1, {'mlp_activations': ['gelu', 'linear'], 'logits_via_embedding': False},
               'gated-gelu'),
}
ENCODER_LENGTHS = (140, 33, 1)
DECODER_LENGTH = 136

# Of the folders, in transformers' words.
FAMILY_SIZES = {
    'vocab_size': 32, 'd_model': 12, 'num_heads': 3, 'num_layers': 2, 'num_decoder_layers': 3,
    'd_kv': 5, 'd_ff': 20, 'dropout_rate': 0.0, 'pad_token_id': 0, 'decoder_start_token_id': 0,
}
# Name -> (model type, choices).
FAMILIES = {
    't5_1_0': ('t5', {'feed_forward_proj': 'relu', 'tie_word_embeddings': True}),
    't5_1_1': ('t5', {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False}),
    'mt5': ('mt5', {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False}),
    'umt5': ('umt5', {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False}),
    'umt5_tied': ('umt5', {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': True}),
    'byt5': ('t5', {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False,
                    'vocab_size': 384, 'num_layers': 3, 'num_decoder_layers': 1}),
    'unusual': ('t5', {'feed_forward_proj': 'gated-silu', 'tie_word_embeddings': True,
                       'scale_decoder_outputs': False, 'layer_norm_epsilon': 1e-2,
                       'relative_attention_num_buckets': 16,
                       'relative_attention_max_distance': 40}),
}
CLASSES = {
    't5': (transformers.T5Config, transformers.T5ForConditionalGeneration),
    'mt5': (transformers.MT5Config, transformers.MT5ForConditionalGeneration),
    'umt5': (transformers.UMT5Config, transformers.UMT5ForConditionalGeneration),
}


def build(config: dict, feed_forward: str) -> transformers.T5ForConditionalGeneration:
  """A transformers T5 with the sizes of `config`, every parameter random."""
  tied = config['logits_via_embedding']
  model = transformers.T5ForConditionalGeneration(transformers.T5Config(
      vocab_size=config['vocab_size'], d_model=config['emb_dim'], num_heads=config['num_heads'],
      num_layers=config['num_encoder_layers'], num_decoder_layers=config['num_decoder_layers'],
      d_kv=config['head_dim'], d_ff=config['mlp_dim'], feed_forward_proj=feed_forward,
      tie_word_embeddings=tied, dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0,
      attn_implementation='eager',
  )).eval()
  randomize(model, tied)
  return model


def randomize(model: transformers.PreTrainedModel, tied: bool) -> None:
  """Makes every parameter random, and gives untied logits a matrix of their own."""
  if not tied:
    # Some versions of transformers drop only the scale of tied logits, not the tie.
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
  same = model.shared.weight.data_ptr() == model.lm_head.weight.data_ptr()
  assert same == tied, 'weights are not tied as configured'
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      # Initial layer norms are all ones and initial biases small: either would hide a wrong scale
      # or a transposed table. Matrices keep their inputs' size, the query included, because an
      # attention that is nearly one-hot would hide wrong biases.
      if name.endswith('layer_norm.weight'):
        parameter.uniform_(0.5, 1.5)
      elif 'relative_attention_bias' in name or name == 'shared.weight':
        parameter.normal_(0.0, 1.0)
      else:
        scale = parameter.shape[1] ** -0.5
        parameter.normal_(0.0, scale * (0.5 if name.endswith('.q.weight') else 1.0))


def convert(model: transformers.T5ForConditionalGeneration, config: dict) -> dict[str, np.ndarray]:
  """The parameters of `model` by the names of our tree, `/` between levels."""
  state = {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}
  params = {'token_embedder/embedding': state['shared.weight']}

  def attention(ours: str, theirs: str):
    # torch keeps [out, in], flax [in, out].
    for name, letter in (('query', 'q'), ('key', 'k'), ('value', 'v'), ('out', 'o')):
      params[f'{ours}/{name}/kernel'] = state[f'{theirs}.{letter}.weight'].T

  def mlp(ours: str, theirs: str):
    branches = ('wi',) if len(config['mlp_activations']) == 1 else ('wi_0', 'wi_1')
    for name in (*branches, 'wo'):
      params[f'{ours}/{name}/kernel'] = state[f'{theirs}.{name}.weight'].T

  for stack, depth in (('encoder', config['num_encoder_layers']),
                       ('decoder', config['num_decoder_layers'])):
    params[f'{stack}/{stack}_norm/scale'] = state[f'{stack}.final_layer_norm.weight']
    first = f'{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight'
    params[f'{stack}/relpos_bias/rel_embedding'] = state[first].T
    for index in range(depth):
      ours, theirs = f'{stack}/layers_{index}', f'{stack}.block.{index}.layer'
      if stack == 'encoder':
        attention(f'{ours}/attention', f'{theirs}.0.SelfAttention')
        norms = ('pre_attention_layer_norm', 'pre_mlp_layer_norm')
      else:
        attention(f'{ours}/self_attention', f'{theirs}.0.SelfAttention')
        attention(f'{ours}/encoder_decoder_attention', f'{theirs}.1.EncDecAttention')
        norms = ('pre_self_attention_layer_norm', 'pre_cross_attention_layer_norm',
                 'pre_mlp_layer_norm')
      mlp(f'{ours}/mlp', f'{theirs}.{len(norms) - 1}.DenseReluDense')
      for sublayer, name in enumerate(norms):
        params[f'{ours}/{name}/scale'] = state[f'{theirs}.{sublayer}.layer_norm.weight']
  if not config['logits_via_embedding']:
    params['decoder/logits_dense/kernel'] = state['lm_head.weight'].T
  return params


def golden(seed: int, config: dict, feed_forward: str) -> dict[str, np.ndarray]:
  """Config, inputs, parameters and logits of one network."""
  torch.manual_seed(seed)
  model = build(config, feed_forward)
  random = np.random.default_rng(seed)
  batch = len(ENCODER_LENGTHS)
  encoder_tokens = random.integers(1, config['vocab_size'], (batch, max(ENCODER_LENGTHS)))
  padding = np.arange(max(ENCODER_LENGTHS)) >= np.array(ENCODER_LENGTHS)[:, None]
  encoder_tokens[padding] = 0
  decoder_tokens = random.integers(1, config['vocab_size'], (batch, DECODER_LENGTH))
  decoder_tokens[:, 0] = 0
  with torch.no_grad():
    logits = model(
        input_ids=torch.tensor(encoder_tokens), attention_mask=torch.tensor(~padding).long(),
        decoder_input_ids=torch.tensor(decoder_tokens), use_cache=False,
    ).logits.numpy()
  return {
      'config': np.array(json.dumps(config)),
      'encoder_input_tokens': encoder_tokens.astype(np.int32),
      'decoder_input_tokens': decoder_tokens.astype(np.int32),
      'logits': logits.astype(np.float32),
      **{f'params/{name}': value for name, value in convert(model, config).items()},
  }


def build_family(name: str) -> transformers.PreTrainedModel:
  """The network NAME of `FAMILIES`."""
  torch.manual_seed(list(FAMILIES).index(name))
  model_type, choices = FAMILIES[name]
  config_class, model_class = CLASSES[model_type]
  config = config_class(**FAMILY_SIZES | choices, attn_implementation='eager')
  if 'scale_decoder_outputs' in choices:
    config.scale_decoder_outputs = choices['scale_decoder_outputs']
  model = model_class(config).eval()
  randomize(model, choices['tie_word_embeddings'])
  return model


def batch_for(
    config: transformers.PreTrainedConfig, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
  """Encoder tokens, some rows padded with 0, and decoder tokens behind a 0, int32."""
  length = max(ENCODER_LENGTHS)
  inputs = random.integers(1, config.vocab_size, (2, length))
  inputs[1, ENCODER_LENGTHS[1]:] = 0
  length = min(DECODER_LENGTH, 6000 // config.vocab_size)  # Many ids make many logits.
  tokens = random.integers(1, config.vocab_size, (2, length))
  tokens[:, 0] = 0
  return inputs.astype(np.int32), tokens.astype(np.int32)


def logits_of(
    model: transformers.PreTrainedModel, inputs: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
  """float32 `[B, M, V]` of encoder tokens `[B, S]` and decoder tokens `[B, M]`."""
  with torch.no_grad():
    return model(
        input_ids=torch.tensor(inputs).long(), attention_mask=torch.tensor(inputs != 0).long(),
        decoder_input_ids=torch.tensor(tokens).long(), use_cache=False,
    ).logits.numpy().astype(np.float32)


def write_family(name: str, folder: pathlib.Path) -> None:
  """Writes `huggingface/NAME`."""
  model = build_family(name)
  model.save_pretrained(folder)
  inputs, tokens = batch_for(model.config, np.random.default_rng(0))
  np.savez_compressed(
      folder / 'golden.npz', encoder_input_tokens=inputs, decoder_input_tokens=tokens,
      logits=logits_of(model, inputs, tokens),
  )


def main():
  """Writes the files."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--output', type=pathlib.Path, default=OUTPUT, help='folder')
  folder = parser.parse_args().output
  folder.mkdir(parents=True, exist_ok=True)
  for name in FAMILIES:
    write_family(name, folder / 'huggingface' / name)
  output = folder / 'transformers_t5.npz'
  arrays = {
      'versions': np.array(f'torch {torch.__version__}, transformers {transformers.__version__}')
  }
  for name, (seed, choices, feed_forward) in NETWORKS.items():
    for key, value in golden(seed, {**SIZES, **choices}, feed_forward).items():
      arrays[f'{name}/{key}'] = value
  np.savez_compressed(output, **arrays)
  print(f'{output}: {output.stat().st_size} bytes, {arrays["versions"]}')


if __name__ == '__main__':
  main()
