"""The demo: what a trace means, how it is shown, and a whole run with a tiny untrained pair."""

import dataclasses
import html.parser
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from speculative_t5x import analysis
from speculative_t5x.demo import __main__ as demo
from speculative_t5x.demo import measure, render, report, results, tasks
from speculative_t5x.demo.results import Kind, Sentence, StepTimes, TaskResult
from speculative_t5x.errors import UserError
from speculative_t5x.network import T5Config, Transformer
from speculative_t5x.pair import Model, Pair

PIECES = ['<pad>', '</s>', '<unk>', '▁the', '▁qu', 'ick', '▁fox', '▁<b>', '▁']
THE, QU, ICK, FOX, BOLD = range(3, 8)
EOS = 1

# One row: a rejection, all accepted, an accepted EOS with a draft behind it, no further round.
TRACE = (
    np.array([[THE, FOX, FOX], [QU, ICK, FOX], [BOLD, EOS, THE], [-1, -1, -1]]),
    np.array([1, 3, 2, -1]),
    np.array([QU, BOLD, -1, -1]),
)


def kinds(line):
  return [(token.kind.value, token.piece) for token in line.tokens]


def shown(trace=TRACE):
  rounds = results.rounds_of_row(*trace, PIECES)
  return Sentence('restore: the quick', 'the <b>', 'The <i>quick</i>', rounds)


def result(**changes):
  values = {
      'task': 'restoration', 'gamma': 3, 'temperature': 0.0, 'sentences': [shown()],
      'num_measured': 20, 'rounds': 100, 'emitted': 300, 'accepted': 240, 'rejected': 60,
      'identical': 20, 'plain_rate': 200.0, 'speculative_rate': 350.0,
      'steps': StepTimes(
          target=2e-3, target_verify=4e-3, draft=2e-4, round=5e-3, gamma=3),
  }
  return TaskResult(**values | changes)


def console(colour, width=100):
  return Console(
      file=io.StringIO(), width=width, force_terminal=colour, highlight=False,
      color_system='truecolor' if colour else None, legacy_windows=False, _environ={},
  )


def printed(colour, width=100):
  out = console(colour, width)
  render.show_legend(out)
  render.show_sentences(out, 'restoration', [shown()])
  render.show_table(out, result())
  return out.file.getvalue()


def test_rounds_say_what_became_of_each_token():
  first, second, third = shown().rounds
  assert kinds(first) == [
      ('accepted', '▁the'), ('rejected', '▁fox'), ('unjudged', '▁fox'), ('target', '▁qu')
  ]
  assert kinds(second) == [
      ('accepted', '▁qu'), ('accepted', 'ick'), ('accepted', '▁fox'), ('target', '▁<b>')
  ]
  assert kinds(third) == [('accepted', '▁<b>'), ('accepted', '</s>'), ('unjudged', '▁the')]
  assert [line.label for line in shown().rounds] == ['1/3', '3/3', '2/3']
  assert shown().summary == '8 tokens in 3 target runs: 2.67 a run'


def test_places_beyond_the_length_are_not_drafts():
  trace = np.array([[THE, QU, -1]]), np.array([2]), np.array([-1])
  (line,) = results.rounds_of_row(*trace, PIECES)
  assert kinds(line) == [('accepted', '▁the'), ('accepted', '▁qu')]
  assert line.label == '2/2'


def test_ids_without_a_piece_are_shown_by_number():
  (line,) = results.rounds_of_row(np.array([[99]]), np.array([1]), np.array([THE]), PIECES)
  assert line.tokens[0].piece == '<99>'


def test_figures_set_measurement_beside_formula():
  lines = {line.name: line for line in results.figures(result())}
  expected = analysis.expected_tokens(0.8, 3)
  assert lines['alpha'].measured == '0.800'
  assert lines['tokens a round'].measured == '3.00'
  assert lines['tokens a round'].formula == f'{expected:.2f}'
  assert lines['tokens a round'].note.startswith(f'{3 / expected - 1:+.1%}')
  assert lines['identical to plain greedy'].measured == '20/20'
  assert lines['factor'].measured == '1.75x'
  assert lines['factor'].formula == f'{expected / (3 * 0.1 + 2):.2f}x'
  assert lines['factor at v = 1'].formula == f'{expected / (3 * 0.1 + 1):.2f}x'


