"""The demo as one HTML page that needs no other file."""

import html
import pathlib
from collections.abc import Sequence

from speculative_t5x.demo.results import MEANINGS, Figure, Round, Sentence, TaskResult, figures

STYLE = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --text: #1d1f23; --quiet: #5f6570; --line: #e3e4e8;
  --accepted: #14672f; --accepted-back: #dff3e4; --rejected: #a3221d; --rejected-back: #fbe3e1;
  --target: #1c4fb5; --target-back: #e0eafc; --unjudged: #6b717c; --unjudged-back: #eeeff2;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #16181c; --card: #1e2126; --text: #e6e8ec; --quiet: #9ba2ae; --line: #32363e;
    --accepted: #8fdba4; --accepted-back: #1b3a26; --rejected: #ff9d96; --rejected-back: #4a2220;
    --target: #a5c5ff; --target-back: #1f3358; --unjudged: #949ba7; --unjudged-back: #2a2e35;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 60rem;
  background: var(--page); color: var(--text); font: 16px/1.55 system-ui, sans-serif;
}
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.25rem; margin: 3rem 0 1rem; }
.quiet { color: var(--quiet); }
.legend { display: flex; flex-wrap: wrap; gap: .4rem 1.5rem; padding: 0; list-style: none; }
.card {
  margin: 0 0 1.25rem; padding: 1rem 1.25rem;
  background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
}
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0 0 .75rem; }
dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; }
ol { margin: .75rem 0 0; padding: 0; list-style: none; counter-reset: round; }
ol li {
  display: grid; grid-template-columns: 2rem 3rem 1fr; gap: .5rem; padding: .25rem 0;
  border-top: 1px solid var(--line); counter-increment: round;
}
ol li::before { content: counter(round); text-align: right; color: var(--quiet); }
ol li > :first-child { text-align: right; color: var(--quiet); font-variant-numeric: tabular-nums; }
.token {
  display: inline-block; margin: .1rem 0; padding: 0 .25rem; border-radius: .25rem;
  font: .9em/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
}
.word { margin-left: .5rem; }
.accepted { color: var(--accepted); background: var(--accepted-back); }
.rejected {
  color: var(--rejected); background: var(--rejected-back); text-decoration: line-through;
}
.unjudged { color: var(--unjudged); background: var(--unjudged-back); }
.target { color: var(--target); background: var(--target-back); font-weight: 600; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; }
caption { padding-bottom: .5rem; text-align: left; font-weight: 600; }
th, td { padding: .35rem .75rem .35rem 0; border-top: 1px solid var(--line); text-align: left; }
thead th { border: 0; color: var(--quiet); font-weight: 400; }
tbody th { font-weight: 400; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
tr.main th, tr.main .number { font-weight: 700; }
td:last-child { color: var(--quiet); }
"""


def page(results: Sequence[TaskResult], setting: str) -> str:
  """Writes the page.

  Args:
    results: one a task.
    setting: a line on what was run where.

  Returns:
    A complete HTML document.
  """
  legend = ''.join(
      f'<li><span class="token {kind}">token</span> {meaning}</li>'
      for kind, meaning in MEANINGS.items()
  )
  return (
      '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
      '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
      f'<title>Speculative decoding, round by round</title>\n<style>{STYLE}</style>\n'
      '</head>\n<body>\n<h1>Speculative decoding, round by round</h1>\n'
      f'<p class="quiet">{html.escape(setting)}</p>\n'
      '<p>A small draft model guesses several tokens; the target model checks them all in one run '
      'and adds one of its own. One line a round: its number, accepted/drafted, its tokens.</p>\n'
      f'<ul class="legend">{legend}</ul>\n{"".join(map(_task, results))}</body>\n</html>\n'
  )


def write(path: pathlib.Path, results: Sequence[TaskResult], setting: str) -> None:
  """Writes `page` to a file; the arguments are its."""
  path.write_text(page(results, setting), encoding='utf-8')


def _task(result: TaskResult) -> str:
  """A task: its table, then its sentences."""
  rows = ''.join(map(_figure, figures(result)))
  return (
      f'<h2>{html.escape(result.task.capitalize())}</h2>\n<div class="card scroll"><table>'
      f'<caption>{html.escape(result.title)}</caption>\n<thead><tr><th></th>'
      '<th class="number">measured</th><th class="number">formula</th><th></th></tr></thead>\n'
      f'<tbody>{rows}</tbody></table></div>\n{"".join(map(_sentence, result.sentences))}'
  )


def _figure(figure: Figure) -> str:
  """A line of the table."""
  main = ' class="main"' if figure.name == 'factor' else ''
  return (
      f'<tr{main}><th scope="row">{html.escape(figure.name)}</th>'
      f'<td class="number">{html.escape(figure.measured)}</td>'
      f'<td class="number">{html.escape(figure.formula)}</td>'
      f'<td>{html.escape(figure.note)}</td></tr>\n'
  )


def _sentence(sentence: Sentence) -> str:
  """A sentence: its texts, then its rounds."""
  texts = [('input', sentence.inputs), ('output', sentence.outputs)]
  if sentence.reference is not None:
    texts.append(('reference', sentence.reference))
  terms = ''.join(f'<dt>{name}</dt><dd>{html.escape(text)}</dd>' for name, text in texts)
  return (
      f'<section class="card"><dl>{terms}</dl><div class="quiet">'
      f'{html.escape(sentence.summary)}</div>\n<ol>{"".join(map(_round, sentence.rounds))}</ol>'
      '</section>\n'
  )


def _round(line: Round) -> str:
  """A round's tokens; a gap before each that begins a word."""
  tokens = []
  for token in line.tokens:
    begins = ' word' if token.piece.startswith('▁') else ''
    word = token.piece.removeprefix('▁').replace('▁', ' ') or '▁'
    tokens.append(
        f'<span class="token {token.kind}{begins}" title="{token.kind}">{html.escape(word)}</span>'
    )
  return f'<li><span>{line.label}</span><span>{"".join(tokens)}</span></li>\n'
