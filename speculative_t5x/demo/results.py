"""What the demo found: rounds token by token, and the figures of a task. No JAX here."""

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np

from speculative_t5x import analysis


class Kind(enum.StrEnum):
  """What became of a token in its round."""

  ACCEPTED = 'accepted'
  REJECTED = 'rejected'
  UNJUDGED = 'unjudged'
  TARGET = 'target'


# In the order of a round.
MEANINGS = {
    Kind.ACCEPTED: 'drafted and accepted',
    Kind.REJECTED: 'drafted and rejected by the target',
    Kind.UNJUDGED: 'drafted in vain: the round had ended before it',
    Kind.TARGET: 'corrected or added by the target',
}


@dataclasses.dataclass(frozen=True)
class Token:
  """One token of a round.

  Attributes:
    kind: what became of it.
    piece: its SentencePiece piece, '▁' for a space.
  """

  kind: Kind
  piece: str


@dataclasses.dataclass(frozen=True)
class Round:
  """One target run: accepted drafts, at most one rejected, those behind it, the target's token."""

  tokens: tuple[Token, ...]

  def count(self, kind: Kind) -> int:
    """Tokens of this kind."""
    return sum(token.kind == kind for token in self.tokens)

  @property
  def label(self) -> str:
    """Accepted of drafted tokens, as '3/7'."""
    drafted = len(self.tokens) - self.count(Kind.TARGET)
    return f'{self.count(Kind.ACCEPTED)}/{drafted}'


def rounds_of_row(
    draft_tokens: np.ndarray, accepted: np.ndarray, next_token: np.ndarray, pieces: Sequence[str]
) -> list[Round]:
  """Reads one row of a `statistics.Trace`.

  Args:
    draft_tokens: int `[R, gamma]`, -1 where the row could not grow.
    accepted: int `[R]`, drafts accepted and emitted, -1 where there was no round.
    next_token: int `[R]`, -1 where the text ended before it.
    pieces: the vocabulary's pieces by id.

  Returns:
    The rounds that took place.
  """
  rounds = []
  for drafts, num_accepted, following in zip(draft_tokens, accepted, next_token, strict=True):
    if num_accepted < 0:
      continue
    tokens = []
    for place, draft in enumerate(drafts[drafts >= 0]):
      kind = Kind.ACCEPTED if place < num_accepted else Kind.UNJUDGED
      # The target's token stands where a draft stood: that draft was refused.
      if place == num_accepted and following >= 0:
        kind = Kind.REJECTED
      tokens.append(Token(kind, _piece(pieces, draft)))
    if following >= 0:
      tokens.append(Token(Kind.TARGET, _piece(pieces, following)))
    rounds.append(Round(tuple(tokens)))
  return rounds


def _piece(pieces: Sequence[str], token: int) -> str:
  """The piece of an id; padding ids of the embedding have none."""
  return pieces[token] if token < len(pieces) else f'<{token}>'


@dataclasses.dataclass(frozen=True)
class Sentence:
  """One sentence, round by round.

  Attributes:
    inputs: text given to the encoder, prefix included.
    outputs: decoded text.
    reference: what a person wrote; None for the user's own text.
    rounds: how it was decoded.
  """

  inputs: str
  outputs: str
  reference: str | None
  rounds: Sequence[Round]

  @property
  def summary(self) -> str:
    """Tokens and rounds in a phrase."""
    tokens = sum(r.count(Kind.ACCEPTED) + r.count(Kind.TARGET) for r in self.rounds)
    rounds = len(self.rounds)
    return (
        f'{tokens} token{"s" * (tokens != 1)} in {rounds} target run{"s" * (rounds != 1)}: '
        f'{tokens / max(rounds, 1):.2f} a run'
    )


@dataclasses.dataclass(frozen=True)
class StepTimes:
  """Seconds of single decode steps at batch size 1, timed alone, and of a round in the loop.

  Attributes:
    target: the target on 1 token.
    target_verify: the target on gamma + 1 tokens.
    draft: the draft on 1 token.
    round: one round of the decoding loop.
    gamma: drafts a round.
  """

  target: float
  target_verify: float
  draft: float
  round: float
  gamma: int

  @property
  def overhead(self) -> float:
    """Time of a round over that of its gamma draft steps and its verification."""
    return self.round / (self.gamma * self.draft + self.target_verify)

  @property
  def c(self) -> float:
    """Time of a draft step in target steps."""
    return self.draft / self.target

  @property
  def v(self) -> float:
    """Time of a verification in target steps."""
    return self.target_verify / self.target


