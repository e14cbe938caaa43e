"""`check_agent`: the counterpart of Gymnasium's ``check_env`` for agents.

    from agents.checking import check_agent
    print(check_agent("my_package.my_module:MyAgent"))

Each check trains or inspects an agent of its own and compares it with what must hold exactly, so a
failure says what was seen, what was expected and what usually causes it. Any agent gets the general
checks; they use the four methods of `agents.agent.Agent` alone. Agents that expose these hooks, as
ours do, get the checks of their learning too; what is missing is skipped and said:

=======================================  ==========================================================
hook                                     meaning
=======================================  ==========================================================
``policy``                               the ``nn.Module`` that is trained
``collect() -> rollout``                 new experience; a dataclass of tensors [T, N, ...], with
                                         ``mask`` 1 at executed steps, ``policy_version``, and
                                         ``episodes`` (see `agents.rollout.Rollout`)
``prepare(rollout) -> batch``            a dataclass of the executed steps [B, ...] with
                                         ``old_log_probs``, ``advantages``, ``returns``,
                                         ``len(batch)`` and ``batch.select(index)`` (see
                                         `agents.batch.Batch`); or of whole episodes [B, K, ...]
                                         with a ``mask`` [B, K]; refuses a stale rollout
``loss(batch, progress_remaining)``      ``total`` (with gradient), ``entropy`` and ``ratio`` of the
                                         steps (see `agents.batch.LossTerms`); means over the
                                         samples, so whitening belongs in prepare or minibatches. It
                                         is a function of weights and batch alone. ``value``, if it
                                         is there, is 0 where no critic is fitted
``minibatches(batch)``                   the parts an update steps through, in turn
``update(rollout, progress_remaining)``  one whole update
``action_probabilities(observations)``   pi(.|s), [N, A], for Discrete actions
``num_timesteps``                        environment steps so far
``learn(..., run_dir, checkpoint_every,  checkpoints and resuming (see `agents.training_run`)
resume, callback)``
=======================================  ==========================================================
"""

from __future__ import annotations

import io
import json
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from agents import check_gradients, check_hooks, check_predict, check_protocol, registry
from agents.check_tools import CheckFailed, CheckSkipped, Subject, global_states_kept
from agents.runs import is_foreign
from agents.training import single_thread


class Check(NamedTuple):
    """A function of a `Subject` that raises `CheckFailed` or `CheckSkipped`, else returns a remark."""

    run: Callable[[Subject], str | None]
    needs: tuple[str, ...] = ()  # hooks without which it is skipped

    @property
    def name(self) -> str:
        return self.run.__name__


DATA = ("collect", "prepare")
LOSS = (*DATA, "policy", "loss")
UPDATE = (*LOSS, "update")

CHECKS = (
    Check(check_protocol.construction),
    Check(check_protocol.actions),
    Check(check_predict.deterministic),
    Check(check_protocol.seed),
    Check(check_protocol.save_load),
    Check(check_protocol.learning),
    Check(check_protocol.timesteps),
    Check(check_predict.environment_random_state),
    Check(check_predict.global_random_state),
    Check(check_predict.inputs_unchanged),
    Check(check_hooks.first_ratio, LOSS),
    Check(check_hooks.sampling, LOSS),
    Check(check_hooks.reference_kl, (*DATA, "action_probabilities")),
    Check(check_hooks.no_gradient_in_data, DATA),
    Check(check_hooks.ratio_moves, UPDATE),
    Check(check_hooks.weights_change, UPDATE),
    Check(check_gradients.padding, LOSS),
    Check(check_gradients.masked_steps, LOSS),
    Check(check_gradients.minibatch_order, LOSS),
    Check(check_gradients.accumulation, LOSS),
    Check(check_gradients.minibatches, (*DATA, "minibatches")),
    Check(check_hooks.stale_rollout, UPDATE),
    Check(check_hooks.training_after_load, UPDATE),
    Check(check_hooks.resume, ("policy", "num_timesteps")),
    Check(check_hooks.one_task_per_group, DATA),
)


