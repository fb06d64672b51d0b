"""Speculative decoding as one compiled loop, one round an iteration.

A round drafts `gamma` tokens, runs the target once on the last known token and the drafts, accepts
a prefix of them by `verification` and adds one token of the target's own (Leviathan et al. 2023).
Rows of a batch advance at their own pace. `gamma = 0` is plain decoding.

`B` is the number of rows (batch × num_decodes), `L` the longest decoded length, `V` the
vocabulary.
"""

from typing import Any

import flax
import jax
import jax.numpy as jnp

from speculative_t5x import sampling, verification
from speculative_t5x.drafters import Drafter
from speculative_t5x.errors import UserError
from speculative_t5x.rounds import Proposal, fill_prompt, judge
from speculative_t5x.rows import read_rows, write_rows
from speculative_t5x.statistics import Outcome, Statistics, Trace
from speculative_t5x.step import TokensToLogits, run_leading


@flax.struct.dataclass
class DecodeResult:
  """What decoding returns; `N` is num_decodes, ordered by rising score as in T5X.

  Attributes:
    sequences: int32 `[batch, N, L]`, prompt included, 0 behind EOS.
    scores: float32 `[batch, N]`, sum of the target's log-probabilities of the emitted tokens.
    statistics: arrays `[batch, N, ...]`.
    trace: arrays `[batch, N, L, ...]`, or None.
    lenience: 1 when the sequences follow the target exactly.
  """

  sequences: jax.Array
  scores: jax.Array
  statistics: Statistics
  trace: Trace | None = None
  lenience: float = flax.struct.field(default=1.0, pytree_node=False)


@flax.struct.dataclass
class LoopState:
  """The loop's state.

  Attributes:
    round: int32 scalar, rounds so far.
    sequences: int32 `[B, L + gamma + 2]`, start token, tokens, and room for one late write.
    positions: int32 `[B]`, index of each row's last known token.
    ended: bool `[B]`.
    scores: float32 `[B]`.
    cache: the target's cache.
    draft_state: the drafter's state.
    statistics: see `Statistics`.
    trace: see `Trace`; None when it is not asked for.
  """

  round: jax.Array
  sequences: jax.Array
  positions: jax.Array
  ended: jax.Array
  scores: jax.Array
  cache: Any
  draft_state: Any
  statistics: Statistics
  trace: Trace | None


def check_gamma(gamma: int) -> None:
  """Refuses a gamma below 0.

  Raises:
    UserError: it is.
  """
  if gamma < 0:
    raise UserError(f'gamma: expected at least 0, found {gamma}')


def cache_slots(max_decode_len: int, gamma: int) -> int:
  """Slots that a cache needs so that no late write is clipped.

  Args:
    max_decode_len: `L`.
    gamma: drafts a round.

  Returns:
    `L + gamma + 1`.
  """
  return max_decode_len + gamma + 1


def expand_rows(tree: Any, num_decodes: int, axis: int = 0) -> Any:
  """Repeats every row of `tree` for each of its decodes.

  Args:
    tree: arrays with a batch at `axis`.
    num_decodes: decodes an example.
    axis: where the batch is; layers of a scan stand before it.

  Returns:
    The tree, its batch axes `num_decodes` times as long.
  """
  if num_decodes == 1:
    return tree
  return jax.tree.map(lambda x: jnp.repeat(x, num_decodes, axis=axis), tree)


def row_keys(decode_rng: jax.Array, example_index: jax.Array, num_decodes: int) -> jax.Array:
  """One key a row, which depends on the example and the decode but not on the batch.

  Args:
    decode_rng: a key.
    example_index: int32 `[batch]`, the number of each example in the whole job.
    num_decodes: decodes an example.

  Returns:
    keys `[batch * num_decodes]`.
  """
  rows = jnp.repeat(example_index, num_decodes)
  decodes = jnp.tile(jnp.arange(num_decodes), example_index.shape[0])
  fold = jax.vmap(jax.random.fold_in)
  return fold(fold(jnp.repeat(decode_rng[None], rows.shape[0], axis=0), rows), decodes)


