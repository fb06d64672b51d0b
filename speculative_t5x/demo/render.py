"""The demo on a terminal; without colour, marks take its place."""

from collections.abc import Iterable

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from speculative_t5x.demo.results import MEANINGS, Kind, Round, Sentence, TaskResult, figures

STYLES = {
    Kind.ACCEPTED: 'green',
    Kind.REJECTED: 'red strike',
    Kind.UNJUDGED: 'bright_black',
    Kind.TARGET: 'bold bright_blue',
}

# As wdiff writes deletions and insertions.
MARKS = {
    Kind.ACCEPTED: ('', ''),
    Kind.REJECTED: ('[-', '-]'),
    Kind.UNJUDGED: ('(', ')'),
    Kind.TARGET: ('{+', '+}'),
}


def has_colour(console: Console) -> bool:
  """Whether kinds can be told apart by colour there."""
  return console.color_system is not None and not console.no_color


def legend(colour: bool) -> RenderableType:
  """What the colours, or the marks, mean."""
  lines = Table.grid(padding=(0, 2))
  for kind, meaning in MEANINGS.items():
    opening, closing = ('', '') if colour else MARKS[kind]
    lines.add_row(Text(f'{opening}token{closing}', STYLES[kind] if colour else ''), meaning)
  return Padding(lines, (0, 0, 0, 2))


def round_text(line: Round, colour: bool) -> Text:
  """The tokens of a round, a middle dot between tokens of one word."""
  text = Text()
  for index, token in enumerate(line.tokens):
    new_word = token.piece.startswith('▁')
    if new_word:
      text.append(' ')
    elif index and colour:
      text.append('·', 'bright_black')
    word = token.piece.removeprefix('▁').replace('▁', ' ')
    if colour:
      # A piece that is nothing but a space is shown, or nobody could see what became of it.
      text.append(word or '▁', STYLES[token.kind])
    else:
      opening, closing = MARKS[token.kind]
      text.append(f'{opening}{word or "▁"}{closing}')
  return text


def sentence(shown: Sentence, colour: bool) -> RenderableType:
  """A sentence: its texts, then one round a line."""
  texts = Table.grid(padding=(0, 2))
  texts.add_column(style='bold' if colour else '', no_wrap=True)
  texts.add_column(overflow='fold')
  texts.add_row('input', Text(shown.inputs))
  texts.add_row('output', Text(shown.outputs))
  if shown.reference is not None:
    texts.add_row('reference', Text(shown.reference))
  lines = Table.grid(padding=(0, 2))
  lines.add_column(justify='right', style='bright_black' if colour else '', no_wrap=True)
  lines.add_column(justify='right', style='bright_black' if colour else '', no_wrap=True)
  lines.add_column(overflow='fold')
  for number, line in enumerate(shown.rounds, 1):
    lines.add_row(str(number), line.label, round_text(line, colour))
  return Group(
      texts, Text(shown.summary, 'italic' if colour else ''), Padding(lines, (0, 0, 1, 2))
  )


def table(result: TaskResult) -> Table:
  """The task's figures beside the formulas."""
  lines = Table(title=result.title, title_justify='left', box=box.SIMPLE_HEAD, title_style='bold')
  lines.add_column('', no_wrap=True)
  lines.add_column('measured', justify='right', no_wrap=True)
  lines.add_column('formula', justify='right', no_wrap=True)
  lines.add_column('')
  for figure in figures(result):
    emphasis = 'bold' if figure.name == 'factor' else ''
    lines.add_row(figure.name, figure.measured, figure.formula, figure.note, style=emphasis)
  return lines


def show_sentences(console: Console, task: str, sentences: Iterable[Sentence]) -> None:
  """Prints sentences round by round under a heading."""
  console.rule(f'[bold]{task}[/bold]', align='left')
  for shown in sentences:
    console.print(sentence(shown, has_colour(console)))


def show_legend(console: Console) -> None:
  """Prints the legend."""
  console.print('One line a round: its number, accepted/drafted, and its tokens.', highlight=False)
  console.print(legend(has_colour(console)), highlight=False)


def show_table(console: Console, result: TaskResult) -> None:
  """Prints the task's table."""
  console.print(table(result), highlight=False)
