"""Models small enough to enumerate, with a cache that would betray a wrong rollback."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

EOS = 1


class Toy:
  """Next-token logits that depend on the last two tokens, read back from its cache.

  The cache holds the token written at each slot, so a stale, shifted or missing write changes the
  logits.
  """

  def __init__(self, vocab_size, seed, scale=1.5, table=None):
    rng = np.random.default_rng(seed)
    if table is None:
      table = rng.normal(size=(vocab_size, vocab_size, vocab_size)) * scale
    self.table = np.asarray(table, np.float32)
    self.vocab_size = vocab_size

  def cache(self, batch, slots):
    """An empty cache, filled with what must never be read."""
    return jnp.full((batch, slots), self.vocab_size - 1, jnp.int32)

  def __call__(self, tokens, positions, cache):
    """The decode step."""
    write = jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))
    cache = write(cache, tokens, positions, 0)
    index = positions[:, None] + jnp.arange(tokens.shape[1])
    read = lambda at: jnp.take_along_axis(cache, jnp.maximum(at, 0), axis=1)
    before = jnp.where(index > 0, read(index - 1), 0)
    return jnp.asarray(self.table)[before, read(index)], cache

  def exact(self, length, rule, row=0):
    """Probability of every output of `length` tokens, 0 behind EOS: {tuple: probability}."""
    temperature = np.asarray(rule.temperature)
    if temperature.ndim:
      rule = type(rule)(float(temperature[row]), rule.topk, rule.topp)
    laws = np.asarray(
        jax.vmap(rule.distribution)(jnp.asarray(self.table).reshape(-1, 1, self.vocab_size))
    ).reshape(self.table.shape).astype(np.float64)
    found = {}
    for sequence in itertools.product(range(self.vocab_size), repeat=length):
      probability, before, last = 1.0, 0, 0
      for place, token in enumerate(sequence):
        probability *= laws[before, last, token]
        before, last = last, token
        if token == EOS:
          sequence = sequence[: place + 1] + (0,) * (length - place - 1)
          break
      # Sequences that differ behind EOS only are one output.
      found[sequence] = probability
    return found


def step_of_each(tables, tokens, positions, cache):
  """The decode step of one toy an example.

  Args:
    tables: float `[examples, V, V, V]`, each as `Toy.table`.
    tokens: int32 `[B, M]`.
    positions: int32 `[B]`.
    cache: `tokens` `[B, slots]` as `Toy`'s cache, and the `example` `[B]` of each row.
  """
  write = jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))
  cache = {**cache, 'tokens': write(cache['tokens'], tokens, positions, 0)}
  index = positions[:, None] + jnp.arange(tokens.shape[1])
  read = lambda at: jnp.take_along_axis(cache['tokens'], jnp.maximum(at, 0), axis=1)
  before = jnp.where(index > 0, read(index - 1), 0)
  return jnp.asarray(tables)[cache['example'][:, None], before, read(index)], cache


def chi_square(samples, exact):
  """Pearson's statistic and its degrees of freedom; cells of expectation below 5 are pooled.

  Args:
    samples: int array `[n, L]`.
    exact: {tuple: probability}.

  Returns:
    (statistic, degrees of freedom). The statistic is infinite when a sample has probability 0.
  """
  outcomes, counts = np.unique(samples, axis=0, return_counts=True)
  observed = {tuple(int(t) for t in o): int(n) for o, n in zip(outcomes, counts, strict=True)}
  if any(exact.get(o, 0.0) == 0.0 for o in observed):
    return np.inf, 1
  cells, pooled = [], np.zeros(2)
  for outcome, probability in exact.items():
    cell = np.array([observed.get(outcome, 0), probability * len(samples)])
    if cell[1] >= 5:
      cells.append(cell)
    else:
      pooled += cell
  if pooled[1] > 0:
    cells.append(pooled)
  cells = np.array(cells)
  return float(np.sum((cells[:, 0] - cells[:, 1]) ** 2 / cells[:, 1])), max(len(cells) - 1, 1)
