"""Planning: reading compiled modules, and the real TPU compiler where it is installed."""

import json
import sys
import types

import gin
import jax
import pytest
from jax.experimental import topologies

from speculative_t5x.errors import UserError
from speculative_t5x.tpu import __main__ as command
from speculative_t5x.tpu import hlo, plan, programs
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


LOOP = """HloModule jit_loop, is_scheduled=true

%body.1 (arg: (s32[], bf16[2,64], bf16[100,64])) -> (s32[], bf16[2,64], bf16[100,64]) {
  %arg = (s32[], bf16[2,64]{1,0}, bf16[100,64]{1,0}) parameter(0)
  %index = s32[] get-tuple-element(%arg), index=0
  %cache = bf16[2,64]{1,0} get-tuple-element(%arg), index=1
  %weight = bf16[100,64]{1,0} get-tuple-element(%arg), index=2
  %copy.1 = bf16[2,64]{0,1} copy(%cache)
  %copy_bitcast_fusion = bf16[100,64]{0,1} fusion(%weight), kind=kLoop, calls=%fused
  %copy.2 = bf16[2,64]{1,0:S(1)} copy(%cache)
  %copy.3 = bf16[2,64]{1,0} copy(%copy.2)
  %copy-start.4 = (bf16[2,64]{1,0}, bf16[2,64]{1,0}, u32[]{:S(2)}) copy-start(%cache)
  %copy-done.4 = bf16[2,64]{1,0} copy-done(%copy-start.4)
  %sort.1 = f32[2,999]{1,0} sort(%logits), dimensions={1}, to_apply=%less
  %logits = f32[2,999]{1,0} call(%weight), to_apply=%inner, backend_config={"estimated_cycles":"7"}
  %many = f32[2,999]{1,0} add(%logits, %logits), backend_config={"estimated_cycles":"30"}
  ROOT %out = (s32[], bf16[2,64]{1,0}, bf16[100,64]{1,0}) tuple(%index, %copy.3, %weight)
}

%inner (weight: bf16[100,64]) -> f32[2,999] {
  %weight.1 = bf16[100,64]{1,0} parameter(0)
  ROOT %copy.5 = f32[2,999]{0,1} copy(%weight.1)
}

%condition.1 (arg: (s32[], bf16[2,64], bf16[100,64])) -> pred[] {
  ROOT %true = pred[] constant(true)
}

ENTRY %main (p0: bf16[2,64], p1: bf16[100,64]) -> bf16[2,64] {
  %p0 = bf16[2,64]{1,0} parameter(0)
  %p1 = bf16[100,64]{1,0} parameter(1)
  %copy.6 = bf16[100,64]{0,1} copy(%p1)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[2,64]{1,0}, bf16[100,64]{1,0}) tuple(%zero, %p0, %copy.6)
  %while = (s32[], bf16[2,64]{1,0}) while(%start), condition=%condition.1, body=%body.1
  ROOT %end = bf16[2,64]{1,0} get-tuple-element(%while), index=1
}
"""


def test_loops_are_found_with_what_they_call():
  assert set(hlo.loop_bodies(LOOP)) == {'body.1', 'inner', 'condition.1'}
  assert hlo.loop_bodies(MODULE) == []


def test_copies_in_loops_are_from_memory_to_memory():
  """Neither onto the chip nor from it, and none of the entry's."""
  assert hlo.copies(LOOP, 1, 'body.1') == [
      ('bf16[2,64]{0,1}', 256), ('bf16[100,64]{0,1}', 12800),
      ('(bf16[2,64]{1,0}, bf16[2,64]{1,0}, u32[]{:S(2)})', 256)]
  assert hlo.copies(LOOP, 300, 'body.1') == [('bf16[100,64]{0,1}', 12800)]
  assert hlo.copies(LOOP, 1, 'inner') == [('f32[2,999]{0,1}', 7992)]


def test_cycles_and_sorts():
  assert hlo.cycles(LOOP, 'body.1') == 37 and hlo.cycles(LOOP) == 0
  assert (hlo.sorts(LOOP, 999), hlo.sorts(LOOP, 1000)) == (1, 0)


