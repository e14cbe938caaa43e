"""The command line ``llmgym``: train, evaluate, resume and check any agent on any environment.

torch takes seconds to import, so a subcommand imports what it needs when it runs: ``--help`` and
``envs`` answer at once.
"""

from __future__ import annotations

import json as jsonlib
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from agents.run_folder import RunConfig, UserError, create_run, read_config, steps_of, versions
from agents.runs import EVALUATION_SEED, build, is_foreign, load_agent, make_env, user_errors
from agents.runs import evaluate as evaluate_agent
from agents.runs import train as train_run

if TYPE_CHECKING:
    from rich.console import Console

Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Runs = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
AgentName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="AGENT")]
Settings = Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE ...")]

OTHER_ENVIRONMENTS = (
    "any registered Gymnasium id (CartPole-v1), or 'package.module:Env-v0', which imports that module first"
)
OTHER_AGENTS = (
    "'package.module:Class', called as Class(env, seed=seed, **config), with learn, predict, save and load"
)


def envs(json: bool = False) -> int:
    """List the environments of this project, and how others plug in.

    Args:
        json: print one JSON object.
    """
    from gymnasium.envs.registration import load_env_creator

    from llmgym.registration import ENVIRONMENTS

    found = {e.id: _first_line(load_env_creator(e.entry_point).__doc__) for e in ENVIRONMENTS}
    if json:
        rows = [{"id": name, "description": text} for name, text in found.items()]
        return _print_json({"environments": rows, "others": OTHER_ENVIRONMENTS})
    for name, text in found.items():
        print(f"{name}  {text}")
    print(f"Others: {OTHER_ENVIRONMENTS}.")
    return 0


def agents(json: bool = False) -> int:
    """List the agents with the fields of their configuration, and how others plug in.

    Args:
        json: print one JSON object.
    """
    from dataclasses import fields
    from importlib import import_module

    from agents.registry import OURS
    from agents.sb3 import sb3_names

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "description": _first_line(import_module(module).__doc__),
            "config": {f.name: f.default for f in fields(getattr(import_module(module), config))},
        }
        for name, (module, _, config) in OURS.items()
    ]
    if json:
        return _print_json({"agents": rows, "sb3": sb3_names(), "others": OTHER_AGENTS})
    for row in rows:
        print(f"{row['name']}  {row['description']}")
        print("    " + "  ".join(f"{key}={jsonlib.dumps(value)}" for key, value in row["config"].items()))
    print(f"Stable-Baselines3: {', '.join(sb3_names())}.")
    print(f"Others: {OTHER_AGENTS}.")
    return 0


def train(
    env: str,
    out: Path,
    agent: str = "ppo",
    steps: int = 100_000,
    seed: int = 0,
    n_envs: int | None = None,
    config: Settings = (),
    env_kwargs: Settings = (),
    init: Path | None = None,
    checkpoint_every: int | None = None,
    json: bool = False,
) -> int:
    """Train an agent in a new run folder, with checkpoints, and evaluate it at the end.

    Args:
        env: a Gymnasium id (see `llmgym envs`).
        out: the run folder to make.
        agent: a name (see `llmgym agents`).
        steps: environment steps.
        seed: of the agent and of its environment.
        n_envs: parallel environments; None is 8, and 1 for a class that is neither ours nor SB3's.
        config: settings of the agent, as JSON or else text: n_steps=128 learning_rate=lin_0.001.
        env_kwargs: arguments of the environment, in the same form.
        init: a run folder whose trained weights to start from.
        checkpoint_every: environment steps between checkpoints; None is a twentieth of the run, and
            for a class that is neither ours nor SB3's one save at the end.
        json: print one JSON object and no progress bar.
    """
    run_config = RunConfig(
        env=env, env_kwargs=parse_settings("env-kwargs", env_kwargs),
        n_envs=n_envs if n_envs is not None else 1 if is_foreign(agent) else 8, agent=agent,
        config=parse_settings("config", config), seed=seed, steps=steps,
        init=None if init is None else str(init.resolve()), checkpoint_every=checkpoint_every,
    )  # fmt: skip
    built = build(run_config)  # first, so that a mistake leaves no folder behind
    create_run(out, run_config)
    return _report(out, run_config, train_run(out, run_config, *built, progress_bar=not json), json)


def evaluate(
    run: Run,
    episodes: int = 100,
    deterministic: bool = False,
    seed: int = EVALUATION_SEED,
    json: bool = False,
) -> int:
    """Evaluate the newest checkpoint of a run in a fresh environment.

    Args:
        run: the run folder.
        episodes: whole episodes.
        deterministic: take the most probable action instead of drawing one.
        seed: of the first episode.
        json: print one JSON object, with the return of each episode.
    """
    config = read_config(run)
    return _report(run, config, _evaluate(run, config, episodes, deterministic, seed), json)


def compare(
    runs: Runs,
    episodes: int = 100,
    deterministic: bool = False,
    seed: int = EVALUATION_SEED,
    json: bool = False,
) -> int:
    """Evaluate several runs on the same episodes and put them side by side, the best first.

    Args:
        runs: run folders, of any agents.
        episodes: whole episodes of each.
        deterministic: take the most probable action instead of drawing one.
        seed: of the first episode.
        json: print one JSON object.
    """
    rows: list[dict[str, Any]] = []
    for run in runs:
        config = read_config(run)
        result = _evaluate(run, config, episodes, deterministic, seed)
        who = {"run": str(run), "agent": config.agent, "env": config.env, "seed": config.seed}
        rows.append(who | result)
    rows.sort(key=lambda row: (row["env"], -row["evaluation"]["return_mean"]))
    if json:
        return _print_json({"runs": rows})
    from rich.table import Table

    table = Table("environment", "agent", "return", "standard error", "steps", "run")
    for row in rows:
        found, error = row["evaluation"], row["evaluation"]["return_standard_error"]
        table.add_row(row["env"], row["agent"], f"{found['return_mean']:.2f}",
                      "-" if error is None else f"{error:.2f}", f"{row['steps']:,}", row["run"])  # fmt: skip
    _console().print(table)
    return 0


