"""Token tasks: prompts, a vocabulary, a reward for the response, and perhaps a reference policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from llmgym.checks import as_integers, as_task_ids, check_count, check_name
from llmgym.row_random import FloatArray, IntArray
from llmgym.token_rewards import (
    STOP_REASON_DTYPE,
    CheckedScores,
    Responses,
    RewardFunction,
    judge,
)

REWARD_AT = ("end", "token")


class Reference(Protocol):
    """A policy over tokens whose log-probabilities are known; `llmgym.ngram.NGram` is one."""

    def log_prob(self, tokens: IntArray, lengths: IntArray, actions: IntArray) -> FloatArray:
        """Log-probability [N] of `actions` [N] after the first `lengths` [N] of `tokens` [N, L]."""


class Alphabet:
    """A vocabulary with one character for each token but some: text to ids and back.

    Args:
        symbols: what each token looks like, [V]; the ids are the places in it.

    Raises:
        ValueError: two tokens look the same.
    """

    def __init__(self, symbols: Sequence[str]) -> None:
        self.symbols = tuple(symbols)
        self._ids = {symbol: token for token, symbol in enumerate(self.symbols)}
        if len(self._ids) < len(self.symbols):
            raise ValueError(f"symbols: got {list(symbols)}; allowed: each only once")

    def __call__(self, ids: ArrayLike) -> str:
        """The text of token ids [T]."""
        return "".join(self.symbols[token] for token in np.asarray(ids).tolist())

    def encode(self, text: str) -> IntArray:
        """The token ids of a text, a character each.

        Raises:
            ValueError: a character that no token has.
        """
        try:
            return np.array([self._ids[character] for character in text], dtype=np.int64)
        except KeyError as error:
            check_name("text", error.args[0], self.symbols)
            raise


@dataclass(frozen=True, eq=False)
class TokenTask:
    """What `TokenGeneration-v0` generates for: the task of one environment.

    | field | type | meaning |
    |---|---|---|
    | `prompts` | P arrays of token ids | the prompts, each of at least one token; number k is task id k |
    | `vocab_size` | int | V; token ids are 0 to V - 1, and `pad` = V is none of them |
    | `eos_id` | int | the action that ends a response (in a prompt it is a token like any other) |
    | `max_new_tokens` | int | the most tokens of a response, end-of-sequence included |
    | `reward` | function | judges a batch of responses: `Responses` to `Scores` |
    | `reward_at` | str | "end": the total is paid with the last token. "token": each token is paid what it adds to the total, see below |
    | `reference` | `Reference` or None | policy whose log-probs are reported, such as an `NGram` |
    | `decode` | function or None | text of token ids [T], such as an `Alphabet`; None shows the ids |
    | `context_length` | int or None | the most tokens of prompt and response together |
    | `min_sequence_length` | int | L is at least this, so that tasks for one policy can have one observation space |

    **Rewards for each token.** With ``reward_at="token"`` the reward function is called at every
    step with the response so far, and the step is paid the growth of its total (from 0 for the
    empty response). A process reward is thus given as its running sum; and since the payments add
    up to the total of the whole response, the objective is the same as with "end", only the credit
    comes sooner.

    **Limits.** Prompt k is answered with at most ``limits[k]`` = min(max_new_tokens,
    context_length - length of the prompt) tokens. A prompt that leaves no room for a token is an
    error, and never cut.

    Derived fields: `limits` int64 [P]; `prompt_lengths` int64 [P]; `sequence_length` L, the
    longest prompt with its longest response, and at least `min_sequence_length`.

    Raises:
        ValueError: a field out of range, with the prompt and the token that are wrong.
        TypeError: token ids that are no integers; a reward that cannot be called.
    """  # noqa: E501 (a table row cannot be wrapped)

    prompts: Sequence[ArrayLike]
    vocab_size: int
    eos_id: int
    max_new_tokens: int
    reward: RewardFunction
    reward_at: str = "end"
    reference: Reference | None = None
    decode: Callable[[IntArray], str] | None = None
    context_length: int | None = None
    min_sequence_length: int = 1
    prompt_lengths: IntArray = field(init=False)
    limits: IntArray = field(init=False)

    def __post_init__(self) -> None:
        size = check_count("vocab_size", self.vocab_size)
        check_count("max_new_tokens", self.max_new_tokens)
        check_count("min_sequence_length", self.min_sequence_length)
        check_name("reward_at", self.reward_at, REWARD_AT)
        if not 0 <= self.eos_id < size:
            raise ValueError(f"eos_id: got {self.eos_id!r}; allowed: 0 to {size - 1}")
        if not callable(self.reward):
            raise TypeError(f"reward: got {type(self.reward).__name__}; allowed: a function")
        for name in ("reward", "reference"):
            theirs = getattr(getattr(self, name), "vocab_size", size)
            if theirs != size:
                raise ValueError(f"{name}: made for a vocabulary of {theirs}; the task has {size}")
        prompts = tuple(
            _as_prompt(number, prompt, size) for number, prompt in enumerate(self.prompts)
        )
        if not prompts:
            raise ValueError("prompts: got none; allowed: at least one")
        object.__setattr__(self, "prompts", prompts)
        # Found once: an environment reads them at every step.
        lengths = np.array([len(prompt) for prompt in prompts])
        limits = np.full(len(prompts), self.max_new_tokens)
        if self.context_length is not None:
            limits = np.minimum(limits, check_count("context_length", self.context_length) - lengths)
            if (limits < 1).any():
                number = int((limits < 1).argmax())
                raise ValueError(
                    f"prompts: prompt {number} has {lengths[number]} tokens and leaves no room for a "
                    f"response; allowed: at most {self.context_length - 1}, one less than "
                    f"context_length"
                )
        lengths.flags.writeable = limits.flags.writeable = False
        object.__setattr__(self, "prompt_lengths", lengths)
        object.__setattr__(self, "limits", limits)

    @property
    def pad(self) -> int:
        """The id behind the last token of a sequence: V, which no token has."""
        return self.vocab_size

    @property
    def num_tasks(self) -> int:
        """P."""
        return len(self.prompts)

    @property
    def sequence_length(self) -> int:
        """L: tokens of the longest prompt with its longest response, or `min_sequence_length` if more."""
        return max(int((self.prompt_lengths + self.limits).max()), self.min_sequence_length)

    def text(self, ids: IntArray) -> str:
        """The text of token ids [T], without a last end-of-sequence."""
        if len(ids) and ids[-1] == self.eos_id:
            ids = ids[:-1]
        if self.decode is not None:
            return self.decode(ids)
        return " ".join(str(token) for token in ids.tolist())

    def responses(self, task_ids: ArrayLike, tokens: ArrayLike, lengths: ArrayLike) -> Responses:
        """N responses as a reward function takes them.

        Args:
            task_ids: int [N], or one for all.
            tokens: int [N, T]; whatever stands behind a response's length is ignored.
            lengths: int [N], end-of-sequence included.

        Raises:
            ValueError, TypeError: shapes that do not fit, a task, token or length out of range, or
                tokens behind an end-of-sequence, with the row.
        """
        tokens, lengths = np.asarray(tokens), np.asarray(lengths)
        if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
            raise ValueError(
                f"tokens, lengths: got shapes {tokens.shape}, {lengths.shape}; allowed: [N, T], [N]"
            )
        rows = np.arange(len(lengths))
        task_ids = as_task_ids(task_ids, rows, len(rows), self.num_tasks)
        lengths = as_integers("lengths", lengths, rows, 1, tokens.shape[1])
        too_long = lengths > self.limits[task_ids]
        if too_long.any():
            row = int(too_long.argmax())
            raise ValueError(
                f"lengths: row {row} (task {task_ids[row]}) has {lengths[row]}; "
                f"allowed: at most {self.limits[task_ids[row]]}"
            )
        real = np.arange(tokens.shape[1]) < lengths[:, None]
        token_rows = np.nonzero(real)[0]
        padded = np.full(tokens.shape, self.pad)
        padded[real] = as_integers("tokens", tokens[real], token_rows, 0, self.vocab_size - 1)
        is_eos = padded == self.eos_id
        early = is_eos.any(axis=1) & (is_eos.argmax(axis=1) < lengths - 1)
        if early.any():
            row = int(early.argmax())
            raise ValueError(
                f"tokens: row {row} has the end-of-sequence id {self.eos_id} at place "
                f"{is_eos[row].argmax()} of {lengths[row]}; allowed: only the last place"
            )
        reasons = np.zeros(len(rows), dtype=STOP_REASON_DTYPE)
        reasons[lengths == self.limits[task_ids]] = "length"
        reasons[is_eos.any(axis=1)] = "eos"
        return Responses(task_ids, padded, lengths, reasons)

    def judge(self, responses: Responses, rows: IntArray | None = None) -> CheckedScores:
        """Total, components and status of responses; errors name `rows` [N] (None: 0 to N - 1).

        Raises:
            RewardError: the reward function failed, see `llmgym.token_rewards.judge`.
        """
        rows = np.arange(len(responses)) if rows is None else rows
        return judge(self.reward, responses, rows, self.text)

    def score(self, responses: Responses) -> FloatArray:
        """The total reward float64 [N] of responses, as from `responses`; raises as `judge`."""
        return self.judge(responses).total


def _as_prompt(number: int, prompt: ArrayLike, vocab_size: int) -> IntArray:
    ids = np.array(prompt)
    if ids.ndim != 1 or len(ids) == 0:
        raise ValueError(f"prompts: prompt {number} has shape {ids.shape}; allowed: [length >= 1]")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"prompts: prompt {number} has {ids.dtype} values; allowed: integers")
    wrong = (ids < 0) | (ids >= vocab_size)
    if wrong.any():
        place = int(wrong.argmax())
        raise ValueError(
            f"prompts: prompt {number} has {ids[place]} at place {place}; allowed: 0 to {vocab_size - 1}"
        )
    ids = ids.astype(np.int64)
    ids.flags.writeable = False
    return ids