@pytest.mark.parametrize('verify', [False, True])
@pytest.mark.parametrize('fixed, a_row, capacity, first', [
    (100, 7, 1000, 1), (100, 7, 1000, 64), (0, 1, 5000, 4), (90, 7, 100, 1), (100, 7, 107, 1),
])
def test_the_largest_batch(verify, fixed, a_row, capacity, first):
  """Against rows counted one by one; the compiler refuses before its estimate says so."""
  tried = []

  def needs(size):
    tried.append(size)
    # Rows come in eights from the 16th on, so that what two sizes say is not all.
    rows = size if size < 16 else -(-size // 8) * 8
    needed = fixed + a_row * rows
    return None if needed > capacity else needed

  found, refused = plan.largest_batch(needs, first, needs(first), capacity, verify=verify)
  right = max(size for size in range(5001) if not size or needs(size) is not None)
  if verify:
    assert (found or 0) <= right < refused <= (found or 0) + max(right // 32, 1)
  else:
    assert refused is None and abs((found or 0) - right) <= 8


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


def test_a_compiler_in_use_is_not_blamed_on_the_topology(capsys, monkeypatch):
  """One process at a time has the TPU library."""
  def refuse(*_):
    raise RuntimeError('ABORTED: Internal error when accessing libtpu multi-process lockfile.')

  monkeypatch.setitem(sys.modules, 'libtpu', types.ModuleType('libtpu'))
  monkeypatch.setattr(topologies, 'get_topology_desc', refuse)
  code, errors = run(capsys, '--topology=v5p:2x2x1')
  assert code == 2 and len(errors) == 1
  assert errors[0].startswith('error: libtpu: expected it to be free, found another process')


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


def planner_of(topology, partitions, target, draft, **sizes):
  """A planner of two sizes of T5 1.1."""
  gin.clear_config()
  gin.parse_config_files_and_bindings(
      ['gin_configs/models/t5_1_1.gin'],
      [f'{name} = @t5_1_1_{size}/speculative_t5x.T5Config()'
       for name, size in (('TARGET', target), ('DRAFT', draft))])
  networks = [command.network_of(name, 'bfloat16') for name in ('TARGET', 'DRAFT')]
  gin.clear_config()
  return programs.Planner(programs.Request(*networks, topology, partitions, **sizes))


def test_xxl_with_small_on_one_chip(compiler):
  """The paper's fastest pair where one chip holds it; memory and collectives are asserted."""
  planner = planner_of('v5p:2x2x1', 1, 'xxl', 'small')
  decode, _ = planner.decode(7, 1)
  steps = {tokens: planner.step('target', tokens)[0] for tokens in (1, 8)}
  draft, _ = planner.step('draft', 1)
  weights = 11.14e9 * 2  # Of T5 1.1 XXL, in bfloat16.
  needed = decode.argument_bytes + decode.temporary_bytes + decode.output_bytes
  assert weights < needed < 1.05 * weights
  # Caches are updated where they lie, and weights read as they lie.
  assert decode.loop_copies['caches'] == decode.loop_copies['weights'] == 0
  assert decode.loop_copies['others'] < 1e6 and decode.sorts == 0
  for program in (decode, draft, *steps.values()):
    assert not program.collectives
  assert steps[8].traffic_bytes < 1.05 * steps[1].traffic_bytes
  assert decode.loop_traffic_bytes < 1.05 * steps[1].traffic_bytes
  assert draft.traffic_bytes < 0.02 * steps[1].traffic_bytes
  for step in steps.values():
    assert step.traffic_bytes < 1.1 * step.argument_bytes


def test_rows_of_a_batch_share_the_weights(compiler):
  """A large batch costs little more a step: products are of all rows, caches stay in place."""
  planner = planner_of('v5p:2x2x1', 1, 'small', 'small', batch_size=64, output_length=512)
  single = planner_of('v5p:2x2x1', 1, 'small', 'small', output_length=512)
  step, compiled = planner.step('target', 8)
  # A product that is taken a row at a time costs a thousand times as much.
  assert step.cycles < 64 * single.step('target', 8)[0].cycles
  assert step.loop_copies['caches'] == 0
  assert compiled.memory_analysis().alias_size_in_bytes > 0.9 * sum(
      x.size * x.dtype.itemsize for x in jax.tree.leaves(planner.cache('target').self_keys)) * 2


def test_chips_hold_their_part_of_the_cache(compiler):
  """Also where the encoder gives it back, which would otherwise be the largest array of a plan."""
  whole, half = (
      planner_of('v5e:2x2', partitions, 'small', 'small', batch_size=4).encoder()[0].output_bytes
      for partitions in (1, 2))
  assert half < 0.6 * whole


def test_a_plan_of_a_partitioned_pair(compiler, capsys, tmp_path):
  """The whole command; a replicated draft has no collectives, the target has."""
  path = tmp_path / 'plan.json'
  code, errors = run(
      capsys, '--topology=v5e:2x2', '--partitions', '2', f'--json={path}',
      '--input_length=32', '--output_length=32', '--gin.TARGET=@t5_1_1_small/T5Config()')
  [found] = json.loads(path.read_text(encoding='utf-8'))
  assert code == 0 and not errors and found['fits']
  assert not found['programs']['draft_1']['collectives']
  assert found['programs']['target_1']['collectives']
  assert found['programs']['plain']['loop_copies']['caches'] == 0
  assert found['largest_batch'] > 64 and found['too_large_batch'] is None
  assert (found['t5x_absent'] is None) == ('t5x' in found['programs'])
  for by in ('', 'traffic_', 'cycle_'):
    # Both are of one size, and the target is on two chips.
    assert 0.8 < found[f'{by}c'] < 4 and found[f'{by}v'] > 0.5


def test_weights_that_do_not_fit_are_one_line(compiler, capsys):
  code, errors = run(capsys, '--topology=v5e:2x4', '--partitions', '1')
  assert code == 2 and len(errors) == 1
  assert errors[0].startswith(
      'error: v5e:2x4, 1 partitions: expected weights of at most 16384 MiB a chip, found 213')


def test_a_batch_that_does_not_fit_is_one_line(compiler, capsys):
  code, errors = run(
      capsys, '--topology=v5e:2x2', '--partitions', '1', '--batch_size=4096',
      '--output_length=512', '--gin.TARGET=@t5_1_1_small/T5Config()')
  assert code == 2 and len(errors) == 1
  assert 'v5e:2x2, 1 partitions, batch 4096: expected at most 15.75G a chip, found' in errors[0]
