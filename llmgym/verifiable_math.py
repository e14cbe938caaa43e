"""The environments of `VerifiableMath-v0`, scalar and vector: tokens that answer problems of mathematics."""

from typing import Any

import numpy as np

from llmgym.checks import check_name
from llmgym.math_tokens import MathTokenTask, math_token_task
from llmgym.row_random import FloatArray, IntArray, RowRandom
from llmgym.tasks.by_name import as_task
from llmgym.tasks.problems import VERIFIERS, MathTask
from llmgym.token_generation import TokenGenerationEnv, TokenGenerationVectorEnv
from llmgym.token_transition import TokenGenerationTransition
from llmgym.transition import BoolArray, RowInfo
from llmgym.vector import AutoresetMode


class VerifiableMathTransition:
    """A `BatchedTransition`: that of the tokens, with ``correct`` in the info of the last step."""

    def __init__(self, tokens: TokenGenerationTransition) -> None:
        self._tokens = tokens
        self.observation_space = tokens.observation_space
        self.action_space = tokens.action_space
        self.num_tasks = tokens.num_tasks

    def reset_rows(self, rows: IntArray, random: RowRandom, task_ids: IntArray | None) -> RowInfo:
        return self._tokens.reset_rows(rows, random, task_ids)

    def step_rows(
        self, rows: IntArray, random: RowRandom, actions: IntArray
    ) -> tuple[FloatArray, BoolArray, RowInfo]:
        rewards, terminated, info = self._tokens.step_rows(rows, random, actions)
        if "reward/strict" in info:
            info["correct"] = (info["reward/strict"] >= 1.0).astype(np.float64)
            info["_correct"] = info["_reward/strict"]
        return rewards, terminated, info

    def observe(self, rows: IntArray) -> IntArray:
        return self._tokens.observe(rows)


def _make_task(
    task: str | MathTask,
    split: str,
    n_train: int | None,
    task_seed: int,
    verifier: str,
    tokenizer: Any,
    max_new_tokens: int | None,
    options: dict[str, Any],
) -> MathTokenTask:
    check_name("verifier", verifier, VERIFIERS)
    math = as_task(task, task_seed, options)
    return math_token_task(math, split, n_train, task_seed, verifier, tokenizer, max_new_tokens)