class Result(NamedTuple):
    """One check: status is "passed", "failed" or "skipped"; message the remark, verdict or reason."""

    name: str
    status: str
    message: str


STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


@dataclass(frozen=True)
class Report:
    """The results of `check_agent`; printing it gives a table."""

    agent: str
    env_id: str
    results: list[Result]

    @property
    def passed(self) -> bool:
        """No check failed."""
        return not any(result.status == "failed" for result in self.results)

    def to_json(self) -> str:
        """``{"agent", "env_id", "passed", "results": [{"name", "status", "message"}, ...]}``."""
        results = [result._asdict() for result in self.results]
        head = {"agent": self.agent, "env_id": self.env_id, "passed": self.passed}
        return json.dumps({**head, "results": results})

    def __rich__(self) -> Group:
        statuses = [result.status for result in self.results]
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in STYLES)
        table = Table("check", "status", "what was seen")
        for name, status, message in self.results:
            table.add_row(name, Text(status, STYLES[status]), Text(message))
        return Group(Text(f"{self.agent} on {self.env_id}: {counts}"), table)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=110)
        console.print(self)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()


def check_agent(
    factory: str | Callable[..., Any],
    env_id: str = "CartPole-v1",
    seed: int = 0,
    n_envs: int | None = None,
    budget: int = 40_000,
) -> Report:
    """Check an agent; nothing it does wrong raises, a check that crashes is a failed one.

    Args:
        factory: a name for `agents.make` ("ppo", "sb3:PPO", "my_package.my_module:MyAgent"), or
            a callable ``factory(env, seed=...)`` that returns an agent.
        env_id: where it is checked. Learning and the reference have small environments of their own.
        seed: of the agents.
        n_envs: rows of the vector environment; 1 gives a plain Env, for agents that take no other.
            None is 1 for a class by its path, as everywhere else, and 2 for all others.
        budget: environment steps within which the agent must learn to name one of three contexts.

    Returns:
        A report with one result per check.

    Raises:
        ValueError: no agent has that name; n_envs or budget is below 1.
        gymnasium.error.Error: no environment has that id.
    """
    if n_envs is None:
        n_envs = 1 if isinstance(factory, str) and is_foreign(factory) else 2
    for name, value in (("n_envs", n_envs), ("budget", budget)):
        if value < 1:
            raise ValueError(f"{name}={value!r} must be >= 1")
    gym.spec(env_id)
    if isinstance(factory, str):
        registry.resolve(factory)
        label = factory
        build: Callable[..., Any] = partial(registry.make, factory)
    else:
        label, build = getattr(factory, "__qualname__", repr(factory)), factory
    with tempfile.TemporaryDirectory() as folder, global_states_kept(), single_thread():
        subject = Subject(build, env_id, seed, n_envs, budget, Path(folder))
        return Report(label, env_id, _run_all(subject))


def _run_all(subject: Subject) -> list[Result]:
    results = [_run(CHECKS[0], subject)]
    if results[0].status == "failed":
        reason = "the agent could not be built"
        return results + [Result(check.name, "skipped", reason) for check in CHECKS[1:]]
    agent = subject.fresh()
    for check in CHECKS[1:]:
        missing = [hook for hook in check.needs if not hasattr(agent, hook)]
        if missing:
            results.append(Result(check.name, "skipped", f"the agent has no {', '.join(missing)}"))
        else:
            results.append(_run(check, subject))
    return results


def _run(check: Check, subject: Subject) -> Result:
    try:
        return Result(check.name, "passed", check.run(subject) or "")
    except CheckSkipped as reason:
        return Result(check.name, "skipped", str(reason))
    except CheckFailed as verdict:
        return Result(check.name, "failed", str(verdict))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}"
        return Result(check.name, "failed", f"crashed with {type(error).__name__}: {error} ({where})")
