"""The environments of `MathText-v0`, scalar and vector: problems of mathematics as text."""

import string
from typing import Any

import numpy as np
from gymnasium.spaces import Text
from numpy.typing import NDArray

from llmgym.checks import check_count, check_name
from llmgym.row_random import FloatArray, IntArray, RowRandom
from llmgym.scalar import BatchOfOneEnv
from llmgym.tasks.by_name import as_task, problems_of
from llmgym.tasks.problems import VERIFIERS, MathTask
from llmgym.token_rewards import REWARD_PREFIX
from llmgym.transition import BoolArray, RowInfo
from llmgym.vector import AutoresetMode, BatchVectorEnv

MAX_LENGTH = 4096


class MathTextTransition:
    """A `BatchedTransition`: each row shows a problem, takes a whole response, pays, and ends.

    The arguments are those of `MathTextEnv`.
    """

    def __init__(
        self,
        num_rows: int,
        task: str | MathTask,
        split: str,
        n_train: int | None,
        task_seed: int,
        verifier: str,
        max_length: int,
        characters: str | None,
        options: dict[str, Any],
    ) -> None:
        self.verifier = check_name("verifier", verifier, VERIFIERS)
        check_count("max_length", max_length)
        self.math = as_task(task, task_seed, options)
        self.problems = problems_of(self.math, split, n_train, task_seed)
        self.num_tasks = len(self.problems)
        everything = self.math.all_problems()
        theirs = self.math.characters()
        longest = max(len(problem.prompt) for problem in everything)
        self.observation_space = Text(longest, min_length=1, charset=theirs)
        if characters is None:
            characters = "".join(sorted({*theirs, *string.printable}))
        self.action_space = Text(max_length, min_length=0, charset=characters)
        self._task_ids = np.zeros(num_rows, dtype=np.int64)

    def reset_rows(self, rows: IntArray, random: RowRandom, task_ids: IntArray | None) -> RowInfo:
        if task_ids is None and self.num_tasks == 1:
            task_ids = np.zeros(len(rows), dtype=np.int64)  # one problem: nothing to draw
        elif task_ids is None:
            task_ids = random.integers(rows, self.num_tasks)
        self._task_ids[rows] = task_ids
        return {"task_id": task_ids}

    def step_rows(
        self, rows: IntArray, random: RowRandom, actions: NDArray[Any]
    ) -> tuple[FloatArray, BoolArray, RowInfo]:
        task_ids = self._task_ids[rows]
        problems = [self.problems[k] for k in task_ids.tolist()]
        scores = self.math.score(problems, actions.tolist(), self.verifier)
        strict = np.asarray(scores.components["strict"], dtype=np.float64)
        info: RowInfo = {
            "task_id": task_ids,
            "correct": (strict >= 1.0).astype(np.float64),
            "status": np.asarray(scores.status),
        }
        for name, values in scores.components.items():
            info[REWARD_PREFIX + name] = np.asarray(values, dtype=np.float64)
        return np.asarray(scores.total, dtype=np.float64), np.ones(len(rows), dtype=np.bool_), info

    def observe(self, rows: IntArray) -> tuple[str, ...]:
        return tuple(self.problems[k].prompt for k in self._task_ids[rows].tolist())


