"""Planning: reading compiled modules, and the real TPU compiler where it is installed."""

import json

import pytest

from speculative_t5x.errors import UserError
from speculative_t5x.tpu import __main__ as command
from speculative_t5x.tpu import hlo
from speculative_t5x.tpu.chips import chip_of

MODULE = """HloModule jit_step, is_scheduled=true

%fused_computation (param_0.1: bf16[8,64]) -> bf16[8,64] {
  %param_0.1 = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %add.1 = bf16[8,64]{1,0:T(8,128)(2,1)} add(%param_0.1, %param_0.1)
}

%body (arg: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg = (s32[], f32[4]{0}) parameter(0)
  %element = f32[4]{0} get-tuple-element(%arg), index=1
  %reduced = f32[4]{0} all-reduce(%element), replica_groups={{0,1}}, to_apply=%sum
  %index = s32[] get-tuple-element(%arg), index=0
  ROOT %out = (s32[], f32[4]{0}) tuple(%index, %reduced)
}

ENTRY %main.9 (p0: bf16[8,64], p1: bf16[100,64], p2: f32[2,16]) -> f32[2,16] {
  %p0 = bf16[8,64]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[100,64]{1,0:T(8,128)(2,1)} parameter(1)
  %p2 = f32[2,16]{1,0} parameter(2)
  %copy-start = (bf16[8,64]{1,0:T(8,128)(2,1)S(1)}, bf16[8,64]{1,0}, u32[]{:S(2)}) copy-start(%p0)
  %copy-done = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %fusion.1 = bf16[8,64]{1,0:T(8,128)(2,1)} fusion(%copy-done), kind=kLoop, calls=%fused_computation
  %slice-start = ((bf16[100,64]{1,0}), bf16[10,64]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%p1)
  %slice-done = bf16[10,64]{1,0:S(1)} slice-done(%slice-start), slice={[0:10], [0:64]}
  %copy.2 = bf16[100,64]{0,1} copy(%p1)
  %all-gather-start = (bf16[8,64]{1,0}, bf16[16,64]{1,0}) all-gather-start(%fusion.1)
  %all-gather-done = bf16[16,64]{1,0} all-gather-done(%all-gather-start)
  ROOT %fusion_dynamic-update-slice.3 = f32[2,16]{1,0} fusion(%p2, %fusion.1)
}
"""


def test_instructions_are_read():
  found, entry = hlo.computations(MODULE)
  assert entry == 'main.9' and set(found) == {'fused_computation', 'body', 'main.9'}
  fusion = next(x for x in found['main.9'] if x.name == 'fusion.1')
  assert (fusion.opcode, fusion.operands) == ('fusion', ['copy-done'])
  assert found['body'][0].type == '(s32[], f32[4]{0})'


def test_traffic_counts_what_lies_in_memory():
  """Each by hand, in order; what lies on chip is free."""
  array, weights = 8 * 64 * 2, 100 * 64 * 2
  expected = (
      array  # The prefetch reads p0.
      + array  # fusion.1 writes.
      + 10 * 64 * 2  # A slice of p1 is read.
      + 2 * weights  # A copy reads and writes.
      + array + array  # The gathering: its operand, and the first part of its result.
      + 2 * 16 * 4 + array  # An update in place reads both.
  )
  assert hlo.traffic(MODULE) == expected
  assert hlo.traffic(MODULE, 'body') == 2 * 4 * 4


def test_collectives_and_copies_are_counted():
  assert hlo.collectives(MODULE) == {'body': {'all-reduce': 1}, 'main.9': {'all-gather': 1}}
  assert hlo.copies(MODULE, 1000) == [('bf16[100,64]{0,1}', 12800)]
  assert hlo.copies(MODULE, 100_000) == []


def test_arrays_of_any_width():
  assert hlo.arrays('(s4[10]{0}, pred[3]{0:S(1)}, f32[])') == [(5, False), (3, True), (4, False)]
  # Other on-chip memory, and the host's.
  assert hlo.arrays('(f32[1]{0:T(512)S(3)}, f32[1]{0:S(5)})') == [(4, True), (4, False)]


@pytest.mark.parametrize('topology, named', [
    ('v5p', '--topology: expected one such as v5p:2x2x1 or v5e:2x4, found v5p'),
    ('v9:2x2', '--topology: expected one of v4, v5e, v5p, v6e, found v9'),
])
def test_unknown_chips_are_named(topology, named):
  with pytest.raises(UserError) as caught:
    chip_of(topology)
  assert str(caught.value) == named


def run(capsys, *arguments):
  """Exit code and the lines of standard error that are the command's."""
  code = command.main([
      '--gin_file=gin_configs/models/t5_1_1_xxl_small.gin', *arguments])
  return code, [x for x in capsys.readouterr().err.splitlines() if x.startswith('error: ')]


@pytest.mark.parametrize('arguments, named', [
    (['--topology=v7'], 'expected one such as'),
    (['--topology=v5p:2x2x1', '--gamma=0'], '--gamma: expected at least 1, found 0'),
    (['--topology=v5p:2x2x1', '--gin.DRAFT=None'], 'gin macro DRAFT: expected a network'),
])
def test_bad_settings_are_one_line_and_exit_code_2(arguments, named, capsys):
  code, errors = run(capsys, *arguments)
  assert code == 2 and len(errors) == 1 and named in errors[0]


@pytest.fixture
def compiler():
  return pytest.importorskip('libtpu', reason="needs the TPU compiler: the extra 'tpu'")


def test_partitions_must_divide(compiler, capsys):
  for partitions, named in [('3', 'a divisor of the 4 chips of v5p:2x2x1, found 3')]:
    code, errors = run(capsys, '--topology=v5p:2x2x1', '--partitions', partitions)
    assert code == 2 and named in errors[0]
  code, errors = run(
      capsys, '--topology=v5p:2x2x1', '--partitions', '4', '--draft_partitioned')
  assert code == 2 and 'draft num_heads 6, found 4' in errors[0]


def test_xxl_with_small_is_planned(compiler, capsys, tmp_path):
  """The paper's fastest pair on one chip that holds it; memory and collectives are asserted."""
  path = tmp_path / 'plan.json'
  code, errors = run(capsys, '--topology=v5p:2x2x1', f'--json={path}')
  assert code == 0 and not errors
  [found] = json.loads(path.read_text(encoding='utf-8'))
  weights = 11.14e9 * 2  # Of T5 1.1 XXL, in bfloat16.
  assert found['fits'] and weights < found['needed_bytes'] < 1.15 * weights
  assert all(not program['collectives'] for program in found['programs'].values())
  step = found['programs']['target_1']
  assert found['traffic_v'] < 1.05 and found['c'] < 0.05
  assert step['traffic_bytes'] < 1.1 * step['argument_bytes']


def test_a_replicated_draft_has_no_collectives(compiler, capsys, tmp_path):
  path = tmp_path / 'plan.json'
  code, _ = run(
      capsys, '--topology=v5e:2x4', '--partitions', '8', f'--json={path}')
  [found] = json.loads(path.read_text(encoding='utf-8'))
  assert code == 0 and found['fits']
  assert not found['programs']['draft_1']['collectives']
  assert found['programs']['target_1']['collectives']


def test_a_pair_that_does_not_fit_is_one_line(compiler, capsys):
  code, errors = run(capsys, '--topology=v5e:2x4', '--partitions', '1')
  assert code == 2 and len(errors) == 1
  assert 'v5e:2x4, 1 partitions, batch 1: expected at most 15.75G a chip, found' in errors[0]
