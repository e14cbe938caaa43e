"""Unit tests of Python code as inputs and outputs, their division in two, and the comparison of outputs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmgym.checks import check_count
from llmgym.verifiers.sandbox.host import Ended, Sandbox
from llmgym.verifiers.sandbox.plain_data import NotPlainError, canonical, encode


@dataclass(frozen=True)
class CallTest:
    """A call of a function and what it has to return, by Python's `==` (NaN equals NaN).

    | field | type | meaning |
    |---|---|---|
    | `function` | str | its name in the code |
    | `args` | tuple or list | positional arguments |
    | `expected` | plain data | None, numbers, strings, bytes, and lists, tuples, sets, dicts of them |
    | `kwargs` | mapping | named arguments |

    Raises:
        ValueError: arguments or expectation are not plain data.
    """

    function: str
    args: Sequence[Any]
    expected: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("args", "kwargs", "expected"):
            try:
                encode(getattr(self, name))
            except NotPlainError as error:
                raise ValueError(f"{name}: {error}; allowed: what plain_data.encode takes") from None


@dataclass(frozen=True)
class ProgramTest:
    """What a program is given on standard input and has to write to standard output.

    White space at the end of lines and empty lines at the end are ignored. The program has to exit
    with code 0.
    """

    stdin: str
    stdout: str

    def __post_init__(self) -> None:
        for name in ("stdin", "stdout"):
            try:
                getattr(self, name).encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{name}: {error}; allowed: what UTF-8 can encode") from None


CodeTest = CallTest | ProgramTest


@dataclass(frozen=True)
class SplitTests:
    """The tests of one task in two parts that share no input.

    Raises:
        ValueError: they do share one, or a part is empty.
    """

    reward: tuple[CodeTest, ...]
    evaluation: tuple[CodeTest, ...]

    def __post_init__(self) -> None:
        for name in ("reward", "evaluation"):
            if not getattr(self, name):
                raise ValueError(f"{name}: got no tests; allowed: at least one")
        used = {_input_key(test) for test in self.reward}
        for test in self.evaluation:
            if _input_key(test) in used:
                raise ValueError(f"evaluation: the input of {test} is among those of reward; allowed: others")


def split_tests(tests: Sequence[CodeTest], num_evaluation: int, seed: int) -> SplitTests:
    """Divide the tests of a task into some that are the reward and others for evaluation only.

    Tests with equal inputs go to the same part. The same tests in the same order and the same seed give
    the same parts.

    Args:
        tests: at least two with different inputs.
        num_evaluation: how many inputs go to evaluation, at least 1 and not all.
        seed: of the division.
    """
    groups: dict[str, list[CodeTest]] = {}
    for test in tests:
        groups.setdefault(_input_key(test), []).append(test)
    if not 1 <= check_count("num_evaluation", num_evaluation) < len(groups):
        raise ValueError(
            f"num_evaluation: got {num_evaluation}; allowed: 1 to {len(groups) - 1}, one less than the "
            "number of different inputs"
        )
    shuffled = [list(groups.values())[i] for i in np.random.default_rng(seed).permutation(len(groups))]
    evaluation, reward = (
        tuple(test for group in part for test in group)
        for part in (shuffled[:num_evaluation], shuffled[num_evaluation:])
    )
    return SplitTests(reward, evaluation)


def run_test(sandbox: Sandbox, code: str, test: CodeTest) -> tuple[str, str]:
    """Status and detail of one test of a code; "broken" says that the sandbox is of no use any more."""
    if isinstance(test, ProgramTest):
        ended = sandbox.run(code, None, test.stdin)
    else:
        ended = sandbox.run(code, test.function, encode([list(test.args), dict(test.kwargs)]))
    if ended.why:
        return ended.why, "the sandbox ended the code"
    return _judge_program(ended, test) if isinstance(test, ProgramTest) else _judge_call(ended, test)


def _judge_call(ended: Ended, test: CallTest) -> tuple[str, str]:
    """Compare what a function is said to have returned; all of `ended` may be forged."""
    try:
        reply = json.loads(ended.result)
        if not isinstance(reply, dict):
            raise ValueError("the result is no record")
        if ended.code == 0 and "value" in reply:
            same = canonical(reply["value"]) == canonical(encode(test.expected))
            return ("passed", "") if same else ("failed", f"returned {json.dumps(reply['value'])[:500]}")
    except (ValueError, RecursionError) as error:
        return "error", _exit(ended, f"no readable result: {str(error)[:200]}")
    return _judge_error(ended, reply)


def _judge_program(ended: Ended, test: ProgramTest) -> tuple[str, str]:
    """Compare what a program wrote."""
    if ended.code != 0:
        try:
            reply = json.loads(ended.result)
        except (ValueError, RecursionError):
            reply = None
        return _judge_error(ended, reply)
    try:
        same = _lines(ended.output.decode()) == _lines(test.stdout)
    except UnicodeDecodeError:
        same = False
    return ("passed", "") if same else ("failed", f"wrote {ended.output[:500]!r}")


def _judge_error(ended: Ended, reply: object) -> tuple[str, str]:
    """Status and detail of code that failed, from what it says itself."""
    match reply:
        case {"error": [str(kind), str(message)]}:
            # EFBIG and ENOSPC as Python writes them.
            files = kind == "OSError" and message.startswith(("[Errno 27]", "[Errno 28]"))
            status = "over_limits" if files or kind == "MemoryError" else "error"
            return status, f"{kind[:100]}: {message[:500]}"
    return "error", _exit(ended, "no result")


def _exit(ended: Ended, what: str) -> str:
    how = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
    return f"{what} ({how})"


def _lines(text: str) -> list[str]:
    """The lines that count: without white space at their ends, and without empty ones at the end."""
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _input_key(test: CodeTest) -> str:
    """The same text for inputs that are equal, by the rules by which outputs are."""
    if isinstance(test, ProgramTest):
        return json.dumps(_lines(test.stdin))
    arguments = canonical(encode([list(test.args), dict(test.kwargs)]))
    return json.dumps([test.function, arguments])
