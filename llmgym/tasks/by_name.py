"""Tasks by their name, as the environments take them."""

from collections.abc import Sequence
from typing import Any

from llmgym.checks import check_name
from llmgym.tasks.arithmetic import arithmetic
from llmgym.tasks.problems import MathTask, Problem, draw_problems

NAMES = ("arithmetic",)


def as_task(task: str | MathTask, seed: int, options: dict[str, Any]) -> MathTask:
    """The task of that name, made with the options; or the task itself, which takes none.

    Args:
        task: "arithmetic", or a `MathTask`.
        seed: of the problems that the task draws.
        options: the arguments of `llmgym.tasks.arithmetic.arithmetic`.

    Raises:
        TypeError: options that the task has not, or options beside a `MathTask`.
        ValueError: an unknown name, or an option out of range.
    """
    if isinstance(task, MathTask):
        if options:
            raise TypeError(f"{', '.join(options)}: no options beside a MathTask; allowed: task alone")
        return task
    check_name("task", task, NAMES)
    return arithmetic(seed=seed, **options)


def problems_of(task: MathTask, split: str, n_train: int | None, seed: int) -> Sequence[Problem]:
    """The problems of an environment: of a split, and `n_train` of them where that is "train".

    Fewer train problems are drawn by `seed`; the other splits are always whole, so that
    settings for training serve for evaluation with another `split`.
    """
    problems = task.split(split)
    return draw_problems(problems, n_train, seed, "n_train") if split == "train" else problems
