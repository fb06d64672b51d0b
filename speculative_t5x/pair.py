"""A target, a draft and the settings to decode with: what both commands and notebooks hold.

`B` is the batch, `S` the input length, `L` the output length, `N` the decodes an example.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np

from speculative_t5x import (
    beams,
    checkpoints,
    decoding,
    families,
    ngram,
    paths,
    vocabularies,
)
from speculative_t5x.beam_tree import BeamModel, BeamRows, rows_of_calls
from speculative_t5x.drafters import DrafterConfig
from speculative_t5x.drafters.ngram import NgramTable
from speculative_t5x.errors import UserError
from speculative_t5x.network import (
    DecoderOnly,
    T5Config,
    Transformer,
    network_of,
    tokens_to_logits,
)
from speculative_t5x.sampling import SamplingRule
from speculative_t5x.verification import VerificationRule

# Not `…network.T5Config`: T5X's gin files and command lines call theirs `network.T5Config`.
gin.external_configurable(T5Config, module='speculative_t5x')
gin.external_configurable(DrafterConfig, module='speculative_t5x')


@dataclasses.dataclass(frozen=True)
class Model:
  """A network and its parameters.

  Attributes:
    module: the network.
    params: its parameter tree.
  """

  module: Transformer | DecoderOnly
  params: Mapping[str, Any]

  @property
  def num_parameters(self) -> int:
    """How many numbers `params` holds."""
    return sum(x.size for x in jax.tree.leaves(self.params))


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
  """A target with its draft, ready to decode.

  Either may be decoder-only: it goes on from the inputs, and outputs are the continuations alone.

  Attributes:
    target: the model whose distribution the outputs follow.
    draft: the model that guesses; None allows gamma 0 and a drafter that is no model.
    vocabulary: of both models.
    gamma: drafts a round.
    sampling: the rule for target and draft.
    draft_sampling: the drafter's own rule; None is the target's.
    verification: how drafts are judged.
    drafter: what guesses.
    ngram_table: of a drafter that has one.
    num_decodes: outputs an input.
    beam_alpha: of the brevity penalty of a beam search as wide as `num_decodes`, see
      `beams.speculative_beam_search`; None samples, or is greedy.
    draft_width: of the draft's beam; None is twice `num_decodes`.
    max_decode_steps: tokens an output at most; None is up to the length asked for.
    rescale_log_probs: whether scores are of the adjusted distribution, see `speculative_decode`.

  Raises:
    UserError: gamma is out of range or has no draft, or an embedding is smaller than the
      vocabulary.
  """

  target: Model
  draft: Model | None
  vocabulary: vocabularies.Vocabulary
  gamma: int = 4
  sampling: SamplingRule = SamplingRule()  # noqa: RUF009 - frozen
  draft_sampling: SamplingRule | None = None
  verification: VerificationRule = VerificationRule()  # noqa: RUF009 - frozen
  drafter: DrafterConfig = DrafterConfig()  # noqa: RUF009 - frozen
  ngram_table: NgramTable | None = None
  num_decodes: int = 1
  beam_alpha: float | None = None
  draft_width: int | None = None
  max_decode_steps: int | None = None
  rescale_log_probs: bool = False

  def __post_init__(self):
    self._check_gamma(self.gamma)
    for name, model in (('target', self.target), ('draft', self.draft)):
      if model is not None and model.module.config.vocab_size < self.vocabulary.size:
        raise UserError(
            f"{name} vocab_size: expected at least the vocabulary's {self.vocabulary.size}, "
            f'found {model.module.config.vocab_size}'
        )

  def _check_gamma(self, gamma: int) -> None:
    """Refuses a gamma below 0, and one above 0 without a draft."""
    decoding.check_gamma(gamma)
    if gamma:
      self.drafter.check_parts(self.draft, self.ngram_table)
    if self.beam_alpha is not None:
      self._check_beams(gamma)

  def _check_beams(self, gamma: int) -> None:
    """Refuses what a beam search has no use for."""
    rows_of_calls(self.num_decodes, gamma, self.draft_width)
    for name, expected, found in (
        ('drafter', DrafterConfig(), self.drafter),
        ('lenience', 1.0, self.verification.lenience),
        ('max_decode_steps', None, self.max_decode_steps),
    ):
      if found != expected:
        raise UserError(f'{name}: expected {expected} for a beam search, found {found}')

  def predict(
      self, inputs: np.ndarray, *, max_length: int, seed: int = 0, gamma: int | None = None,
      temperature: float | np.ndarray | None = None, prompts: np.ndarray | None = None,
      example_index: np.ndarray | None = None, trace: bool = False,
  ) -> decoding.DecodeResult:
    """Decodes a batch in one compiled program.

    Args:
      inputs: int32 `[B, S]`, padded with 0: an encoder's, or what a decoder-only model goes on
        from.
      max_length: `L`.
      seed: of the randomness; the same seed gives an example the same output in any batch.
      gamma: drafts a round; None is the pair's.
      temperature: of this call, a float or one a row `[B]`; None is the pair's.
      prompts: int32 `[B, P]`, `P <= L`, tokens that each output begins with, padded with 0.
      example_index: int32 `[B]`, number of each example in the whole job; 0, 1, … when None.
      trace: whether to record every round.

    Returns:
      A `DecodeResult` with leading axes `[B, N]`.

    Raises:
      UserError: a value is out of range.
    """
    gamma = self.gamma if gamma is None else gamma
    self._check_gamma(gamma)
    rule = self.sampling
    if temperature is not None:
      rule = dataclasses.replace(rule, temperature=temperature)
    per_row = not isinstance(rule.temperature, (int, float))
    decoder_inputs = np.zeros((inputs.shape[0], max_length), np.int32)
    if prompts is not None:
      if prompts.shape[1] >= max_length:
        raise UserError(
            f'prompts: expected less than max_length {max_length} tokens, found {prompts.shape[1]}'
        )
      decoder_inputs[:, 1 : 1 + prompts.shape[1]] = prompts
    if example_index is None:
      example_index = np.arange(inputs.shape[0])
    program = self.program(
        gamma, dataclasses.replace(rule, temperature=1.0) if per_row else rule, per_row, trace
    )
    return program(
        self.params, jnp.asarray(inputs, jnp.int32), decoder_inputs,
        jnp.asarray(example_index, jnp.int32),
        jax.random.key(seed), jnp.asarray(rule.temperature, jnp.float32) if per_row else None,
    )

  @property
  def params(self) -> dict[str, Any]:
    """What programs read: the parameters `target` and `draft`, and `ngram_table`."""
    return {
        'target': self.target.params, 'draft': self.draft and self.draft.params,
        'ngram_table': self.ngram_table,
    }

  def plain(self, inputs: np.ndarray, **kwargs: Any) -> decoding.DecodeResult:
    """`predict` without a draft: one target run a token."""
    return self.predict(inputs, gamma=0, **kwargs)

  @functools.cached_property
  def program(self):
    """`_compile`, remembered for as long as the pair lives."""
    return functools.cache(self._compile)

  def _compile(
      self, gamma: int, rule: SamplingRule, per_row: bool = False, trace: bool = False
  ):
    """The compiled decoding function of these static choices; jit adds the shapes.

    Caches live and die inside it: no argument of it is one that a result could be written over.
    """

    @jax.jit
    def program(params, inputs, decoder_inputs, example_index, rng, temperature):
      return self.decode_from(
          self.start(params, inputs, decoder_inputs.shape[1], gamma), params, decoder_inputs,
          gamma=gamma, rule=rule, temperature=temperature if per_row else None, trace=trace,
          example_index=example_index, decode_rng=rng,
      )

    return program

  def start(
      self, params: Mapping[str, Any], inputs: jax.Array, max_length: int, gamma: int
  ) -> dict[str, Any]:
    """Encodes a batch, or reads it into the cache, with both models; pure.

    Args:
      params: as `self.params`.
      inputs: int32 `[B, S]`.
      max_length: `L`.
      gamma: drafts a round; the draft encodes nothing when it is 0.

    Returns:
      The target's cache and the drafter's state as `target` and `draft`, of `B * N` rows, or as
      many as a beam search needs; the state is None for gamma 0.
    """
    rows = BeamRows(self.num_decodes, self.num_decodes)
    if self.beam_alpha is not None:
      rows = rows_of_calls(self.num_decodes, gamma, self.draft_width)

    def encode(name, extra_slots=0):
      slots = decoding.cache_slots(max_length, gamma + extra_slots)
      cache = getattr(self, name).module.apply(
          {'params': params[name]}, inputs, slots, method='init_cache')
      return decoding.expand_rows(cache, getattr(rows, name))

    state = None
    if gamma:
      has_model = self.drafter.has_model
      state = self.drafter.state(
          encode('draft', self.drafter.extra_slots) if has_model else None,
          decoding.expand_rows(inputs, rows.draft))
    return {'target': encode('target'), 'draft': state}

  def decode_from(
      self, caches: Mapping[str, Any], params: Mapping[str, Any], decoder_inputs: jax.Array, *,
      gamma: int, rule: SamplingRule, temperature: jax.Array | None = None, **kwargs: Any,
  ) -> decoding.DecodeResult:
    """The decoding loop behind `start`; pure.

    Args:
      caches: from `start`, for the same `gamma`.
      params: as `self.params`.
      decoder_inputs: int32 `[B, L]`, prompts shifted right.
      gamma: drafts a round.
      rule: the target's sampling rule; its temperature is a float.
      temperature: float32 `[B]` in place of it, or None.
      **kwargs: of `decoding.speculative_decode`.

    Returns:
      A `DecodeResult`.
    """
    step = lambda name: tokens_to_logits(
        getattr(self, name).module, params[name], self.vocabulary.size)
    if self.beam_alpha is not None:
      model = lambda name: BeamModel(step(name), caches[name], _exchange_rows)
      return beams.speculative_beam_search(
          decoder_inputs, model('target'), self.vocabulary.eos_id, gamma=gamma,
          draft=model('draft') if gamma else None, draft_width=self.draft_width,
          num_decodes=self.num_decodes, alpha=self.beam_alpha)
    # The loop repeats the target's temperatures for its rows; a drafter has rows alone.
    draft_rule = rule
    if temperature is not None:
      rule = dataclasses.replace(rule, temperature=temperature)
      draft_rule = dataclasses.replace(
          rule, temperature=jnp.repeat(temperature, self.num_decodes))
    drafter = None
    if gamma:
      drafter = self.drafter.make(
          self.draft_sampling or draft_rule, table=params['ngram_table'],
          tokens_to_logits=step('draft') if self.drafter.has_model else None)
    return decoding.speculative_decode(
        decoder_inputs, caches['target'], step('target'), self.vocabulary.eos_id, gamma=gamma,
        drafter=drafter, draft_state=caches['draft'], rule=rule, verify=self.verification,
        num_decodes=self.num_decodes,
        max_decode_steps=self.max_decode_steps, rescale_log_probs=self.rescale_log_probs,
        **kwargs,
    )


def _exchange_rows(cache, rows):
  """`beam_tree.take_rows` of a network's cache; the encoder's keys and values stay."""
  take = lambda layers: tuple(x[rows] for x in layers)
  return cache.replace(self_keys=take(cache.self_keys), self_values=take(cache.self_values))


def load_model(
    path: str, config: T5Config | None = None, dtype: str = 'float32',
    vocabulary: vocabularies.Vocabulary | None = None,
    shardings: Callable[[Transformer], Any] | None = None,
) -> Model:
  """Reads a checkpoint.

  Args:
    path: a T5X, Orbax or Hugging Face checkpoint.
    config: the network; None is what the checkpoint says, with activations in `dtype`.
    dtype: dtype of the parameters in memory.
    vocabulary: whose ids the model was trained with; None is not compared.
    shardings: gives the tree of `jax.sharding.Sharding` to put the network's parameters in; asked
      before they are read. None is the default device.

  Returns:
    The model.

  Raises:
    UserError: the checkpoint cannot be read, or contradicts `config` or `vocabulary`.
  """
  found = families.describe(paths.resolve(path))
  if config is None:
    config = dataclasses.replace(found.config, dtype=dtype)
  families.check_config(found, config)
  if vocabulary is not None:
    families.check_vocabulary(found, vocabulary)
  module = network_of(config)
  tokens = jnp.ones((1, 1), jnp.int32)
  like = jax.eval_shape(module.init, jax.random.key(0), tokens, tokens)['params']
  where = None if shardings is None else shardings(module)
  return Model(module, checkpoints.read_params(
      found.path, found.arrays, like=like, dtype=dtype, sharding=where, to_device=True))


@gin.configurable
def load_pair(
    checkpoint_path: str = gin.REQUIRED,
    draft_checkpoint_path: str | None = None,
    target: T5Config | None = None,
    draft: T5Config | None = None,
    vocabulary_path: str = gin.REQUIRED,
    extra_ids: int = 0,
    draft_vocabulary_path: str | None = None,
    gamma: int = 4,
    temperature: float = 0.0,
    topk: int = 0,
    topp: float = 0.0,
    verification: str | None = None,
    lenience: float = 1.0,
    drafter: DrafterConfig = DrafterConfig(),  # noqa: B008 - frozen
    ngram_path: str | None = None,
    draft_temperature: float | None = None,
    draft_topk: int | None = None,
    draft_topp: float | None = None,
    num_decodes: int = 1,
    beam_alpha: float | None = None,
    draft_width: int | None = None,
    max_decode_steps: int | None = None,
    dtype: str = 'float32',
    target_shardings: Callable[[Transformer], Any] | None = None,
) -> Pair:
  """Loads a pair; everything cheap is checked before weights are read.

  Args:
    checkpoint_path: the target's checkpoint.
    draft_checkpoint_path: the draft's checkpoint; None needs `gamma` 0.
    target: the target's network; None is what its checkpoint says.
    draft: the draft's network, likewise.
    vocabulary_path: SentencePiece model of the target.
    extra_ids: sentinel ids behind its pieces.
    draft_vocabulary_path: SentencePiece model of the draft; None is the target's.
    gamma: drafts a round.
    temperature: 0 is greedy.
    topk: keep the k largest logits; 0 keeps all.
    topp: keep the smallest set with at least this mass; 0 keeps all.
    verification: 'block', 'token_wise', or None for the better one.
    lenience: in (0, 1]; below 1 is lossy, see `VerificationRule`.
    drafter: what guesses; the draft's checkpoint is read only if it has a model.
    ngram_path: n-gram table of a drafter that has one, from `python -m speculative_t5x.ngram`.
    draft_temperature: of the drafts; None is the target's.
    draft_topk: likewise.
    draft_topp: likewise.
    num_decodes: outputs an input.
    beam_alpha: of a beam search as wide as `num_decodes`; None samples.
    draft_width: of the draft's beam; None is twice `num_decodes`.
    max_decode_steps: tokens an output at most.
    dtype: dtype of the parameters in memory.
    target_shardings: where the target's parameters lie, see `load_model`.

  Paths may also name files of the installed package, see `paths.resolve`.

  Returns:
    The pair.

  Raises:
    UserError: a setting is out of range, vocabularies differ, or a checkpoint cannot be read.
  """
  rule = SamplingRule(temperature, topk, topp)
  verify = VerificationRule(verification, lenience)
  decoding.check_gamma(gamma)
  draft_rule = rule.override(draft_temperature, draft_topk, draft_topp)
  needs_draft = gamma > 0 and drafter.has_model
  if needs_draft and draft_checkpoint_path is None:
    raise UserError(f'DRAFT_CHECKPOINT_PATH: expected one for gamma {gamma}, found None')
  vocabulary = vocabularies.load_vocabulary(paths.resolve(vocabulary_path), extra_ids=extra_ids)
  if draft_vocabulary_path is not None:
    vocabularies.check_same(
        vocabulary,
        vocabularies.load_vocabulary(paths.resolve(draft_vocabulary_path), extra_ids=extra_ids),
    )
  table = None
  if gamma and drafter.has_table:
    if ngram_path is None:
      raise UserError(
          f'NGRAM_PATH: expected a table for the drafter {drafter.name!r}, found None')
    table = jax.tree.map(jnp.asarray, ngram.load(ngram_path, vocabulary))
  draft_model = None
  if needs_draft:
    draft_model = load_model(draft_checkpoint_path, draft, dtype, vocabulary)
  return Pair(
      target=load_model(checkpoint_path, target, dtype, vocabulary, target_shardings),
      draft=draft_model,
      vocabulary=vocabulary,
      gamma=gamma, sampling=rule, verification=verify,
      draft_sampling=None if draft_rule == rule else draft_rule,
      drafter=drafter, ngram_table=table,
      num_decodes=num_decodes, beam_alpha=beam_alpha, draft_width=draft_width,
      max_decode_steps=max_decode_steps,
  )
