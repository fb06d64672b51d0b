"""The measurement: acceptance by enumeration, prediction against simulation, the command."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy
from speculative_t5x import analysis, decoding, plots, timing
from speculative_t5x.demo import tasks
from speculative_t5x.demo.__main__ import load_demo_pair
from speculative_t5x.drafters import DrafterConfig, ModelDrafter
from speculative_t5x.errors import UserError
from speculative_t5x.measure import __main__ as command
from speculative_t5x.measure import acceptance, report
from speculative_t5x.measure.run import AtGamma, Costs, Measurement, measure
from speculative_t5x.measure.subject import ModelSteps, PairSubject
from speculative_t5x.sampling import SamplingRule
from speculative_t5x.verification import VerificationRule

DEMO = '--gin_file=gin_configs/examples/demo.gin'


def path(*accepted):
  return acceptance.Path(np.array(accepted, float), np.array(accepted, float))


@pytest.mark.parametrize('gamma', [0, 1, 2, 5])
def test_rounds_of_certain_acceptance_are_counted(gamma):
  """Acceptance of 0 and 1 leaves one course: walk it."""
  rng = np.random.default_rng(gamma)
  for _ in range(20):
    accepted = rng.integers(0, 2, rng.integers(1, 12))
    place = rounds = 0
    while place < len(accepted):
      drafts = accepted[place : place + gamma]
      count = int(np.cumprod(drafts).sum())
      place += count + 1
      rounds += 1
    assert acceptance.expected_rounds(path(*accepted), gamma) == pytest.approx(rounds)


def test_rounds_of_independent_acceptance_follow_the_formula():
  """Of a long text with one chance everywhere, tokens a round are those of equation 1."""
  for chance, gamma in [(0.5, 1), (0.8, 4), (0.9, 7)]:
    length = 4000
    rounds = acceptance.expected_rounds(path(*[chance] * length), gamma)
    assert length / rounds == pytest.approx(analysis.expected_tokens(chance, gamma), rel=5e-3)


def toy_steps(model, batch, slots):
  return ModelSteps((), lambda params: model.cache(batch, slots),
                    lambda params, *args: model(*args))


def test_acceptance_along_plain_texts_predicts_the_rounds_of_speculative_decoding():
  """The same laws, different samples: the means agree, for every gamma."""
  tables = [toy.Toy(5, seed).table for seed in (1, 2)]
  for table in tables:
    # Padding is no token here, so that lengths are what they seem.
    table[..., 0] = -30
  target, draft = (toy.Toy(5, 0, table=table) for table in tables)
  rule, batch, length = SamplingRule(1.0), 20_000, 6

  def decode(gamma, seed):
    slots = decoding.cache_slots(length, gamma)
    return jax.jit(lambda: decoding.speculative_decode(
        jnp.zeros((batch, length), jnp.int32), target.cache(batch, slots), target, toy.EOS,
        gamma=gamma, drafter=ModelDrafter(draft, rule), draft_state=draft.cache(batch, slots),
        rule=rule, verify=VerificationRule('token_wise'), decode_rng=jax.random.key(seed)))()

  texts = np.asarray(decode(0, 0).sequences[:, 0])
  logits = acceptance.logits_along(
      *(toy_steps(model, batch, length + 1) for model in (target, draft)), texts)
  paths = acceptance.paths_of(*logits, texts, rule, rule)
  assert len(paths) == batch
  laws = [np.asarray(jax.nn.softmax(jnp.asarray(table))) for table in tables]
  for found, row in zip(paths[:50], texts, strict=False):
    context = [0, 0, *row]
    for place in range(len(found.overlap)):
      p, q = (law[context[place], context[place + 1]] for law in laws)
      assert found.overlap[place] == pytest.approx(np.minimum(p, q).sum(), abs=1e-5)
      assert found.accepted[place] == pytest.approx(
          min(1, q[row[place]] / p[row[place]]), abs=1e-4)
  for gamma in (1, 3):
    statistics = decode(gamma, 1).statistics
    measured = float(np.sum(statistics.emitted) / np.sum(statistics.rounds))
    rounds = sum(acceptance.expected_rounds(found, gamma) for found in paths)
    # Of 20,000 texts each; the standard error of the ratio is below .3 %.
    assert sum(len(found.accepted) for found in paths) / rounds == pytest.approx(
        measured, rel=0.015)


def test_depth_is_a_product_of_chances():
  found = acceptance.accepted_by_depth([path(0.5, 1.0, 0.2), path(1.0)], 3)
  np.testing.assert_allclose(found, [(0.5 + 1 + 0.2 + 1) / 4, (0.5 + 0.2) / 2, 0.1])


@pytest.fixture(scope='module')
def demo():
  return load_demo_pair()


@pytest.fixture(scope='module')
def texts():
  pairs = tasks.read_pairs(tasks.HELD_OUT)
  return [inputs for inputs, _ in tasks.spread(tasks.examples(pairs, 'restoration'), 40)
          if len(inputs) < 60][:4]


def test_a_pair_is_measured(demo, texts):
  batches = command.batches_of(demo, texts, 32, 2)
  assert [batch.shape for batch in batches] == [(2, 32)] * 2
  found = measure(PairSubject(demo, batches, 32), [1, 3], 2)
  assert (found.num_inputs, found.batch_size, found.repeats) == (4, 2, 2)
  assert [at.gamma for at in found.gammas] == [0, 1, 3]
  assert 0.5 < found.alpha <= 1 and 0 < found.c < 1 and found.v[3] > 0
  for at in found.gammas:
    assert at.identical == 4
    assert at.factor_low <= at.factor_high
    # Greedy acceptance is certain, and so are the rounds.
    assert at.tokens_a_round == pytest.approx(at.predicted_tokens_a_round)
    assert at.round_seconds > 0 and at.argument_bytes > 1e7 and at.temporary_bytes > 0
  plain = found.gammas[0]
  assert plain.factor == plain.tokens_a_round == plain.predicted_factor == 1
  assert found.gammas[2].accepted_at_position == sorted(
      found.gammas[2].accepted_at_position, reverse=True)
  assert found.alpha_by_draft_temperature == {}


def test_a_sampling_pair_is_measured_with_drafts_of_other_temperatures(demo, texts):
  pair = dataclasses.replace(demo, sampling=SamplingRule(1.0))
  found = measure(PairSubject(pair, command.batches_of(demo, texts, 32, 4), 24), [2], 1)
  assert found.gammas[1].identical is None
  assert found.alpha_by_draft_temperature[1.0] == pytest.approx(found.alpha)
  assert len(found.alpha_by_draft_temperature) == 7


def test_without_a_model_decoding_alone_is_measured(demo, texts):
  pair = dataclasses.replace(demo, drafter=DrafterConfig('copying'))
  found = measure(PairSubject(pair, command.batches_of(demo, texts, 32, 4), 24), [2], 1)
  assert found.costs is None and found.alpha is None and found.v == {}
  assert found.gammas[1].predicted_factor is None and found.gammas[1].identical == 4
  assert '| 2 |' in report.markdown(found, report.environment())


def test_the_command_writes_a_report(texts, tmp_path, capsys):
  (tmp_path / 'in.txt').write_text('\n'.join(texts) + '\n', encoding='utf-8')
  folder = tmp_path / 'out'
  assert command.main([
      DEMO, f'--input={tmp_path / "in.txt"}', f'--output_dir={folder}', '--gammas', '2',
      '--repeats', '1', '--num_inputs', '2',
      "--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 24}"]) == 0
  assert {path.name for path in folder.iterdir()} == {
      'report.json', 'report.md', 'speed.png', 'tokens_a_round.png', 'acceptance.png', 'trace.png'}
  content = json.loads((folder / 'report.json').read_text(encoding='utf-8'))
  assert content['num_inputs'] == 2 and content['environment']['versions']['jax']
  text = (folder / 'report.md').read_text(encoding='utf-8')
  assert '--gin.GAMMA=' in text and 'alpha 0.' in text
  assert 'gin.GAMMA' in capsys.readouterr().out


@pytest.mark.parametrize('arguments, named', [
    (['--gammas', '0'], '--gammas: expected numbers from 1 on, found [0]'),
    (['--repeats', '0'], '--repeats: expected at least 1, found 0'),
    (['--batch_size', '9'], '--input: expected at least --batch_size 9 texts, found 1'),
    (['--gin.GAMMA=-1'], 'gamma: expected at least 0, found -1'),
    (['--typo'], 'argument: expected a known one'),
])
def test_bad_settings_are_one_line_and_exit_code_2(arguments, named, tmp_path, capsys):
  (tmp_path / 'in.txt').write_text('restore: a\n', encoding='utf-8')
  code = command.main([
      DEMO, f'--input={tmp_path / "in.txt"}', f'--output_dir={tmp_path / "out"}', *arguments])
  error = capsys.readouterr().err
  assert code == 2 and error.startswith('error: ') and named in error and error.count('\n') == 1
  assert not (tmp_path / 'out').exists()


def test_the_command_reads_the_files_of_inference(tmp_path):
  """In a process that has imported nothing else."""
  (tmp_path / 'in.txt').write_text('restore: a\n', encoding='utf-8')
  done = subprocess.run(
      [sys.executable, '-m', 'speculative_t5x.measure', DEMO, f'--input={tmp_path / "in.txt"}',
       f'--output_dir={tmp_path / "out"}', '--batch_size', '9'],
      text=True, capture_output=True, check=False)
  assert done.returncode == 2
  assert done.stderr.splitlines()[-1] == (
      'error: --input: expected at least --batch_size 9 texts, found 1')


def test_a_gamma_of_0_is_refused(demo):
  with pytest.raises(UserError, match='gammas: expected numbers from 1 on'):
    measure(PairSubject(demo, [np.ones((1, 4), np.int32)], 8), [], 1)


def figures(gamma, **changes):
  values = {
      'gamma': gamma, 'tokens_a_round': 2.0, 'predicted_tokens_a_round': 2.0,
      'round_seconds': 0.1, 'predicted_round_seconds': 0.1, 'factor': 1.5, 'factor_low': 1.4,
      'factor_high': 1.6, 'predicted_factor': 1.5, 'formula_factor': 1.5,
      'accepted_at_position': [0.5] * gamma, 'identical': None, 'argument_bytes': 1,
      'temporary_bytes': 1,
  }
  return AtGamma(**values | changes)


def test_the_report_names_the_part_that_is_off():
  plain = figures(0, factor=1.0)
  found = Measurement(
      num_inputs=1, batch_size=1, repeats=1, temperature=0.0, alpha=0.7, accepted_by_depth=[0.7],
      c=0.1, v={1: 1.0}, costs=Costs({1: 1.0, 2: 1.0, 4: 1.2}, {1: 0.1, 2: 0.1}, 1.0, 0.1),
      gammas=[
          plain, figures(1), figures(2, factor=1.2, tokens_a_round=1.5),
          figures(3, factor=1.2, round_seconds=0.13)],
      alpha_by_draft_temperature={0.5: 0.75, 1.0: 0.7})
  remarks = report.remarks(found)
  assert len(remarks) == 2
  assert 'gamma 2' in remarks[0] and 'tokens a round are 0.75' in remarks[0]
  assert 'gamma 3' in remarks[1] and 'a round takes 1.30 of its parts' in remarks[1]
  assert report.gin_lines(found) == ['--gin.GAMMA=1', '--gin.DRAFT_TEMPERATURE=0.5']
  assert found.costs.round(1) == pytest.approx(1.1) and found.costs.v(3) == 1.2


def test_a_race_runs_all_in_turns():
  order, now = [], iter(range(100))
  ways = {name: (lambda name=name: order.append(name)) for name in 'abc'}
  found = timing.race(ways, 2, clock=lambda: next(now))
  assert order == [*'abc', *'abc', *'cba']
  assert found == {name: [1, 1] for name in 'abc'}


def test_the_papers_figures_are_drawn(tmp_path, capsys):
  assert analysis.main([f'--plots={tmp_path}']) == 0
  names = {'expected_tokens.png', 'best_gamma.png', 'speed_and_operations.png', 'trace.png'}
  assert {path.name for path in tmp_path.iterdir()} == names
  assert all(path.stat().st_size > 5000 for path in tmp_path.iterdir())
  assert len(capsys.readouterr().out.splitlines()) == 4
  (tmp_path / 'file').write_text('')
  assert analysis.main([f'--plots={tmp_path / "file"}']) == 2
  assert capsys.readouterr().err.startswith('error: plots: expected a folder to write to')


def test_a_course_is_drawn_call_by_call(tmp_path, monkeypatch):
  drawn = []
  original = plots.axes

  def axes(*args):
    found = original(*args)
    bars = found.broken_barh
    found.broken_barh = lambda spans, *rest, **kwargs: drawn.append(spans) or bars(
        spans, *rest, **kwargs)
    return found

  monkeypatch.setattr(plots, 'axes', axes)
  plots.trace([plots.Course('a', 2, [3, 1], 0.1, 1.5, 2.0)], tmp_path / 'trace.png')
  starts, lengths = zip(*drawn[0], strict=True)
  np.testing.assert_allclose(lengths, [2, 0.1, 0.1, 1.5, 0.1, 0.1, 1.5])
  np.testing.assert_allclose(starts, np.cumsum([0, *lengths[:-1]]))