class VerifiableMathEnv(TokenGenerationEnv):
    """Answer a problem of mathematics token by token; a verifier pays for the right answer.

    `TokenGeneration-v0` on a task of `llmgym.tasks`. The default is addition of two numbers of two digits,
    with a token for each character: "12+34=" is to be continued by "46" and end-of-sequence.

    ## Observation space
    ``Box(0, V, (L,), int64)``: the prompt, the response so far, and the padding id V behind them, as for
    `TokenGeneration-v0`. L is the longest prompt of all splits with the longest response, so that the
    environments of the splits have the same spaces. The default has V = 13 and L = 10.

    ## Action space
    ``Discrete(V)``: the next token, among them end-of-sequence.

    ## Rewards
    Paid with the last token. ``verifier="strict"``: 1 if the response states the right answer, as
    `llmgym.verifiers.math` finds and compares it, else 0; a task with a scorer of its own pays that scorer's
    score. ``verifier="lenient"``: 1 if the true answer occurs anywhere in the response. The lenient
    verifier is there to be fooled: where more tokens are allowed than an answer needs, the reward can
    rise while ``correct`` falls.

    ## Starting state
    A problem of the split drawn uniformly, or the one given by ``reset(options={"task_id": k})``. A choice
    of task holds for that episode only.

    ## Episode end
    The episode terminates with end-of-sequence or with token number `max_new_tokens`. It never truncates.
    A response without end-of-sequence is judged like any other.

    ## Information
    That of `TokenGeneration-v0` (without ``ref_logp``: no reference is known), and

    | key | from | type | meaning |
    |---|---|---|---|
    | ``correct`` | last step | float | 1.0 if the strict verifier gives the full score, else 0.0; whichever verifier pays |
    | ``reward/strict``, ``reward/lenient`` | last step | float | what each verifier gives; whichever pays |
    | ``status`` | last step | str | "scored"; "unparsed" (no answer found, or one beyond the verifier's limits); "timed_out"; "error" (the truth or the scorer failed, or an extra is not installed) |

    ## Attributes
    ``task``, a `llmgym.math_tokens.MathTokenTask`: ``task.problems[k]`` has prompt, truth and solution of
    task id k, and ``task.demonstrations(n, seed)`` gives prompts and right responses as token ids.

    ## Arguments
    | argument | default | meaning |
    |---|---|---|
    | ``task`` | "arithmetic" | "arithmetic", "gsm8k", "reasoning_gym:NAME", or a `llmgym.tasks.problems.MathTask` of one's own |
    | ``split`` | "train" | "train", "validation" or "held_out"; no two have a problem in common |
    | ``n_train`` | None | use so many problems of the train split only, drawn by `task_seed`; other splits are always whole |
    | ``task_seed`` | 0 | of the problems that are drawn. Whatever the seeds, no problem of one split is in another |
    | ``verifier`` | "strict" | "strict" or "lenient", which is paid |
    | ``tokenizer`` | None | a `llmgym.tokenizers.Tokenizer` or one of the transformers library; None is a token for each character that occurs in the task |
    | ``max_new_tokens`` | None | the most tokens of a response, end-of-sequence included; None is what the longest solution needs |
    | ``render_mode`` | None | "ansi": ``render()`` returns prompt and response as text |
    | others | | options of the task, such as ``digits`` and ``reverse_digits`` of `llmgym.tasks.arithmetic.arithmetic` |

    The vector environment takes ``autoreset_mode`` as well, see `VerifiableMathVectorEnv`.

    ## Example
    ```python
    import gymnasium as gym

    env = gym.make("llmgym:VerifiableMath-v0", digits=2, render_mode="ansi")
    _, info = env.reset(seed=0)
    _, solutions = env.unwrapped.task.demonstrations()
    for token in solutions[info["task_id"]]:
        _, reward, terminated, _, info = env.step(token)
    print(env.render(), reward, info["correct"])
    ```

    A group of 4 responses to each of 16 problems, out of 250 that are trained on:
    ```python
    import gymnasium as gym
    import numpy as np

    envs = gym.make_vec(
        "llmgym:VerifiableMath-v0", num_envs=64, task="arithmetic", n_train=250, autoreset_mode="disabled"
    )
    observations, info = envs.reset(seed=0, options={"task_id": np.repeat(np.arange(16), 4)})
    ```

    ## Version history
    * v0: initial version.
    """  # noqa: E501 (a table row cannot be wrapped)

    def __init__(
        self,
        task: str | MathTask = "arithmetic",
        split: str = "train",
        n_train: int | None = None,
        task_seed: int = 0,
        verifier: str = "strict",
        tokenizer: Any = None,
        max_new_tokens: int | None = None,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            _make_task(task, split, n_train, task_seed, verifier, tokenizer, max_new_tokens, options),
            render_mode,
        )
        self._transition = VerifiableMathTransition(self._tokens)


class VerifiableMathVectorEnv(TokenGenerationVectorEnv):
    """`VerifiableMathEnv` for a batch of rows; what ``gym.make_vec("VerifiableMath-v0")`` makes.

    Observations are int64 [N, L], actions integers [N]. ``options["task_id"]`` is one integer for all
    rows or integers [N]: a group of responses shares a problem. Info values are arrays [N] with masks
    ``_key``.

    Args:
        num_envs: number of rows N.
        autoreset_mode: "next_step" (the default), "same_step", "disabled" or an `AutoresetMode`.
        Others: as for `VerifiableMathEnv`.
    """

    def __init__(
        self,
        num_envs: int = 1,
        task: str | MathTask = "arithmetic",
        split: str = "train",
        n_train: int | None = None,
        task_seed: int = 0,
        verifier: str = "strict",
        tokenizer: Any = None,
        max_new_tokens: int | None = None,
        render_mode: str | None = None,
        autoreset_mode: AutoresetMode | str = "next_step",
        **options: Any,
    ) -> None:
        super().__init__(
            num_envs,
            _make_task(task, split, n_train, task_seed, verifier, tokenizer, max_new_tokens, options),
            render_mode,
            autoreset_mode,
        )
        self._transition = VerifiableMathTransition(self._tokens)
