"""Conversion keeps every bit, in all directions, and the command says what is wrong in one line."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from speculative_t5x import checkpoints, convert, families, reading
from speculative_t5x.errors import UserError
from speculative_t5x.network import T5Config
from speculative_t5x.stored import StoredArray
from test_huggingface import FAMILIES, GOLDENS, TOLERANCE, edit_config, goldens_script
from trees import assert_same

LAYOUTS = {'t5x': 'T5X', 'orbax': 'Orbax', 'huggingface': 'Hugging Face'}


def files_of(folder):
  """The content of every file in a folder, by its path there."""
  return {
      str(path.relative_to(folder)): path.read_bytes()
      for path in sorted(pathlib.Path(folder).rglob('*')) if path.is_file()
  }


@pytest.mark.parametrize('name', FAMILIES)
def test_round_trip_from_hugging_face_is_byte_exact(tmp_path, name):
  params = checkpoints.load_params(GOLDENS / name)
  source, written = convert.convert(GOLDENS / name, tmp_path / 'checkpoint_7', 't5x', step=7)
  assert (source.layout, written.layout) == ('Hugging Face', 'T5X')
  assert_same(checkpoints.load_params(tmp_path / 'checkpoint_7'), params)
  if name in ('unusual', 'umt5_tied', 'mt5'):
    # Settings of `unusual` are lost and told; these families are told by more than shapes.
    return
  convert.convert(tmp_path / 'checkpoint_7', tmp_path / 'back', 'huggingface')
  assert (tmp_path / 'back' / 'model.safetensors').read_bytes() == (
      (GOLDENS / name / 'model.safetensors').read_bytes())
  assert families.config_of(tmp_path / 'back') == families.config_of(GOLDENS / name)


@pytest.mark.parametrize('name', FAMILIES)
def test_round_trip_from_t5x_is_byte_exact(tmp_path, name):
  convert.convert(GOLDENS / name, tmp_path / 'checkpoint_7', 't5x', step=7)
  convert.convert(tmp_path / 'checkpoint_7', tmp_path / 'hf', 'huggingface')
  convert.convert(tmp_path / 'hf', tmp_path / 'again', 't5x', step=7)
  assert files_of(tmp_path / 'again') == files_of(tmp_path / 'checkpoint_7')
  assert sorted(os.listdir(tmp_path)) == ['again', 'checkpoint_7', 'hf']


@pytest.mark.parametrize('start', LAYOUTS)
@pytest.mark.parametrize('to', LAYOUTS)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_every_pair_of_layouts(tmp_path, start, to, dtype):
  params = checkpoints.load_params(GOLDENS / 'umt5', dtype=dtype)
  checkpoints.save_params(tmp_path / 'first', params)
  convert.convert(tmp_path / 'first', tmp_path / 'second', start)
  source, written = convert.convert(tmp_path / 'second', tmp_path / 'third', to)
  assert (source.layout, written.layout) == (LAYOUTS[start], LAYOUTS[to])
  expected = {'bfloat16': ml_dtypes.bfloat16}.get(dtype, dtype)
  assert_same(checkpoints.load_params(tmp_path / 'third'), params, expected)
  assert (written.family, written.config) == (families.UMT5, families.config_of(GOLDENS / 'umt5'))


def test_madlad_keeps_its_ids(tmp_path):
  folder = shutil.copytree(GOLDENS / 't5_1_1', tmp_path / 'madlad')
  (folder / 'generation_config.json').unlink()
  edit_config(folder, eos_token_id=2, pad_token_id=1)
  _, written = convert.convert(folder, tmp_path / 'copy', 'huggingface')
  assert written.eos_id == 2
  assert json.loads((tmp_path / 'copy' / 'config.json').read_text())['pad_token_id'] == 1


def test_destination_is_new_and_local(tmp_path):
  (tmp_path / 'there').mkdir()
  (tmp_path / 'link').symlink_to(tmp_path / 'nowhere')
  for name in ('there', 'link'):
    with pytest.raises(UserError, match='expected a new directory'):
      convert.convert(GOLDENS / 't5_1_0', tmp_path / name, 't5x')
  with pytest.raises(UserError, match='expected a local directory'):
    convert.convert(GOLDENS / 't5_1_0', 'gs://bucket/checkpoint_0', 't5x')
  assert sorted(os.listdir(tmp_path)) == ['link', 'there'] and not os.listdir(tmp_path / 'there')


@pytest.mark.parametrize('to', LAYOUTS)
@pytest.mark.parametrize('error', [KeyboardInterrupt, UserError])
def test_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch, to, error):
  def start(read, original=reading._Read.start):
    if read.output.name == 'encoder/encoder_norm/scale':
      raise error(read.output.name)
    return original(read)

  monkeypatch.setattr(reading._Read, 'start', start)
  with pytest.raises(error):
    convert.convert(GOLDENS / 't5_1_0', tmp_path / 'out', to)
  assert not os.listdir(tmp_path)


def test_orbax_that_is_not_installed(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'orbax.checkpoint', None)
  with pytest.raises(UserError, match="--to=orbax: expected the package 'orbax-checkpoint'"):
    convert.convert(GOLDENS / 't5_1_0', tmp_path / 'out', 'orbax')
  assert not os.listdir(tmp_path)


def test_command_converts_and_tells_what_is_lost(tmp_path, capsys):
  out = tmp_path / 'out'
  assert convert.main([str(GOLDENS / 't5_1_1'), str(out), '--to=t5x']) == 0
  count = families.describe(GOLDENS / 't5_1_1').num_parameters
  assert capsys.readouterr().out == f'{out}: T5X, T5 1.1, {count:,} parameters in float32\n'
  convert.main([str(GOLDENS / 'unusual'), str(tmp_path / 'unusual'), '--to', 't5x'])
  note = capsys.readouterr().out.splitlines()[1]
  assert note.startswith('note: T5X has no place for these')
  for setting in ("mlp_activations ('silu', 'linear')", 'relative_attention_max_distance 40',
                  'layer_norm_epsilon 0.01', 'scale_logits_via_embedding False'):
    assert setting in note
  assert 'relative_attention_num_buckets' not in note


def test_inspect(capsys):
  assert convert.main(['--inspect', str(GOLDENS / 'umt5')]) == 0
  rows = dict(line.split('  ', 1) for line in capsys.readouterr().out.splitlines())
  rows = {name: value.strip() for name, value in rows.items()}
  found = families.describe(GOLDENS / 'umt5')
  assert rows == {
      'layout': 'Hugging Face', 'family': 'umT5', 'parameters': f'{found.num_parameters:,}',
      'dtype': 'float32', 'vocabulary size': '32', 'EOS id': '1', 'layers': '2 encoder, 3 decoder',
      'emb_dim': '12', 'heads': '3 of 5', 'mlp': '20, gelu × linear',
      'relative bias': 'in every layer, 32 buckets', 'logits': 'untied, with a kernel of its own',
      'possible drafts': 'no published size has a vocabulary of 32',
  }


def test_inspect_names_drafts():
  # ByT5's vocabulary, with sizes between its small and its base.
  config = T5Config(
      vocab_size=384, emb_dim=1472, num_heads=6, head_dim=64, num_encoder_layers=12,
      num_decoder_layers=5, mlp_dim=3584, mlp_activations=('gelu', 'linear'))
  shapes = families.shapes(config)
  # Nothing is read.
  arrays = {name: StoredArray(shape, np.dtype('float32'), None, shape)
            for name, shape in shapes.items()}
  description = families.Description('x', 'T5X', families.BYT5, config, None, arrays)
  assert 'possible drafts  small (300 M)' in convert.report(description)
  smallest = dataclasses.replace(config, num_decoder_layers=4)
  arrays = {name: arrays[name] for name in families.shapes(smallest)}
  description = families.Description('x', 'T5X', families.BYT5, smallest, None, arrays)
  assert 'possible drafts  no published size is smaller' in convert.report(description)


def run(*arguments):
  return subprocess.run(
      [sys.executable, '-m', 'speculative_t5x.convert', *map(str, arguments)],
      capture_output=True, text=True)


def test_command_refuses_in_one_line(tmp_path):
  (tmp_path / 'bert').mkdir()
  (tmp_path / 'bert' / 'config.json').write_text('{"model_type": "bert"}')
  (tmp_path / 'bert' / 'model.safetensors').write_bytes(
      (GOLDENS / 't5_1_0' / 'model.safetensors').read_bytes())
  found = run('--inspect', tmp_path / 'bert')
  assert found.returncode == 2 and not found.stdout
  assert found.stderr == (
      f"error: {tmp_path}/bert: config.json: model_type: expected t5, mt5, umt5, found 'bert'\n")


def edit_header(path, edit):
  """Rewrites the header of a safetensors file, with the tensors as they are."""
  content = path.read_bytes()
  stop = 8 + int.from_bytes(content[:8], 'little')
  header = json.loads(content[8:stop])
  edit(header)
  header = json.dumps(header).encode()
  path.write_bytes(len(header).to_bytes(8, 'little') + header + content[stop:])


def truncate(path):
  path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize('name, edit, message', [
    ('t5_1_1', lambda x: truncate(x / 'model.safetensors'), 'found a truncated or damaged one'),
    ('t5_1_1', lambda x: (x / 'model.safetensors.index.json').write_text(
        '{"weight_map": {"shared.weight": "model-00002-of-00002.safetensors"}}'),
     'names model-00002-of-00002.safetensors: expected this file, found none'),
    ('t5_1_1', lambda x: edit_header(x / 'model.safetensors', lambda header: header[
        'shared.weight'].update(dtype='I32')), 'expected a dtype among F64, F32, F16, BF16, found'),
    ('t5_1_1', lambda x: edit_header(x / 'model.safetensors', lambda header: header[
        'shared.weight'].update(dtype='F16')), "tensor 'shared.weight' of "),
    ('t5_1_1', lambda x: edit_header(x / 'model.safetensors', lambda header: header[
        'shared.weight'].update(data_offsets=[0, 4])), 'found a truncated or damaged one'),
    ('t5_1_0', lambda x: edit_config(x, tie_word_embeddings=False, scale_decoder_outputs=...),
     "tie_word_embeddings: expected a tensor 'lm_head.weight'"),
    ('t5_1_1', lambda x: edit_config(x, model_type='bart'), 'model_type: expected t5, mt5, umt5'),
    ('t5_1_1', lambda x: edit_config(x, d_ff=21), 'by config.json, found'),
])
def test_command_names_what_is_wrong_with_a_folder(tmp_path, capsys, name, edit, message):
  folder = pathlib.Path(shutil.copytree(GOLDENS / name, tmp_path / 'folder'))
  edit(folder)
  for arguments in (['--inspect', folder], [folder, tmp_path / 'out', '--to=t5x']):
    assert convert.main([*map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f'error: {folder}: ') and captured.err.count('\n') == 1
    assert message in captured.err and not captured.out
  assert os.listdir(tmp_path) == ['folder']


@pytest.mark.parametrize('edit, message', [
    (lambda x: truncate(x / 'checkpoint'), 'truncated or damaged one'),
    (lambda x: truncate(x / 'target.token_embedder.embedding' / '0.0'),
     "cannot read parameter 'token_embedder/embedding'"),
    (lambda x: shutil.rmtree(x / 'target.token_embedder.embedding'),
     "cannot open parameter 'token_embedder/embedding'"),
    (lambda x: (x / 'target.token_embedder.embedding' / '.zarray').write_text(
        (x / 'target.token_embedder.embedding' / '.zarray').read_text().replace('<f4', '<u2')),
     "'token_embedder/embedding': expected a floating dtype, found uint16"),
])
def test_command_names_what_is_wrong_with_a_checkpoint(tmp_path, capsys, edit, message):
  path = tmp_path / 'checkpoint_0'
  convert.convert(GOLDENS / 't5_1_1', path, 't5x')
  edit(path)
  assert convert.main([str(path), str(tmp_path / 'out'), '--to=huggingface']) == 2
  captured = capsys.readouterr()
  assert captured.err.startswith(f'error: {path}: ') and captured.err.count('\n') == 1
  assert message in captured.err and not captured.out
  assert os.listdir(tmp_path) == ['checkpoint_0']


def test_command_refuses(tmp_path, capsys):
  (tmp_path / 'empty').mkdir()
  for arguments, message in (
      (['--inspect', str(tmp_path / 'empty')], 'found neither'),
      (['--inspect', str(tmp_path / 'none')], 'found nothing at this path'),
      ([str(GOLDENS / 'byt5'), str(tmp_path / 'empty'), '--to=t5x'], 'expected a new directory'),
  ):
    assert convert.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith('error: ') and captured.err.count('\n') == 1
    assert message in captured.err and not captured.out
  for arguments in ([], ['a'], ['a', 'b'], ['a', 'b', '--to=x'], ['a', '--inspect', 'b']):
    with pytest.raises(SystemExit) as caught:
      convert.main(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize('name', FAMILIES)
def test_live_converted_folder_loads_in_transformers(tmp_path, name):
  script = goldens_script()
  checkpoint = GOLDENS / name
  if name != 'unusual':
    # By way of a layout that has no config.json.
    convert.convert(GOLDENS / name, tmp_path / 'checkpoint_0', 't5x')
    checkpoint = tmp_path / 'checkpoint_0'
  convert.convert(checkpoint, tmp_path / 'hf', 'huggingface')
  model_type = json.loads((tmp_path / 'hf' / 'config.json').read_text())['model_type']
  # The shapes of a tiny mT5 are those of T5 1.1, which compute the same.
  assert model_type == ('t5' if name == 'mt5' else script.FAMILIES[name][0])
  model, info = script.CLASSES[model_type][1].from_pretrained(
      tmp_path / 'hf', output_loading_info=True)
  assert not info['missing_keys'] and not info['unexpected_keys']
  with np.load(GOLDENS / name / 'golden.npz') as golden:
    logits = script.logits_of(
        model.eval(), golden['encoder_input_tokens'], golden['decoder_input_tokens'])
    print(f'{name}: largest difference of logits {np.abs(logits - golden["logits"]).max():.2e}')
    np.testing.assert_allclose(logits, golden['logits'], rtol=0, atol=TOLERANCE)