def test_sampled_outputs_are_not_compared():
  lines = {line.name: line for line in results.figures(result(identical=None, temperature=1.0))}
  assert lines['identical to plain greedy'].measured == 'sampled'


def test_colours_tell_kinds_apart():
  first = render.round_text(shown().rounds[0], colour=True)
  assert first.plain == ' the fox fox qu'
  styles = {first.plain[span.start : span.end]: span.style for span in first.spans[::3]}
  assert styles == {'the': render.STYLES[Kind.ACCEPTED], 'qu': render.STYLES[Kind.TARGET]}
  second = render.round_text(shown().rounds[1], colour=True)
  assert second.plain == ' qu·ick fox <b>'
  assert '\x1b[9;31mfox\x1b[0m' in printed(colour=True)


def test_marks_take_the_place_of_colours():
  text = printed(colour=False)
  assert '\x1b' not in text
  assert 'the [-fox-] (fox) {+qu+}' in text
  assert '{+token+}' in text
  assert 'quick fox {+<b>+}' in text


@pytest.mark.parametrize('colour', [True, False])
@pytest.mark.parametrize('width', [60, 100])
def test_lines_fit_the_width(colour, width):
  from rich.text import Text
  for line in printed(colour, width).splitlines():
    assert len(Text.from_ansi(line).plain.rstrip()) <= width


def test_table_lines_do_not_wrap_at_100_columns():
  out = console(False)
  render.show_table(out, result())
  filled = [line for line in out.file.getvalue().splitlines() if line.strip()]
  # Title, header, rule, and a line a figure.
  assert len(filled) == 3 + len(results.figures(result()))


