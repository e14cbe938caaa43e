"""Any procedural task of Reasoning Gym, marked by its own scorer.

Stojanovski et al. (2025), "Reasoning Gym: Reasoning Environments for Reinforcement Learning with
Verifiable Rewards". Needs the extra ``llm`` (``pip install llmgym[llm]``).
"""

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmgym.checks import check_count, check_name
from llmgym.tasks.problems import Marks, MathTask, Problem, in_splits, same_words
from llmgym.token_rewards import STATUS_DTYPE

ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
EVALUATION = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")
DEFAULT_NAME = "chain_sum"


def reasoning_gym(
    name: str = DEFAULT_NAME,
    n_problems: int = 1000,
    seed: int = 0,
    allow_eval: bool = False,
    **settings: Any,
) -> MathTask:
    """The problems of a Reasoning Gym task, such as "chain_sum" or "gsm_symbolic".

    A prompt is the question and a line break; solution and truth are its answer, which some tasks have
    none of: those give no demonstrations. Of a response the last
    ``<answer>...</answer>`` counts, or all of it where it has no such tag; it is given to the task's
    ``score_answer``, whose score, 0 to 1, is the reward. Some scorers give a little to wrong answers; a
    response is correct if the score is 1.

    **Splits** (70% train, 10% validation, 20% held-out, in expectation) go by a hash of the question, but
    for blanks and capitals; a question that is drawn twice is there once. So no split of any seed has a
    question that another has. Two wordings of one problem ("1 + 2", "2 + 1") are two questions.

    **Risk.** Scorers run in this process without a time limit. Some of them evaluate the response as
    Python, directly or with sympy's ``parse_expr``; they are refused unless `allow_eval`.

    Args:
        name: a dataset of Reasoning Gym.
        n_problems: so many are drawn, all splits together, before repeated ones are left out.
        seed: of the draw.
        allow_eval: take tasks whose class evaluates text as code, "composite" among them.
        settings: fields of the dataset's config, such as ``max_terms`` of "chain_sum".

    Raises:
        ImportError: Reasoning Gym is not installed.
        ValueError: an unknown name, a setting out of range, a task that evaluates text, or so
            few problems that a split has none.
        TypeError: a setting that the config has not.
    """
    check_count("n_problems", n_problems)
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ImportError("reasoning_gym: not installed; pip install llmgym[llm]") from error
    check_name("task", name, sorted(DATASETS))
    if not allow_eval and (name == "composite" or EVALUATION.search(inspect.getsource(DATASETS[name][0]))):
        raise ValueError(
            f"task: reasoning_gym:{name} evaluates text as code, perhaps that of responses; allowed: other "
            "tasks, or allow_eval=True where the responses can be trusted"
        )
    try:
        dataset = create_dataset(name, size=n_problems, seed=seed, **settings)
    except AssertionError as error:
        raise ValueError(f"reasoning_gym:{name}: {error}") from error
    keyed: dict[str, Problem] = {}
    for entry in dataset:
        question, answer = entry["question"], entry["answer"]
        problem = Problem(f"{question}\n", answer or "", answer, entry)  # some tasks know no answer
        keyed.setdefault(same_words(question), problem)
    train, validation, held_out = in_splits(keyed.items())
    return MathTask(f"reasoning_gym:{name}", train, validation, held_out, OwnScorer(dataset))


@dataclass(frozen=True, eq=False)
class OwnScorer:
    """Marks responses by the ``score_answer`` of a Reasoning Gym dataset."""

    dataset: Any

    def __call__(self, problems: Sequence[Problem], responses: Sequence[str]) -> Marks:
        scores, status = np.zeros(len(problems)), np.full(len(problems), "scored", STATUS_DTYPE)
        for row, (problem, response) in enumerate(zip(problems, responses, strict=True)):
            tagged = ANSWER_TAG.findall(response)
            answer = (tagged[-1] if tagged else response).strip()
            if problem.truth and not answer:
                status[row] = "unparsed"
                continue
            try:
                scores[row] = self.dataset.score_answer(answer, problem.entry)
            except Exception:
                # Not all scorers expect what a policy may write. It is counted, and no zero like others.
                status[row] = "error"
        return Marks(scores, status)