def _evaluate(
    run: Path, config: RunConfig, episodes: int, deterministic: bool, seed: int
) -> dict[str, Any]:
    if episodes < 1:
        raise UserError(f"episodes={episodes} must be at least 1")
    env = make_env(config)
    agent, path = load_agent(run, config, env)
    with user_errors(f"evaluation of {path}", show_place=is_foreign(config.agent)):
        evaluation = evaluate_agent(agent, config, episodes, deterministic, seed)
    env.close()
    return {"steps": steps_of(path), "checkpoint": str(path.relative_to(run)), "evaluation": evaluation}


def resume(run: Run, json: bool = False) -> int:
    """Go on with a run that was stopped, in whatever way, to the numbers of one that never stopped.

    Args:
        run: the run folder.
        json: print one JSON object and no progress bar.
    """
    config = read_config(run)
    done = run / "result.json"
    if done.exists():
        print(f"{run} is finished; this is its result", file=sys.stderr)
        return _report(run, config, jsonlib.loads(done.read_text(encoding="utf-8")), json)
    before = jsonlib.loads((run / "versions.json").read_text(encoding="utf-8"))
    changed = [f"{k} {before.get(k)} -> {v}" for k, v in versions().items() if before.get(k) != v]
    if changed:
        warnings.warn(f"other versions than the run began with, its numbers may differ: {', '.join(changed)}",
                      stacklevel=1)  # fmt: skip
    result = train_run(run, config, *build(config), progress_bar=not json, resume=True)
    return _report(run, config, result, json)


def check(
    agent: AgentName, env: str = "CartPole-v1", seed: int = 0, n_envs: int | None = None, json: bool = False
) -> int:
    """Check that an agent keeps its promises: spaces, seeds, saving, learning, and its mathematics.

    Args:
        agent: a name (see `llmgym agents`), most usefully package.module:Class.
        env: the environment to check it on.
        seed: of the agents and environments.
        n_envs: parallel environments; None is 2, and 1 for a class that is neither ours nor SB3's.
        json: print one JSON object.
    """
    from agents.checking import check_agent

    rows = n_envs if n_envs is not None else 1 if is_foreign(agent) else 2
    make_env(RunConfig(env, {}, rows, agent, {}, seed, 1)).close()  # for its message about unknown ids
    with user_errors(f"agent {agent!r}"):
        report = check_agent(agent, env, seed=seed, n_envs=rows)
    if json:
        print(report.to_json())
    else:
        _console().print(report)
    return 0 if report.passed else 1


def parse_settings(option: str, settings: Sequence[str]) -> dict[str, Any]:
    """``["gamma=0.9", "learning_rate=lin_0.001"]`` as a dict; values are JSON, or else text.

    Raises:
        UserError: a setting without "=", or one given twice.
    """
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise UserError(f"--{option} {setting!r} must have the form key=value, such as gamma=0.9")
        if key in parsed:
            raise UserError(f"--{option} gives {key!r} twice")
        try:
            parsed[key] = jsonlib.loads(text)
        except ValueError:
            parsed[key] = text
    return parsed


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    0: done. 1: `check` found something. 2: an error, which is one line. 130: interrupted.
    """
    arguments = sys.argv[1:] if args is None else list(args)
    commands: dict[str, Any] = {
        "envs": envs, "agents": agents, "train": train, "evaluate": evaluate, "compare": compare,
        "resume": resume, "check": check,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.showwarning = _one_line_warning
        try:
            return tyro.extras.subcommand_cli_from_dict(
                commands,
                prog="llmgym",
                description="Train, evaluate, resume and check agents, each run in a folder of its own.",
                args=arguments,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
        except UserError as error:
            message = " ".join(str(error).split())
            if "--json" in arguments:
                _print_json({"error": message})
            print(f"error: {message}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("interrupted; `llmgym resume` goes on from the last checkpoint", file=sys.stderr)
            return 130


def _report(run: Path, config: RunConfig, result: dict[str, Any], json: bool) -> int:
    if json:
        return _print_json({"run": str(run), **result})
    found = result["evaluation"]
    spread = found["return_standard_error"]
    error = "" if spread is None else f" ± {spread:.2f} (standard error)"
    print(f"{config.agent} on {config.env}, seed {config.seed}, after {result['steps']:,} steps")
    print(f"return      {found['return_mean']:.2f}{error}, {found['episodes']} episodes")
    print(f"length      {found['length_mean']:.1f}")
    print(f"checkpoint  {run / result['checkpoint']}")
    if (run / "metrics.jsonl").exists():
        print(f"metrics     {run / 'metrics.jsonl'} (or: tensorboard --logdir {run})")
    if not result.get("exact", True):
        print("This run was resumed, but not exactly: a run that never stopped has other numbers.")
    return 0


def _print_json(value: dict[str, Any]) -> int:
    print(jsonlib.dumps(value))
    return 0


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def _console() -> Console:
    from rich.console import Console

    return Console()


def _one_line_warning(message: Any, *_: Any, **__: Any) -> None:
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
