"""Rewards of token responses: what a reward function is given and returns, and the checks between."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llmgym.row_random import FloatArray, IntArray

StrArray = NDArray[np.str_]

STOP_REASONS = ("eos", "length")
STATUSES = ("scored", "unparsed", "timed_out", "error")
# One width for all, so that arrays of a subset of the words can be written into one another.
STOP_REASON_DTYPE = np.dtype("<U6")
STATUS_DTYPE = np.dtype("<U9")

REWARD_PREFIX = "reward/"  # of the components in an info


class RewardError(RuntimeError):
    """A reward function raised, or returned what is no reward; the message names row and task."""


@dataclass(frozen=True, eq=False)
class Responses:
    """N responses, as a reward function is given them. The arrays are its own to keep.

    | field | type | meaning |
    |---|---|---|
    | `task_ids` | int64 [N] | the prompt each answers |
    | `tokens` | int64 [N, T] | token ids, end-of-sequence included, then the padding id V |
    | `lengths` | int64 [N] | number of tokens, end-of-sequence included |
    | `stop_reasons` | str [N] | "eos", "length", or "" where the response is not at its end |
    """

    task_ids: IntArray
    tokens: IntArray
    lengths: IntArray
    stop_reasons: StrArray

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: IntArray) -> "Responses":
        """Those of some rows, as copies."""
        return Responses(
            self.task_ids[rows], self.tokens[rows], self.lengths[rows], self.stop_reasons[rows]
        )


@dataclass(frozen=True, eq=False)
class Scores:
    """What a reward function returns for N responses.

    | field | type | meaning |
    |---|---|---|
    | `total` | finite [N] | the reward |
    | `components` | name: finite [N] | parts of it to be logged; they need not add up to it |
    | `status` | str [N] or None | "scored", "unparsed", "timed_out" or "error"; None: all "scored" |

    A response that could not be judged has a total too (what it is worth is the task's decision)
    and says so in `status`, so that nothing unjudged passes as a reward of zero.
    """

    total: ArrayLike
    components: Mapping[str, ArrayLike] = field(default_factory=dict)
    status: Sequence[str] | StrArray | None = None


RewardFunction = Callable[[Responses], Scores]


@dataclass(frozen=True, eq=False)
class CheckedScores:
    """`Scores` after the checks: total float64 [N], components float64 [N], status str [N]."""

    total: FloatArray
    components: dict[str, FloatArray]
    status: StrArray


def judge(
    reward: RewardFunction,
    responses: Responses,
    rows: IntArray,
    text: Callable[[IntArray], str],
) -> CheckedScores:
    """Call a reward function and check what it returns.

    Args:
        reward: the function.
        responses: N of them.
        rows: int [N], the row numbers that errors name.
        text: makes token ids [T] readable, for errors.

    Raises:
        RewardError: the function raised (the row for which it does is sought by halving the batch,
            so it is called up to log2(N) + 1 times more); or it returned anything but `Scores`; or
            an array of another length, a number that is not finite, or an unknown status.
    """

    def describe(row: int) -> str:
        tokens = responses.tokens[row, : responses.lengths[row]]
        return f"row {rows[row]} (task {responses.task_ids[row]}, response {text(tokens)!r})"

    try:
        scores = reward(responses)
    except Exception as error:
        row = _failing_row(reward, responses)
        where = describe(row) if row is not None else _describe_batch(responses, rows)
        raise RewardError(f"reward: {type(error).__name__}: {error}; raised for {where}") from error
    if not isinstance(scores, Scores):
        raise RewardError(
            f"reward: got {type(scores).__name__} for {_describe_batch(responses, rows)}; "
            "allowed: Scores"
        )

    def numbers(name: str, values: ArrayLike) -> FloatArray:
        array = np.asarray(values)
        if array.shape != (len(responses),) or array.dtype.kind not in "biuf":
            raise RewardError(
                f"{name}: got shape {array.shape} of {array.dtype} for "
                f"{_describe_batch(responses, rows)}; allowed: ({len(responses)},) numbers"
            )
        if not np.isfinite(array).all():
            row = int((~np.isfinite(array)).argmax())
            raise RewardError(f"{name}: got {array[row]} for {describe(row)}; allowed: finite numbers")
        return array.astype(np.float64)

    total = numbers("reward", scores.total)
    components = {
        name: numbers(f"reward component {name!r}", values)
        for name, values in scores.components.items()
    }
    if scores.status is None:
        return CheckedScores(total, components, np.full(len(responses), "scored", STATUS_DTYPE))
    status = np.asarray(scores.status)
    if status.shape != (len(responses),):
        raise RewardError(
            f"reward status: got shape {status.shape} for {_describe_batch(responses, rows)}; "
            f"allowed: ({len(responses)},) strings"
        )
    unknown = ~np.isin(status, STATUSES)
    if unknown.any():
        row = int(unknown.argmax())
        choices = ", ".join(repr(choice) for choice in STATUSES)
        raise RewardError(
            f"reward status: got {status[row].item()!r} for {describe(row)}; allowed: {choices}"
        )
    return CheckedScores(total, components, status.astype(STATUS_DTYPE))


def _failing_row(reward: RewardFunction, responses: Responses) -> int | None:
    """A row for which the function raises by itself; None if there is none."""

    def raises(some: IntArray) -> bool:
        try:
            reward(responses.take(some))
        except Exception:
            return True
        return False

    rows = np.arange(len(responses))
    while len(rows) > 1:
        half = len(rows) // 2
        rows = rows[:half] if raises(rows[:half]) else rows[half:]
    return int(rows[0]) if raises(rows) else None


def _describe_batch(responses: Responses, rows: IntArray) -> str:
    """Rows and tasks of a batch in few words."""
    named = ", ".join(
        f"{row} (task {task})"
        for row, task in zip(rows[:5].tolist(), responses.task_ids[:5].tolist(), strict=True)
    )
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    return f"a batch of {len(rows)} responses, rows {named}{more}"
