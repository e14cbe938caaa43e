"""Problems of mathematics as a token task: the task of `VerifiableMath-v0`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmgym.row_random import IntArray
from llmgym.tasks.by_name import problems_of
from llmgym.tasks.problems import MathTask, Problem, draw_problems
from llmgym.token_rewards import Responses, Scores
from llmgym.token_tasks import TokenTask
from llmgym.tokenizers import Tokenizer, as_tokenizer, character_tokenizer


@dataclass(frozen=True, eq=False)
class MathReward:
    """The reward function of a `MathTokenTask`: decodes the responses and lets the task score them."""

    math: MathTask
    problems: Sequence[Problem]
    tokenizer: Tokenizer
    verifier: str

    def __call__(self, responses: Responses) -> Scores:
        texts = [
            self.tokenizer.decode(tokens[: length - (reason == "eos")])
            for tokens, length, reason in zip(
                responses.tokens, responses.lengths, responses.stop_reasons, strict=True
            )
        ]
        problems = [self.problems[k] for k in responses.task_ids.tolist()]
        return self.math.score(problems, texts, self.verifier)


@dataclass(frozen=True, eq=False, kw_only=True)
class MathTokenTask(TokenTask):
    """A `TokenTask` that knows the texts of its prompts: task id k is ``problems[k]``.

    Fields beside those of a `TokenTask`: `math`, the `MathTask` with all splits; `problems`, those of
    this environment; `tokenizer`, a `Tokenizer`.
    """

    math: MathTask
    problems: Sequence[Problem]
    tokenizer: Tokenizer

    def demonstrations(self, n: int | None = None, seed: int = 0) -> tuple[list[IntArray], list[IntArray]]:
        """What supervised fine-tuning needs: prompts and right responses, both as token ids.

        Args:
            n: so many different problems, drawn by `seed`; None: all, in the order of the task ids.
            seed: of the draw.

        Returns:
            n prompts and n responses, one int64 array each; a response ends with end-of-sequence.

        Raises:
            ValueError: fewer than `n` problems are there; or one has no solution, or a longer one than
                the environment lets a response be.
        """
        problems = draw_problems(self.problems, n, seed, "n")
        return [self.tokenizer.encode_prompt(problem.prompt) for problem in problems], [
            self._demonstration(problem) for problem in problems
        ]

    def _demonstration(self, problem: Problem) -> IntArray:
        if problem.solution is None:
            raise ValueError(f"demonstrations: no solution is known of {problem.prompt[:80]!r}")
        response = np.append(self.tokenizer.encode(problem.solution), self.eos_id)
        if len(response) > self.max_new_tokens:
            raise ValueError(
                f"max_new_tokens: got {self.max_new_tokens}; the solution of {problem.prompt[:80]!r} "
                f"has {len(response)} tokens with end-of-sequence"
            )
        return response


def math_token_task(
    math: MathTask,
    split: str,
    n_train: int | None,
    seed: int,
    verifier: str,
    tokenizer: Any,
    max_new_tokens: int | None,
) -> MathTokenTask:
    """The token task of a split; the arguments are those of `llmgym.verifiable_math.VerifiableMathEnv`.

    The splits of one task have one vocabulary and one length L, that of the longest prompt of all.
    """
    problems = problems_of(math, split, n_train, seed)
    tokens = character_tokenizer(math.characters()) if tokenizer is None else as_tokenizer(tokenizer)
    everything = math.all_problems()
    if max_new_tokens is None:
        solutions = [problem.solution for problem in everything if problem.solution is not None]
        if not solutions:
            raise ValueError(f"max_new_tokens: got None; {math.name} has no solutions that would tell it")
        max_new_tokens = 1 + max(len(tokens.encode(solution)) for solution in solutions)
    longest = max(len(tokens.encode_prompt(problem.prompt)) for problem in everything)
    return MathTokenTask(
        prompts=[tokens.encode_prompt(problem.prompt) for problem in problems],
        vocab_size=tokens.vocab_size,
        eos_id=tokens.eos_id,
        max_new_tokens=max_new_tokens,
        reward=MathReward(math, problems, tokens, verifier),
        decode=tokens.decode,
        min_sequence_length=longest + max_new_tokens,
        math=math,
        problems=problems,
        tokenizer=tokens,
    )
