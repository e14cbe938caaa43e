"""An n-gram language model as a table: the reference policy of tasks with a known optimum."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from llmgym.checks import check_count
from llmgym.row_random import FloatArray, IntArray

TOLERANCE = 1e-6  # by which the probabilities of a context may miss 1


@dataclass(frozen=True, eq=False)
class NGram:
    """The next token depends on the last `order` - 1 tokens (Jurafsky and Martin, chapter 3).

    A context is one number: the last order - 1 tokens as digits to the base V + 1, the latest the
    last digit. The digit V stands for "before the first token", so C = (V + 1) ** (order - 1).

    | field | type | meaning |
    |---|---|---|
    | `log_probs` | float64 [C, V] | log-probability of each token after each context, in nats |
    | `order` | int | n; 1 is a unigram model, 2 a bigram model |

    The table is a read-only copy of what is given.

    Raises:
        ValueError: a table of another shape, with a value that is not finite (a KL to this policy
            must be), or a context whose probabilities do not sum to 1 within 1e-6.
    """

    log_probs: FloatArray
    order: int

    def __post_init__(self) -> None:
        check_count("order", self.order)
        table = np.array(self.log_probs, dtype=np.float64)
        vocab_size = table.shape[-1] if table.ndim == 2 else 0
        n_contexts = (vocab_size + 1) ** (self.order - 1)
        if table.shape != (n_contexts, vocab_size) or vocab_size == 0:
            raise ValueError(
                f"log_probs: got shape {table.shape}; "
                f"allowed: [C, V] with C = (V + 1) ** (order - 1), here order {self.order}"
            )
        if not np.isfinite(table).all():
            context, token = np.argwhere(~np.isfinite(table))[0]
            raise ValueError(
                f"log_probs: context {context}, token {token} has {table[context, token]}; "
                "allowed: finite numbers"
            )
        sums = np.exp(table).sum(axis=1)
        if (np.abs(sums - 1.0) > TOLERANCE).any():
            context = int(np.abs(sums - 1.0).argmax())
            raise ValueError(
                f"log_probs: the probabilities of context {context} sum to {sums[context]}; "
                f"allowed: 1 within {TOLERANCE:g}"
            )
        table.flags.writeable = False
        object.__setattr__(self, "log_probs", table)

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor, because copied and unpickled arrays would be writeable.
        return NGram, (self.log_probs, self.order)

    @classmethod
    def from_logits(cls, logits: ArrayLike, order: int, eos_id: int, eos_prob: float) -> "NGram":
        """Softmax of logits [C, V], with end-of-sequence at the same probability in every context.

        Lengths are then geometric with mean 1 / eos_prob, but for the limit.

        Raises:
            ValueError: `eos_prob` is not between 0 and 1, or as for the class.
        """
        if not 0.0 < eos_prob < 1.0:
            raise ValueError(f"eos_prob: got {eos_prob!r}; allowed: between 0 and 1, both excluded")
        table = np.array(logits, dtype=np.float64)
        table[:, eos_id] = -np.inf
        table -= table.max(axis=1, keepdims=True)
        table -= np.log(np.exp(table).sum(axis=1, keepdims=True))
        table += np.log1p(-eos_prob)
        table[:, eos_id] = np.log(eos_prob)
        return cls(table, order)

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.log_probs.shape[1])

    def contexts(self, tokens: IntArray, lengths: IntArray) -> IntArray:
        """The contexts [N] behind the first `lengths` [N] of `tokens` [N, L]."""
        rows = np.arange(len(lengths))
        contexts = np.zeros(len(lengths), dtype=np.int64)
        for back in range(self.order - 1, 0, -1):
            position = lengths - back
            digit = np.where(position >= 0, tokens[rows, np.maximum(position, 0)], self.vocab_size)
            contexts = contexts * (self.vocab_size + 1) + digit
        return contexts

    def next_contexts(self, contexts: IntArray, tokens: IntArray) -> IntArray:
        """The contexts after one more token each; the shapes broadcast."""
        return (contexts * (self.vocab_size + 1) + tokens) % len(self.log_probs)

    def log_prob(self, tokens: IntArray, lengths: IntArray, actions: IntArray) -> FloatArray:
        """Log-probability [N] of `actions` [N] after the first `lengths` of `tokens` [N, L]."""
        return np.asarray(self.log_probs[self.contexts(tokens, lengths), actions])

    def sample(
        self, contexts: IntArray, limits: IntArray, eos_id: int, rng: np.random.Generator
    ) -> tuple[IntArray, IntArray]:
        """Responses drawn from the model, until end-of-sequence or the limit.

        Args:
            contexts: [N], those of the prompts.
            limits: [N], the most tokens each may have, at least 1.
            eos_id: token that ends a response.
            rng: one uniform is drawn per row and position.

        Returns:
            tokens int64 [N, max(limits)], padded with V, and lengths int64 [N].
        """
        # Cumulated probabilities may end just below 1: the last column is taken whatever u is.
        cumulated = np.exp(self.log_probs).cumsum(axis=1)[:, :-1]
        tokens = np.full((len(contexts), int(limits.max(initial=1))), self.vocab_size)
        lengths = np.zeros(len(contexts), dtype=np.int64)
        rows, contexts = np.arange(len(contexts)), contexts.copy()
        for position in range(tokens.shape[1]):
            drawn = (cumulated[contexts[rows]] <= rng.random(len(rows))[:, None]).sum(axis=1)
            tokens[rows, position] = drawn
            lengths[rows] = position + 1
            contexts[rows] = self.next_contexts(contexts[rows], drawn)
            rows = rows[(drawn != eos_id) & (limits[rows] > position + 1)]
        return tokens, lengths