class MathTextEnv(BatchOfOneEnv):
    """Read a problem of mathematics as text and answer with a text: one step, for any text model.

    The problems and verifiers are those of `VerifiableMath-v0`, without tokens: whatever maps a text to a
    text can act, an API's model too.

    ## Observation space
    ``Text``: the problem, as it is written, with the characters of the task and as long as its longest. The
    default task's are "12+34=".

    ## Action space
    ``Text``: the whole response, 0 to `max_length` of `characters`. A longer one, or another character, is
    an error and not a wrong answer; see the second example for a model that may write anything.

    ## Rewards
    ``verifier="strict"``: 1 if the response states the right answer, as `llmgym.verifiers.math` finds and
    compares it, else 0; a task with a scorer of its own pays that scorer's score. ``verifier="lenient"``:
    1 if the true answer occurs anywhere in the response. The problem's own text never counts.

    ## Starting state
    A problem of the split drawn uniformly, or the one given by ``reset(options={"task_id": k})``. A choice
    of task holds for that episode only.

    ## Episode end
    The episode terminates after one step. It never truncates. The last observation is the problem.

    ## Information
    | key | from | type | meaning |
    |---|---|---|---|
    | ``task_id`` | reset, step | int | number of the problem, ``problems[task_id]`` |
    | ``correct`` | step | float | 1.0 if the strict verifier gives the full score, else 0.0; whichever verifier pays |
    | ``reward/strict``, ``reward/lenient`` | step | float | what each verifier gives; whichever pays |
    | ``status`` | step | str | "scored", "unparsed", "timed_out" or "error", as for `VerifiableMath-v0` |

    ## Attributes
    ``math``, the `llmgym.tasks.problems.MathTask` with all splits; ``problems``, those of this environment.

    ## Arguments
    | argument | default | meaning |
    |---|---|---|
    | ``task`` | "arithmetic" | "arithmetic", "gsm8k", "reasoning_gym:NAME", or a `MathTask` of one's own |
    | ``split`` | "train" | "train", "validation" or "held_out"; no two have a problem in common |
    | ``n_train`` | None | use so many problems of the train split only, drawn by `task_seed` |
    | ``task_seed`` | 0 | of the problems that are drawn. Whatever the seeds, no problem of one split is in another |
    | ``verifier`` | "strict" | "strict" or "lenient", which is paid |
    | ``max_length`` | 4096 | the most characters of a response |
    | ``characters`` | None | those that a response can have; None: printable ASCII and those of the task |
    | others | | options of the task, such as ``digits`` of `llmgym.tasks.arithmetic.arithmetic` |

    The vector environment takes ``autoreset_mode`` as well, see `MathTextVectorEnv`. Stable-Baselines3 has
    no policies for text; `VerifiableMath-v0` is for it.

    ## Example
    Any function from text to text plays; here one that can add:
    ```python
    import gymnasium as gym

    def model(problem: str) -> str:
        first, second = problem.rstrip("=").split("+")
        return f"The answer is {int(first) + int(second)}."

    env = gym.make("llmgym:MathText-v0", split="held_out")
    rewards = []
    for task_id in range(20):
        problem, info = env.reset(options={"task_id": task_id})
        _, reward, _, _, info = env.step(model(problem))
        rewards.append(reward)
    print(sum(rewards) / len(rewards))
    ```

    A model that may write anything, four responses to each of two problems at once:
    ```python
    import gymnasium as gym
    import numpy as np

    def model(problem: str) -> str:
        return f"\N{THINKING FACE} {problem} maybe 42?"

    envs = gym.make_vec("llmgym:MathText-v0", num_envs=8)
    space = envs.single_action_space
    problems, info = envs.reset(options={"task_id": np.repeat([3, 5], 4)})
    allowed = space.character_set
    texts = ["".join(c for c in model(problem) if c in allowed)[: space.max_length] for problem in problems]
    _, rewards, _, _, info = envs.step(texts)
    correct = info["final_info"]["correct"]
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
        max_length: int = MAX_LENGTH,
        characters: str | None = None,
        **options: Any,
    ) -> None:
        transition = MathTextTransition(
            1, task, split, n_train, task_seed, verifier, max_length, characters, options
        )
        super().__init__(transition)
        self.math, self.problems = transition.math, transition.problems


class MathTextVectorEnv(BatchVectorEnv):
    """`MathTextEnv` for a batch of rows; what ``gym.make_vec("MathText-v0")`` makes.

    Observations are tuples of N texts, actions lists or tuples of N texts. ``options["task_id"]`` is one
    integer for all rows or integers [N]: a group of responses shares a problem. Info values are arrays [N]
    with masks ``_key``.

    Args:
        num_envs: number of rows N.
        autoreset_mode: "same_step", "next_step", "disabled" or an `AutoresetMode`. Same-step by
            default, for in next-step mode every second step of a one-step task does nothing but
            reset. A step's info is then in ``info["final_info"]``.
        Others: as for `MathTextEnv`.
    """

    def __init__(
        self,
        num_envs: int = 1,
        task: str | MathTask = "arithmetic",
        split: str = "train",
        n_train: int | None = None,
        task_seed: int = 0,
        verifier: str = "strict",
        max_length: int = MAX_LENGTH,
        characters: str | None = None,
        autoreset_mode: AutoresetMode | str = "same_step",
        **options: Any,
    ) -> None:
        num_envs = check_count("num_envs", num_envs)
        transition = MathTextTransition(
            num_envs, task, split, n_train, task_seed, verifier, max_length, characters, options
        )
        super().__init__(transition, num_envs, autoreset_mode)
        self.math, self.problems = transition.math, transition.problems
