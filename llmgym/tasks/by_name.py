"""Tasks by their name, as the environments take them."""

from collections.abc import Sequence
from typing import Any

from llmgym.checks import check_name
from llmgym.tasks.arithmetic import arithmetic
from llmgym.tasks.gsm8k import gsm8k
from llmgym.tasks.problems import MathTask, Problem, draw_problems
from llmgym.tasks.reasoning_gym import DEFAULT_NAME, reasoning_gym

NAMES = ("arithmetic", "gsm8k", "reasoning_gym")


def as_task(task: str | MathTask, seed: int, options: dict[str, Any]) -> MathTask:
    """The task of that name, made with the options; or the task itself, which takes none.

    Args:
        task: "arithmetic", "gsm8k", "reasoning_gym:NAME" ("reasoning_gym" alone is its chain_sum), or a
            `MathTask`.
        seed: of the problems that the task draws; "gsm8k" draws none.
        options: arguments of the function in `llmgym.tasks` that makes the task.

    Raises:
        TypeError: options that the task has not, or options beside a `MathTask`.
        ValueError: an unknown name, or an option out of range.
    """
    if isinstance(task, MathTask):
        if options:
            raise TypeError(f"{', '.join(options)}: no options beside a MathTask; allowed: task alone")
        return task
    name, _, theirs = task.partition(":") if isinstance(task, str) else (task, "", "")
    if name == "reasoning_gym":
        return reasoning_gym(theirs or DEFAULT_NAME, seed=seed, **options)
    check_name("task", task, NAMES)
    return gsm8k(**options) if task == "gsm8k" else arithmetic(seed=seed, **options)


def problems_of(task: MathTask, split: str, n_train: int | None, seed: int) -> Sequence[Problem]:
    """The problems of an environment: of a split, and `n_train` of them where that is "train".

    Fewer train problems are drawn by `seed`; the other splits are always whole, so that settings for
    training serve for evaluation with another `split`.
    """
    problems = task.split(split)
    return draw_problems(problems, n_train, seed, "n_train") if split == "train" else problems