def speculative_decode(
    inputs: jax.Array,
    cache: Any,
    tokens_to_logits: TokensToLogits,
    eos_id: int,
    *,
    gamma: int,
    drafter: Drafter | None = None,
    draft_state: Any = None,
    rule: sampling.SamplingRule = sampling.SamplingRule(),  # noqa: B008 - frozen
    verify: verification.VerificationRule = verification.VerificationRule(),  # noqa: B008 - frozen
    num_decodes: int = 1,
    decode_rng: jax.Array | None = None,
    example_index: jax.Array | None = None,
    initial_index: jax.Array | None = None,
    max_decode_steps: int | None = None,
    rescale_log_probs: bool = True,
    trace: bool = False,
) -> DecodeResult:
  """Decodes a batch; see T5X's `temperature_sample`, whose names and meanings these are.

  Args:
    inputs: int32 `[batch, L]`, prompts shifted right: index 0 is the start token and ignored,
      other entries that are not 0 are kept in the output, 0 is decoded.
    cache: the target's cache, `cache_slots(L, gamma)` long, of batch * num_decodes rows; see
      `expand_rows`.
    tokens_to_logits: the target's decode step.
    eos_id: the id that ends a row.
    gamma: drafts a round; static.
    drafter: proposes them; not needed when `gamma` is 0.
    draft_state: the drafter's first state, of batch * num_decodes rows.
    rule: the target's sampling rule. A temperature array has one entry an example.
    verify: how drafts are judged. Lenience applies to greedy decoding of the whole batch and to
      sampled rows; a greedy row among sampled ones is exact.
    num_decodes: independent outputs an example.
    decode_rng: a key; `jax.random.key(0)` when None.
    example_index: int32 `[batch]`, numbers that the examples' randomness is derived from, so that
      an example gets the same output in any batch; 0, 1, … when None.
    initial_index: int32 `[batch]`, index of the token to start from in each example, the caches
      being filled before it; None starts from the start token.
    max_decode_steps: tokens to decode behind the prompt at most; None is up to `L`.
    rescale_log_probs: whether scores are of the adjusted distribution (greedy scores are then 0)
      or of the model's own.
    trace: whether to record every round.

  Returns:
    A `DecodeResult`.

  Raises:
    UserError: `gamma` or `num_decodes` is out of range, or a drafter is missing.
  """
  sampling.check_static(max_decode_steps=max_decode_steps)
  check_gamma(gamma)
  if gamma and drafter is None:
    raise UserError(f'drafter: expected one for gamma {gamma}, found None')
  if num_decodes < 1:
    raise UserError(f'num_decodes: expected at least 1, found {num_decodes}')
  inputs = jnp.asarray(inputs)
  batch, max_decode_len = inputs.shape
  if max_decode_steps is not None and not 0 < max_decode_steps <= max_decode_len:
    raise UserError(
        f'max_decode_steps: expected 1 to {max_decode_len} (the length), found {max_decode_steps}'
    )
  expand = lambda tree: expand_rows(tree, num_decodes)
  if not isinstance(rule.temperature, (int, float)) and jnp.ndim(rule.temperature) == 1:
    rule = sampling.SamplingRule(expand(jnp.asarray(rule.temperature)), rule.topk, rule.topp)
  if decode_rng is None:
    decode_rng = jax.random.key(0)
  if example_index is None:
    example_index = jnp.arange(batch)
  keys = row_keys(decode_rng, example_index, num_decodes)
  num_uniforms = gamma + 1 + (drafter.num_uniforms(gamma) if gamma else 0)

  # Prompt tokens by place, behind the start token; places beyond L are never kept.
  prompts = jnp.pad(expand(inputs).at[:, 0].set(0), ((0, 0), (0, gamma + 2)))
  limits = jnp.full(batch * num_decodes, max_decode_len, jnp.int32)
  if max_decode_steps is not None:
    limits = jnp.minimum(limits, jnp.sum(prompts != 0, axis=1) + max_decode_steps)

  def cond(state: LoopState) -> jax.Array:
    return ~jnp.all(state.ended)

  def body(state: LoopState) -> LoopState:
    forced = read_rows(prompts, state.positions + 1, gamma + 1)
    if rule.is_greedy and (drafter is None or drafter.is_deterministic):
      uniforms = jnp.zeros((forced.shape[0], num_uniforms))
    else:
      uniforms = jax.vmap(
          lambda key: jax.random.uniform(jax.random.fold_in(key, state.round), (num_uniforms,))
      )(keys)

    proposal = Proposal(forced[:, :gamma], None, state.draft_state)
    if gamma:
      proposal = fill_prompt(drafter.propose(
          state.draft_state, state.sequences, state.positions, forced[:, :gamma],
          uniforms[:, : -gamma - 1], ~state.ended), forced[:, :gamma])

    tokens = jnp.concatenate(
        [read_rows(state.sequences, state.positions, 1), proposal.tokens], axis=1)
    if proposal.lengths is None:
      logits, cache = tokens_to_logits(tokens, state.positions, state.cache)
    else:
      longest = jnp.max(jnp.where(state.ended, 0, proposal.lengths))
      logits, cache = run_leading(
          tokens_to_logits, tokens, longest + 1, state.positions, state.cache)
    verdict = judge(logits, proposal, forced, uniforms[:, -gamma - 1 :], rule, verify)
    accepted, emitted = verdict.accepted, verdict.tokens

    places = jnp.arange(gamma + 1)
    kept = jnp.minimum(accepted + 1, limits - state.positions)
    is_end = (emitted == eos_id) & (forced == 0) & (places < kept[:, None])
    found_end = jnp.any(is_end, axis=1)
    kept = jnp.where(found_end, jnp.argmax(is_end, axis=1) + 1, kept)
    kept = jnp.where(state.ended, 0, kept)
    is_kept = places < kept[:, None]

    written = jnp.where(
        is_kept, emitted, read_rows(state.sequences, state.positions + 1, gamma + 1))
    sequences = write_rows(state.sequences, written, state.positions + 1)
    positions = state.positions + kept
    is_new = is_kept & (forced == 0)
    scores = state.scores
    if not (rule.is_greedy and rescale_log_probs):
      log_probs = _log_probs(logits, verdict.law, emitted, rescale_log_probs)
      scores = scores + jnp.sum(jnp.where(is_new, log_probs, 0.0), axis=1)

    outcome = Outcome(
        draft_tokens=proposal.tokens, lengths=proposal.lengths, next_tokens=verdict.next_tokens,
        accepted=accepted, kept=kept, is_new=is_new, is_forced=forced != 0,
        could_grow=state.positions[:, None] + 1 + places <= limits[:, None],
    )
    return LoopState(
        round=state.round + 1, sequences=sequences, positions=positions,
        ended=state.ended | (found_end & (kept > 0)) | (positions >= limits), scores=scores,
        cache=cache, draft_state=proposal.state, statistics=state.statistics.add(outcome),
        trace=None if state.trace is None else state.trace.add(outcome, state.round),
    )

  rows = batch * num_decodes
  positions = jnp.zeros(rows, jnp.int32)
  if initial_index is not None:
    positions = expand(jnp.asarray(initial_index, jnp.int32))
  initial = LoopState(
      round=jnp.int32(0), sequences=prompts, positions=positions, ended=positions >= limits,
      scores=jnp.zeros(rows), cache=cache, draft_state=draft_state,
      statistics=Statistics.zeros(rows, gamma),
      trace=Trace.empty(rows, max_decode_len, gamma) if trace else None,
  )
  final = jax.lax.while_loop(cond, body, initial)

  unflatten = lambda x: x.reshape(batch, num_decodes, *x.shape[1:])
  scores = unflatten(final.scores)
  order = jnp.argsort(scores, axis=1)
  arrange = lambda x: jax.vmap(lambda row, index: row[index])(unflatten(x), order)
  return DecodeResult(
      sequences=arrange(final.sequences[:, 1 : max_decode_len + 1]),
      scores=jnp.take_along_axis(scores, order, axis=1),
      statistics=jax.tree.map(arrange, final.statistics),
      trace=jax.tree.map(arrange, final.trace), lenience=verify.lenience,
  )


def _log_probs(logits, p, tokens, rescale_log_probs):
  """Log-probabilities `[B, M]` of `tokens`, of `p` or of the model's own distribution."""
  index = tokens[..., None]
  if rescale_log_probs:
    return jnp.log(jnp.take_along_axis(p, index, axis=-1)[..., 0])
  chosen = jnp.take_along_axis(logits, index, axis=-1)[..., 0]
  return chosen - jax.nn.logsumexp(logits, axis=-1)
