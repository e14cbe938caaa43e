"""The batched transition of `TokenGeneration-v0`."""

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from llmgym.row_random import FloatArray, IntArray, RowRandom
from llmgym.syllable_task import syllable_task
from llmgym.token_rewards import (
    REWARD_PREFIX,
    STOP_REASON_DTYPE,
    CheckedScores,
    Responses,
    RewardError,
    StrArray,
)
from llmgym.token_tasks import TokenTask
from llmgym.transition import BoolArray, RowInfo

Mask = NDArray[np.int8]


class TokenGenerationTransition:
    """A `BatchedTransition`: each row appends a token to its prompt until the response ends.

    Raises:
        TypeError: `task` is no TokenTask.
    """

    def __init__(self, num_rows: int, task: TokenTask | None) -> None:
        task = syllable_task() if task is None else task
        if not isinstance(task, TokenTask):
            raise TypeError(f"task: got {type(task).__name__}; allowed: TokenTask or None")
        self.task = task
        shape = (num_rows, task.sequence_length)
        self.observation_space = Box(0, task.pad, shape[1:], np.int64)
        self.action_space = Discrete(task.vocab_size)
        self.num_tasks = task.num_tasks
        self._prompts = np.full((task.num_tasks, int(task.prompt_lengths.max())), task.pad)
        for number, prompt in enumerate(task.prompts):
            self._prompts[number, : task.prompt_lengths[number]] = prompt
        self._tokens = np.full(shape, task.pad)
        self._filled = np.zeros(num_rows, dtype=np.int64)
        self._task_ids = np.zeros(num_rows, dtype=np.int64)
        self._paid = np.zeros(num_rows)  # of the response so far, where each token is paid

    def reset_rows(self, rows: IntArray, random: RowRandom, task_ids: IntArray | None) -> RowInfo:
        if task_ids is None and self.num_tasks == 1:
            task_ids = np.zeros(len(rows), dtype=np.int64)  # one prompt: nothing to draw
        elif task_ids is None:
            task_ids = random.integers(rows, self.num_tasks)
        self._task_ids[rows] = task_ids
        self._tokens[rows] = self.task.pad
        self._tokens[rows, : self._prompts.shape[1]] = self._prompts[task_ids]
        self._filled[rows] = self.task.prompt_lengths[task_ids]
        self._paid[rows] = 0.0
        return {"task_id": task_ids, "action_mask": self.action_masks(len(rows))}

    def step_rows(
        self, rows: IntArray, random: RowRandom, actions: IntArray
    ) -> tuple[FloatArray, BoolArray, RowInfo]:
        task, task_ids, filled = self.task, self._task_ids[rows], self._filled[rows]
        info: RowInfo = {"task_id": task_ids, "action_mask": self.action_masks(len(rows))}
        if task.reference is not None:
            info["ref_logp"] = self._ref_logp(rows, actions)

        lengths = filled + 1 - task.prompt_lengths[task_ids]
        stop_reasons = np.zeros(len(rows), dtype=STOP_REASON_DTYPE)
        stop_reasons[lengths == task.limits[task_ids]] = "length"
        stop_reasons[actions == task.eos_id] = "eos"  # also of the last token that is allowed
        terminated = stop_reasons != ""
        self._tokens[rows, filled] = actions
        self._filled[rows] = filled + 1

        rewards = np.zeros(len(rows))
        each_token = task.reward_at == "token"
        if each_token or terminated.any():
            judged = np.ones(len(rows), dtype=np.bool_) if each_token else terminated
            try:
                scores = self._judge(rows[judged], stop_reasons[judged])
            except RewardError:
                # The step did not happen: it can be taken again, say when a judge answers again.
                self._tokens[rows, filled] = task.pad
                self._filled[rows] = filled
                raise
            rewards[judged] = scores.total
            if each_token:
                rewards = rewards - self._paid[rows]
                self._paid[rows] = scores.total
            if terminated.any():
                info |= _end_info(terminated, judged, scores, lengths, stop_reasons)
        return rewards, terminated, info

    def observe(self, rows: IntArray) -> IntArray:
        return self._tokens[rows]

    def action_masks(self, count: int) -> Mask:
        """Every token is allowed: a read-only view [count, V] of one row."""
        # The row is a new one in each call: infos of two steps share nothing.
        return np.broadcast_to(np.ones(self.task.vocab_size, np.int8), (count, self.task.vocab_size))

    def render_row(self, row: int) -> str:
        """Prompt and response so far, and why it ended if it has."""
        start = self.task.prompt_lengths[self._task_ids[row]]
        prompt, response = np.split(self._tokens[row, : self._filled[row]], [start])
        ended = ""
        if len(response) and response[-1] == self.task.eos_id:
            ended = " [eos]"
        elif len(response) == self.task.limits[self._task_ids[row]]:
            ended = " [length]"
        return f"{self.task.text(prompt)} -> {self.task.text(response)}{ended}"

    def _ref_logp(self, rows: IntArray, actions: IntArray) -> FloatArray:
        assert self.task.reference is not None
        tokens, filled = self._tokens[rows], self._filled[rows]
        ref_logp = np.asarray(self.task.reference.log_prob(tokens, filled, actions), np.float64)
        if ref_logp.shape != (len(rows),):
            raise ValueError(
                f"reference: got log-probs of shape {ref_logp.shape}; allowed: ({len(rows)},)"
            )
        wrong = ~(ref_logp <= 1e-6) | np.isneginf(ref_logp)
        if wrong.any():
            k = int(wrong.argmax())
            raise ValueError(
                f"reference: row {rows[k]} (task {self._task_ids[rows[k]]}), token {actions[k]} has "
                f"log-prob {ref_logp[k]}; allowed: finite numbers <= 0"
            )
        return ref_logp

    def _judge(self, rows: IntArray, stop_reasons: StrArray) -> CheckedScores:
        """Scores of the responses, complete or not, of `rows`."""
        task, task_ids = self.task, self._task_ids[rows]
        starts = task.prompt_lengths[task_ids]
        lengths = self._filled[rows] - starts
        places = starts[:, None] + np.arange(lengths.max())
        # Behind the longest sequence there is no place: what is read instead is padding or is
        # replaced by it.
        tokens = self._tokens[rows[:, None], np.minimum(places, self._tokens.shape[1] - 1)]
        tokens[places >= self._filled[rows][:, None]] = task.pad
        return task.judge(Responses(task_ids, tokens, lengths, stop_reasons), rows)


def _end_info(
    terminated: BoolArray,
    judged: BoolArray,
    scores: CheckedScores,
    lengths: IntArray,
    stop_reasons: StrArray,
) -> RowInfo:
    """What only the last step of an episode has; `scores` are those of the `judged` rows."""
    info: RowInfo = {"stop_reason": stop_reasons, "response_length": lengths}
    components = {REWARD_PREFIX + name: values for name, values in scores.components.items()}
    for key, values in {"status": scores.status, **components}.items():
        info[key] = np.zeros(len(judged), dtype=values.dtype)
        info[key][judged] = values
    return info | {"_" + key: terminated for key in info}