class Page(html.parser.HTMLParser):
  """Checks nesting and gathers text and attributes."""

  def __init__(self, text):
    super().__init__()
    self.open, self.attributes, self.text = [], [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.attributes += attrs
    if tag != 'meta':
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text.append(data)


def test_page_is_whole_and_needs_nothing_else():
  text = report.page([result()], 'a <machine>')
  page = Page(text)
  assert not page.open
  assert not {name for name, _ in page.attributes} & {'src', 'href'}
  assert '@import' not in text and 'url(' not in text
  assert 'prefers-color-scheme: dark' in text
  content = ''.join(page.text)
  for expected in ('a <machine>', 'The <i>quick</i>', '1.75x', '20/20', shown().summary):
    assert expected in content
  assert '<b>' not in text and '<i>' not in text
  classes = [value.split()[1] for name, value in page.attributes
             if name == 'class' and value.startswith('token ')]
  # One of each in the legend.
  assert [classes.count(kind) for kind in Kind] == [7, 2, 3, 3]


class Vocabulary:
  """Words `w3` … as ids 3 …"""

  size, eos_id, pad_id = 40, EOS, 0

  def encode(self, text):
    return [3 + sum(word.encode()) % 37 for word in text.split()]

  def decode(self, ids):
    return ' '.join(f'w{i}' for i in ids)

  def pieces(self):
    return ['<pad>', '</s>', '<unk>', *(f'▁w{i}' for i in range(3, 40))]


@pytest.fixture(scope='module')
def pair():
  config = T5Config(
      vocab_size=40, emb_dim=16, num_heads=2, head_dim=8, num_encoder_layers=1,
      num_decoder_layers=2, mlp_dim=16, mlp_activations=('gelu', 'linear'),
  )
  tokens = jnp.ones((1, 1), jnp.int32)
  models = []
  for seed, layers in ((0, 2), (1, 1)):
    module = Transformer(dataclasses.replace(config, num_decoder_layers=layers))
    models.append(Model(module, module.init(jax.random.key(seed), tokens, tokens)['params']))
  return Pair(*models, Vocabulary(), gamma=3)


@pytest.fixture
def short(monkeypatch):
  monkeypatch.setattr(measure, 'LENGTHS', ((16, 12), (256, 12)))
  monkeypatch.setattr(measure, 'REPEATS', 1)


def test_rounds_spell_the_output(pair, short):
  example = measure.encode(pair, 'restore: open the file', None)
  for temperature in (0.0, 1.0):
    sentence = measure.trace_sentence(pair, example, gamma=3, temperature=temperature)
    spelt = [t.piece for line in sentence.rounds for t in line.tokens
             if t.kind in (Kind.ACCEPTED, Kind.TARGET) and t.piece != '</s>']
    assert ''.join(spelt).replace('▁', ' ').split() == sentence.outputs.split()


def test_medians_and_rates_come_from_the_clock(pair, short):
  # Speculative runs take 1, 2, 9 seconds and plain ones 4, 4, 40: medians 2 and 4.
  taken = iter([1, 4, 4, 2, 9, 40])
  now = [0.0]
  ticks = iter(range(12))

  def clock():
    if next(ticks) % 2:
      now[0] += next(taken)
    return now[0]

  example = measure.encode(pair, 'restore: open the file', None)
  found = measure.measure_task(
      pair, 'restoration', [example], [], StepTimes(1, 1, 1, 4, 3), gamma=3, temperature=0.0,
      repeats=3, clock=clock,
  )
  assert found.identical == 1
  assert found.factor == pytest.approx(2)
  assert found.plain_rate == pytest.approx(found.emitted / 4)
  assert found.rounds <= found.emitted <= 12


def test_a_wrong_output_is_counted(pair, short, monkeypatch):
  predict = Pair.predict

  def wrong(self, *args, gamma, **kwargs):
    found = predict(self, *args, gamma=gamma, **kwargs)
    return found.replace(sequences=found.sequences + 1) if gamma else found

  monkeypatch.setattr(Pair, 'predict', wrong)
  example = measure.encode(pair, 'restore: open the file', None)
  found = measure.measure_task(
      pair, 'restoration', [example], [], StepTimes(1, 1, 1, 4, 3), gamma=3, temperature=0.0,
      repeats=1,
  )
  assert found.identical == 0


def test_steps_are_timed(pair, short):
  examples = {'restoration': [
      measure.encode(pair, text, None) for text in ('restore: open', 'restore: open the file')]}
  example = measure.typical(examples)
  assert example.inputs == 'restore: open the file'
  steps = measure.measure_steps(pair, 3, example, repeats=2)
  assert steps.c > 0 and steps.v > 0 and steps.overhead > 0


def test_overhead_is_a_round_over_its_steps():
  steps = StepTimes(target=2.0, target_verify=4.0, draft=0.5, round=6.05, gamma=3)
  assert steps.overhead == pytest.approx(1.1)


def test_examples_are_spread_over_the_file():
  every = [(str(i), '') for i in range(500)]
  assert [source for source, _ in tasks.spread(every, 20)] == [str(i) for i in range(0, 500, 25)]
  assert tasks.spread(every[:3], 20) == every[:3]
  assert len(tasks.spread(every, 499)) == 499


def test_text_that_is_too_long_is_refused(pair, short):
  with pytest.raises(UserError, match=r'^input: expected at most 256 tokens, found 258$'):
    measure.encode(pair, 'a ' * 257, None)


def test_whole_run(pair, short, monkeypatch, capsys, tmp_path):
  monkeypatch.setattr(demo, 'load_demo_pair', lambda: pair)
  path = tmp_path / 'page.html'
  assert demo.main(['--num_sentences=2', '--num_shown=1', f'--html={path}']) == 0
  out = capsys.readouterr().out
  for task in ('restoration', 'translation'):
    assert f'{task}: 2 sentences, gamma 3, T = 0, batch size 1' in out
  assert out.count(' 2/2 ') >= 2
  assert 'Page orientation is horizontal.' in path.read_text(encoding='utf-8')


def test_own_text_is_brought_to_spoken_form():
  own = demo.texts_of(demo.parse(['--input', 'Open the File, please!']))
  assert own == {'restoration': [('restore: open the file please', None)]}
  own = demo.texts_of(demo.parse(['--input', 'Open the File!', '--task', 'translation']))
  assert own == {'translation': [('translate English to German: Open the File!', None)]}


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['--gamma=0'], '--gamma: expected at least 1, found 0'),
        (['--num_sentences=0'], '--num_sentences: expected at least 1, found 0'),
        (['--temperature=-1'], 'temperature: expected at least 0, found -1.0'),
        (['--input', '...'], "--input: expected a text with at least one word, found '...'"),
        (['--html=no/such/page.html'],
         '--html: expected a file in a folder that exists, found no/such/page.html'),
    ],
)
def test_bad_input_is_one_line_and_code_2(pair, monkeypatch, capsys, arguments, message):
  monkeypatch.setattr(demo, 'load_demo_pair', lambda: pair)
  assert demo.main(arguments) == 2
  assert capsys.readouterr().err == f'error: {message}\n'
