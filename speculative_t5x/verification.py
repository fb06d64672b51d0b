"""Which drafts are accepted, and what follows them: one round of Algorithm 1 as pure functions.

`B` is the number of rows, `V` the vocabulary. Randomness comes in as uniforms in [0, 1), each used
once, so that the rules can be enumerated.
"""

import dataclasses

import jax
import jax.numpy as jnp

from speculative_t5x.errors import UserError


@dataclasses.dataclass(frozen=True)
class VerificationRule:
  """How drafts are judged.

  Attributes:
    name: 'token_wise' (Leviathan et al. 2023), 'block' (Sun et al. 2024), or None for the better
      one, which is 'block' unless there is lenience. Both are exact; greedy decoding judges token
      by token either way.
    lenience: l in (0, 1], appendix A.5 of the paper. 1 is exact. Below, a draft x is accepted when
      r * l * q(x) < p(x), or, when decoding is greedy, when p(x) >= l * max p: faster and lossy,
      with no token's probability above p / l. The residual is the exact rule's, max(0, p - q): the
      mass that is left for it, 1 - sum min(q, p / l), is at most its own, so that a token's
      probability is at most min(q, p / l) + max(0, p - q) <= p / l.

  Raises:
    UserError: there is no such rule, lenience is out of range, or a block is to be judged with it.
  """

  name: str | None = None
  lenience: float = 1.0

  def __post_init__(self):
    if self.name not in (None, *RULES):
      raise UserError(f'verification: expected one of {", ".join(RULES)}, found {self.name}')
    if not 0.0 < self.lenience <= 1.0:
      raise UserError(f'lenience: expected a number in (0, 1], found {self.lenience}')
    if self.lenience < 1.0 and self.name == 'block':
      raise UserError(
          'lenience: expected 1 with block verification (token_wise takes it), found '
          f'{self.lenience}'
      )

  def sampled(
      self, draft_tokens: jax.Array, q: jax.Array, p: jax.Array, uniforms: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Judges drafts that were sampled; see `token_wise`."""
    if self.lenience < 1.0:
      return token_wise(draft_tokens, q, p, uniforms, self.lenience)
    return RULES[self.name or 'block'](draft_tokens, q, p, uniforms)


def token_wise(
    draft_tokens: jax.Array, q: jax.Array, p: jax.Array, uniforms: jax.Array,
    lenience: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
  """Accepts drafts one by one (Leviathan et al. 2023, Algorithm 1 and appendix A.5).

  Args:
    draft_tokens: int32 `[B, gamma]`, drawn from `q`.
    q: float32 `[B, gamma, V]`, the law each draft was drawn from; zeros where none was drawn, and
      at every place behind it.
    p: float32 `[B, gamma + 1, V]`, the target's law at each draft and after the last.
    uniforms: float32 `[B, gamma]`.
    lenience: see `VerificationRule`.

  Returns:
    accepted: int32 `[B]`, the number of leading drafts accepted.
    next_law: float32 `[B, V]`, the law of the target's token after them, not normalised.
  """
  q_drafted = _at(q, draft_tokens)
  p_drafted = _at(p[:, :-1], draft_tokens)
  # Strict: a token with p = 0 is refused at r = 0 too. Where nothing was drawn nothing is accepted.
  accepted = leading_count((uniforms * lenience * q_drafted < p_drafted) & (q_drafted > 0))
  return accepted, residual(at_position(p, accepted), at_position(pad_q(q), accepted))


def block(
    draft_tokens: jax.Array, q: jax.Array, p: jax.Array, uniforms: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Judges the drafts of a round together (Sun et al. 2024, arXiv 2403.10444, Algorithm 2).

  The law of what is emitted is the target's, as with `token_wise`, and the expected number of
  accepted drafts is never below its. Drafting may stop early at prefixes of the drafter's choice:
  where q is zero, all of the target's mass is in excess.

  Args:
    draft_tokens: int32 `[B, gamma]`, drawn from `q`.
    q: float32 `[B, gamma, V]`, as for `token_wise`.
    p: float32 `[B, gamma + 1, V]`.
    uniforms: float32 `[B, gamma]`.

  Returns:
    accepted int32 `[B]` and next_law float32 `[B, V]`, as `token_wise`.
  """
  gamma = draft_tokens.shape[1]
  q_drafted = _at(q, draft_tokens)
  ratios = jnp.where(
      q_drafted > 0, _at(p[:, :-1], draft_tokens) / jnp.maximum(q_drafted, 1e-38), 0.0)
  # [B, gamma + 1]: how likely each prefix of the drafts is to be kept, as far as it goes.
  kept = [jnp.ones(draft_tokens.shape[0])]
  for place in range(gamma):
    kept.append(jnp.minimum(1.0, kept[-1] * ratios[:, place]))
  kept = jnp.stack(kept, axis=1)
  # [B, gamma + 1, V] and its mass: what the target has beyond the drafts that go on from a prefix.
  excess = jnp.maximum(kept[..., None] * p - pad_q(q), 0.0)
  mass = jnp.sum(excess[:, :-1], axis=-1)
  stop = mass + 1.0 - kept[:, :-1]
  # Where a prefix is certain and nothing is left beyond its drafts, a longer one is kept for sure.
  thresholds = jnp.where(stop > 0, mass / jnp.maximum(stop, 1e-38), 1.0)[:, 1:]
  thresholds = jnp.concatenate([thresholds, kept[:, -1:]], axis=1)[:, :gamma]
  # The longest prefix whose uniform allows it.
  lengths = jnp.arange(1, gamma + 1, dtype=jnp.int32)
  accepted = jnp.max(jnp.where(uniforms < thresholds, lengths, 0), axis=1, initial=0)
  # At gamma the excess is the target's own law, for nothing was drafted there.
  next_law = at_position(excess, accepted)
  has_mass = jnp.sum(next_law, axis=-1, keepdims=True) > 0
  return accepted, jnp.where(has_mass, next_law, at_position(p, accepted))


RULES = {'token_wise': token_wise, 'block': block}


def greedy(
    draft_tokens: jax.Array, target_tokens: jax.Array, is_lenient: jax.Array | None = None,
    is_drafted: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """The rules for one-hot p and q, given by their tokens.

  Args:
    draft_tokens: int32 `[B, gamma]`.
    target_tokens: int32 `[B, gamma + 1]`, the target's argmax at each draft and after the last.
    is_lenient: bool `[B, gamma]`, drafts to accept though they are not the argmax, see
      `near_argmax`; None is none.
    is_drafted: bool `[B, gamma]`, places that hold a draft; None is all.

  Returns:
    accepted: int32 `[B]`, the number of leading drafts accepted.
    next_tokens: int32 `[B]`, the target's token after them.
  """
  is_right = draft_tokens == target_tokens[:, :-1]
  if is_lenient is not None:
    is_right |= is_lenient
  if is_drafted is not None:
    is_right &= is_drafted
  accepted = leading_count(is_right)
  return accepted, at_position(target_tokens, accepted)


def near_argmax(logits: jax.Array, tokens: jax.Array, lenience: float) -> jax.Array:
  """Whether p(x) >= lenience * max p (appendix A.5).

  Args:
    logits: float32 `[B, M, V]`, the target's.
    tokens: int32 `[B, M]`.
    lenience: in (0, 1].

  Returns:
    bool `[B, M]`.
  """
  return _at(logits, tokens) >= jnp.max(logits, axis=-1) + jnp.log(lenience)


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
  """max(0, p - q), unnormalised; p itself where that has no mass (p = q up to rounding).

  Args:
    p: float32 `[B, V]`.
    q: float32 `[B, V]`; zeros where no draft was judged.

  Returns:
    float32 `[B, V]`.
  """
  difference = jnp.maximum(p - q, 0.0)
  return jnp.where(jnp.sum(difference, -1, keepdims=True) > 0, difference, p)


def leading_count(flags: jax.Array) -> jax.Array:
  """How many of the flags `[B, gamma]` are true before the first false; int32 `[B]`."""
  return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def pad_q(q: jax.Array) -> jax.Array:
  """`q` `[B, gamma, V]` with a zero distribution after the last draft: `[B, gamma + 1, V]`."""
  return jnp.pad(q, ((0, 0), (0, 1), (0, 0)))


def at_position(values: jax.Array, index: jax.Array) -> jax.Array:
  """Picks `values[b, index[b]]` of `[B, M, ...]`; `index` is int32 `[B]`."""
  index = index.reshape(index.shape + (1,) * (values.ndim - 1))
  return jnp.take_along_axis(values, index, axis=1)[:, 0]


def _at(probabilities: jax.Array, tokens: jax.Array) -> jax.Array:
  """Probability of each of `tokens` `[B, M]` under `[B, M, V]`."""
  return jnp.take_along_axis(probabilities, tokens[..., None], axis=-1)[..., 0]