@dataclasses.dataclass(frozen=True)
class TaskResult:
  """Figures of one task, summed over its sentences.

  Attributes:
    task: its name.
    gamma: drafts a round.
    temperature: of both ways of decoding.
    sentences: those shown round by round.
    num_measured: sentences behind the figures.
    rounds: target runs of speculative decoding.
    emitted: tokens of speculative decoding, EOS included.
    accepted: drafts accepted.
    rejected: drafts judged and refused.
    identical: outputs equal to plain greedy decoding's; None when tokens were sampled.
    plain_rate: tokens a second of plain decoding, encoder included.
    speculative_rate: likewise, of speculative decoding.
    steps: times of single steps.
  """

  task: str
  gamma: int
  temperature: float
  sentences: Sequence[Sentence]
  num_measured: int
  rounds: int
  emitted: int
  accepted: int
  rejected: int
  identical: int | None
  plain_rate: float
  speculative_rate: float
  steps: StepTimes

  @property
  def alpha(self) -> float:
    """Accepted / judged drafts; 0 when none was judged."""
    return self.accepted / max(self.accepted + self.rejected, 1)

  @property
  def tokens_per_round(self) -> float:
    """Emitted tokens a target run."""
    return self.emitted / max(self.rounds, 1)

  @property
  def factor(self) -> float:
    """Tokens a second of speculative decoding over plain decoding."""
    return self.speculative_rate / self.plain_rate

  @property
  def title(self) -> str:
    """What was measured."""
    plural = 's' * (self.num_measured != 1)
    return (
        f'{self.task}: {self.num_measured} sentence{plural}, gamma {self.gamma}, '
        f'T = {self.temperature:g}, batch size 1'
    )


@dataclasses.dataclass(frozen=True)
class Figure:
  """One line of a task's table; texts, '' where there is nothing to say."""

  name: str
  measured: str
  formula: str = ''
  note: str = ''


def figures(result: TaskResult) -> list[Figure]:
  """The lines of a task's table, measured values beside the paper's formulas.

  Args:
    result: the task's.

  Returns:
    Lines from acceptance to speed.
  """
  alpha, gamma, steps = result.alpha, result.gamma, result.steps
  expected = analysis.expected_tokens(alpha, gamma)
  difference = result.tokens_per_round / expected - 1
  identical = 'sampled'
  if result.identical is not None:
    identical = f'{result.identical}/{result.num_measured}'
  return [
      Figure('alpha', f'{alpha:.3f}', '',
             f'{result.accepted} accepted of {result.accepted + result.rejected} judged drafts'),
      Figure('tokens a round', f'{result.tokens_per_round:.2f}', f'{expected:.2f}',
             f'{difference:+.1%}: beta varies, texts end mid-round'),
      Figure('identical to plain greedy', identical, '',
             'T > 0: not comparable' if result.identical is None else 'outputs, token for token'),
      Figure('plain, tokens/s', f'{result.plain_rate:.0f}', '', 'medians, encoder included'),
      Figure('speculative, tokens/s', f'{result.speculative_rate:.0f}', '',
             'same sentences, in turns with the plain runs'),
      Figure('factor', f'{result.factor:.2f}x',
             f'{analysis.walltime_improvement(alpha, gamma, steps.c, steps.v):.2f}x',
             f'at c = {steps.c:.3f}, v({gamma}) = {steps.v:.2f}'),
      Figure('factor at v = 1', '', f'{analysis.walltime_improvement(alpha, gamma, steps.c):.2f}x',
             'same alpha and c, verifying costs one step'),
      Figure('one step, ms', f'{steps.target * 1e3:.2f}', '',
             f'target on 1; {steps.target_verify * 1e3:.2f} on {gamma + 1} tokens; '
             f'draft {steps.draft * 1e3:.2f}'),
      Figure('one round, ms', f'{steps.round * 1e3:.2f}', '',
             f'{steps.overhead:.2f} of its {gamma} draft steps and its verification'),
  ]
