"""The command line, on real runs."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import agents
from agents.checkpoint import checkpoints, newest_state
from agents.cli import main, parse_settings
from agents.ppo import PPO
from agents.run_folder import RunConfig, UserError, create_run, foreign_saves, read_config, save_foreign
from agents.runs import evaluate

ROOT = Path(__file__).parents[2]
STRANGER = "stranger:Bandit"
QUICK = ["n_steps=32", "batch_size=128", "n_epochs=2", "learning_rate=lin_0.003"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def environment_with_path() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def llmgym(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agents.cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=environment_with_path(), **kwargs)


def run_json(capsys: pytest.CaptureFixture[str], *args: Any) -> dict[str, Any]:
    """One subcommand in this process with --json; its one object."""
    capsys.readouterr()
    status = main([*map(str, args), "--json"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    assert len(captured.out.splitlines()) == 1
    return json.loads(captured.out)


def train_args(out: Path, *more: Any, env: str = "CartPole-v1", steps: int = 1000) -> list[str]:
    given = ["train", "--env", env, "--out", out, "--steps", steps, "--seed", 3, *more]
    return [str(arg) for arg in given]


# --------------------------------------------------------------------------- without torch


@pytest.mark.parametrize("args", [["--help"], ["train", "--help"], ["envs"], ["envs", "--json"]])
def test_torch_is_not_imported_where_it_is_not_needed(args):
    code = (
        "import sys\nfrom agents.cli import main\n"
        f"try:\n    main({args!r})\nexcept SystemExit as e:\n    assert e.code == 0, e.code\n"
        "print(sorted({'torch', 'stable_baselines3', 'tensorboard'} & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment_with_path(), check=True)
    assert done.stderr.splitlines()[-1] == "[]"
    assert done.stdout.strip()


def test_help_shows_every_default():
    text = " ".join(llmgym("train", "--help").stdout.replace("│", " ").split())
    for default in ("(default: ppo)", "(default: 100000)", "(default: 0)", "(default: None)"):
        assert default in text
    assert "twentieth of the run" in text and "(required)" in text


def test_envs_and_agents_list_what_there_is(capsys):
    found = run_json(capsys, "envs")
    assert {"AnswerPool-v0", "TokenGeneration-v0"} <= {e["id"] for e in found["environments"]}
    assert all(e["description"].endswith(".") for e in found["environments"])
    found = run_json(capsys, "agents")
    by_name = {a["name"]: a["config"] for a in found["agents"]}
    assert sorted(by_name) == agents.names()
    assert by_name["ppo"]["gae_lambda"] == 0.95 and by_name["reinforce"]["baseline"] == "value"
    assert "sb3:PPO" in found["sb3"]
    assert main(["agents"]) == 0 and main(["envs"]) == 0
    text = capsys.readouterr().out
    assert "gae_lambda=0.95" in text and "AnswerPool-v0" in text and "package.module" in text


# --------------------------------------------------------------------------- train, evaluate, resume


def test_a_run_is_a_folder_that_says_all(tmp_path):
    out = tmp_path / "runs" / "one"
    more = ["--n-envs", 4, "--config", *QUICK, "--env-kwargs", "max_episode_steps=100"]
    done = llmgym(*train_args(out, *more))
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and str(out / "metrics.jsonl") in done.stdout and "return " in done.stdout
    config = json.loads((out / "config.json").read_text())
    assert config == {
        "env": "CartPole-v1", "env_kwargs": {"max_episode_steps": 100}, "n_envs": 4, "agent": "ppo",
        "config": {"n_steps": 32, "batch_size": 128, "n_epochs": 2, "learning_rate": "lin_0.003"},
        "seed": 3, "steps": 1000, "init": None, "checkpoint_every": None,
    }  # fmt: skip
    found = json.loads((out / "versions.json").read_text())
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["gymnasium"] == gym.__version__
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    result = json.loads((out / "result.json").read_text())
    assert result["steps"] == lines[-1]["step"] >= 1000 > lines[-2]["step"]
    assert result["exact"] is True and (out / result["checkpoint"]).exists()
    assert len(result["evaluation"]["returns"]) == 20 and max(result["evaluation"]["returns"]) <= 100
    assert list(out.glob("events.*"))
    # The same numbers as the library gives in this process.
    env = gym.make_vec("CartPole-v1", num_envs=4, max_episode_steps=100)
    agent = agents.make("ppo", env, seed=3, **config["config"]).learn(1000)
    state = newest_state(out)
    assert state is not None
    for name, weights in agent.policy.state_dict().items():
        assert torch.equal(weights, state["policy"][name])


def test_compare_puts_the_best_run_first(tmp_path, capsys):
    for name, rate in (("still", 0.0), ("learned", 0.01)):
        options = ("--n-envs", 4, "--steps", 4000, "--config", "n_steps=32", f"learning_rate={rate}")
        run_json(capsys, "train", "--env", "CartPole-v1", "--out", tmp_path / name, *options)
    found = run_json(capsys, "compare", tmp_path / "still", tmp_path / "learned", "--episodes", 20)["runs"]
    assert [Path(row["run"]).name for row in found] == ["learned", "still"]
    for row in found:
        alone = run_json(capsys, "evaluate", row["run"], "--episodes", 20)
        assert row["evaluation"] == alone["evaluation"] and row["agent"] == "ppo"
    assert main(["compare", str(tmp_path / "still"), "--episodes", "2"]) == 0
    assert "CartPole-v1" in capsys.readouterr().out
    assert "no-such-run" in error_of(capsys, "compare", tmp_path / "still", tmp_path / "no-such-run")


def test_evaluate_plays_the_newest_checkpoint(tmp_path, capsys):
    trained = run_json(capsys, *train_args(tmp_path / "a", "--n-envs", 4, "--config", *QUICK))
    again = run_json(capsys, "evaluate", tmp_path / "a", "--episodes", 20)
    assert again["evaluation"] == trained["evaluation"] and again["steps"] == trained["steps"]
    greedy = run_json(capsys, "evaluate", tmp_path / "a", "--episodes", 7, "--deterministic", "--seed", 5)
    # The oracle: the loop written out.
    agent = PPO.load(checkpoints(tmp_path / "a")[0], gym.make("CartPole-v1"))
    env, returns = gym.make("CartPole-v1"), []
    for episode in range(7):
        observation, _ = env.reset(seed=5 if episode == 0 else None)
        total, over = 0.0, False
        while not over:
            action, _ = agent.predict(observation, deterministic=True)
            observation, reward, terminated, truncated, _ = env.step(action)
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    found = greedy["evaluation"]
    assert found["returns"] == returns and found["length_mean"] == np.mean(returns)
    assert found["return_standard_error"] == pytest.approx(np.std(returns, ddof=1) / np.sqrt(7))


@pytest.mark.parametrize(
    "agent, env, more",
    [
        ("reinforce", "CartPole-v1", ["--n-envs", 2]),
        ("ppo", "AnswerPool-v0", ["--config", "n_steps=16", "beta=0.1", "--env-kwargs", "noise=0.1"]),
        ("ppo", "AnswerPool-v0", ["--config", "n_steps=16", "--env-kwargs", "autoreset_mode=disabled"]),
        ("ppo", "Pendulum-v1", ["--n-envs", 2, "--config", "n_steps=50"]),
        ("sb3:PPO", "AnswerPool-v0", ["--config", "n_steps=16", "beta=0.1"]),
        ("sb3:SAC", "Pendulum-v1", ["--n-envs", 1, "--config", "learning_starts=350"]),
        (STRANGER, "AnswerPool-v0", ["--config", "optimism=2.5"]),
    ],
)
def test_every_kind_of_agent_trains_and_is_evaluated(tmp_path, capsys, agent, env, more):
    out = tmp_path / "run"
    trained = run_json(capsys, *train_args(out, "--agent", agent, *more, env=env, steps=400))
    assert trained["steps"] >= 400 and trained["exact"] is True
    again = run_json(capsys, "evaluate", out, "--episodes", 3)
    assert again["checkpoint"] == trained["checkpoint"]
    assert np.isfinite(again["evaluation"]["returns"]).all()
    if agent == STRANGER:
        assert read_config(out).n_envs == 1 and not (out / "metrics.jsonl").exists()
    elif agent != "sb3:SAC":  # which logs every fourth episode, and has only had two
        lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
        assert lines and lines[-1]["step"] <= trained["steps"]


def test_init_starts_from_trained_weights(tmp_path, capsys):
    first = run_json(capsys, *train_args(tmp_path / "a", "--n-envs", 4, "--config", *QUICK))
    # A learning rate of 0 leaves the weights as they began.
    run_json(
        capsys,
        *train_args(tmp_path / "b", "--agent", "reinforce", "--init", tmp_path / "a", "--n-envs", 2,
                    "--config", "learning_rate=0.0", steps=50),
    )  # fmt: skip
    a, b = newest_state(tmp_path / "a"), newest_state(tmp_path / "b")
    assert a is not None and b is not None and a["num_timesteps"] == first["steps"]
    for name, weights in a["policy"].items():
        assert torch.equal(weights, b["policy"][name])
    assert read_config(tmp_path / "b").init == str(tmp_path / "a")


def wait_for(condition: Any, process: subprocess.Popen[bytes]) -> None:
    while not condition() and process.poll() is None:
        time.sleep(0.005)


def test_killed_runs_resume_to_the_numbers_of_an_unbroken_one(tmp_path, capsys):
    """kill -9 at random moments of a real process; checkpoints are dense, to be hit while written."""
    args = ["--n-envs", 4, "--checkpoint-every", 1, "--config", *QUICK]
    unbroken = run_json(capsys, *train_args(tmp_path / "a", *args, steps=10_000))
    out, moments, kills = tmp_path / "b", random.Random(0), 0
    for attempt in range(3):
        arguments = train_args(out, *args, steps=10_000) if attempt == 0 else ["resume", str(out)]
        before = checkpoints(out)[:1]
        process = subprocess.Popen(
            [sys.executable, "-m", "agents.cli", *arguments], env=environment_with_path(),
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        wait_for(lambda: checkpoints(out)[:1] != before, process)  # noqa: B023 (called in this turn)
        time.sleep(moments.uniform(0.0, 0.3))
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        kills += process.returncode == -signal.SIGKILL
        assert process.returncode in (0, -signal.SIGKILL), errors.decode()
        assert read_config(out).steps == 10_000 and newest_state(out) is not None
        assert len(checkpoints(out)) <= 3
    assert kills > 0
    resumed = run_json(capsys, "resume", out)
    assert resumed["exact"] is True and resumed["evaluation"] == unbroken["evaluation"]
    assert (out / "metrics.jsonl").read_bytes() == (tmp_path / "a/metrics.jsonl").read_bytes()
    a, b = newest_state(tmp_path / "a"), newest_state(out)
    assert a is not None and b is not None
    assert all(torch.equal(weights, b["policy"][name]) for name, weights in a["policy"].items())


def test_resume_of_a_finished_run_prints_its_result(tmp_path, capsys):
    trained = run_json(capsys, *train_args(tmp_path / "a", "--n-envs", 4, "--config", *QUICK))
    assert run_json(capsys, "resume", tmp_path / "a") == trained


def test_sb3_resumes_from_its_own_save_and_says_that_it_is_not_exact(tmp_path, capsys):
    out = tmp_path / "a"
    args = ["--agent", "sb3:PPO", "--n-envs", 2, "--checkpoint-every", 100, "--config", "n_steps=50",
            "learning_rate=lin_0.01"]  # fmt: skip
    run_json(capsys, *train_args(out, *args, steps=400))
    # As a kill would have left it: no result, the last save lost.
    (out / "result.json").unlink()
    saves = foreign_saves(out)
    assert [int(s.name) for s in saves] == [400, 300]
    saves[0].rename(saves[0].with_suffix(".tmp"))
    assert main(["resume", str(out)]) == 0
    assert not list(out.rglob("*.tmp"))
    captured = capsys.readouterr()
    assert "resumed at step 300, but not exactly" in captured.err and "not exactly" in captured.out
    result = json.loads((out / "result.json").read_text())
    assert result["exact"] is False and result["steps"] == 400
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [100, 200, 300, 400]
    # The schedule went on where it was: of four updates the last is at no progress left.
    model = agents.load("sb3:PPO", out / result["checkpoint"] / "agent", gym.make("CartPole-v1"))
    assert model.num_timesteps == 400 and model.policy.optimizer.param_groups[0]["lr"] == 0.0
    before = agents.load("sb3:PPO", foreign_saves(out)[1] / "agent", gym.make("CartPole-v1"))
    assert before.policy.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 4)


def test_a_strangers_agent_resumes_from_its_last_save(tmp_path, capsys):
    out = tmp_path / "a"
    args = ["--agent", STRANGER, "--checkpoint-every", 100]
    run_json(capsys, *train_args(out, *args, env="AnswerPool-v0", steps=250))
    assert [s.name for s in foreign_saves(out)] == ["000000000250", "000000000200"]
    assert (foreign_saves(out)[0] / "agent.json").exists()
    (out / "result.json").unlink()
    foreign_saves(out)[0].rename(out / "elsewhere")
    resumed = run_json(capsys, "resume", out)
    assert resumed["steps"] == 250 and resumed["exact"] is False


def test_a_save_appears_whole_or_not_at_all(tmp_path):
    class Half:
        def save(self, path: str) -> None:
            Path(path).write_text("half")
            raise RuntimeError

    class Whole:
        def save(self, path: str) -> None:
            Path(path).write_text("whole")

    with pytest.raises(RuntimeError):
        save_foreign(tmp_path, Half(), 10)
    assert foreign_saves(tmp_path) == []
    for step in (10, 20, 30, 30):
        save_foreign(tmp_path, Whole(), step)
    assert [int(s.name) for s in foreign_saves(tmp_path)] == [30, 20]
    assert (foreign_saves(tmp_path)[0] / "agent").read_text() == "whole"


# --------------------------------------------------------------------------- errors


def error_of(capsys: pytest.CaptureFixture[str], *args: Any) -> str:
    capsys.readouterr()
    assert main([str(arg) for arg in args]) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in captured.err
    return lines[0]


@pytest.mark.parametrize(
    "more, message",
    [
        (["--env", "CartPol-v1"], "did you mean 'CartPole-v1'"),
        (["--env", "NoSuchThing-v9"], "unknown environment 'NoSuchThing-v9'"),
        (["--env", "no_such_module:Env-v0"], "no_such_module"),
        (["--env-kwargs", "gravitas=1"], "gravitas"),
        (["--agent", "ppq"], "did you mean 'ppo'"),
        (["--agent", "sb3:PPQ"], "sb3:PPO"),
        (["--agent", "no_such_module:Agent"], "PYTHONPATH"),
        (["--agent", "stranger:Bandits"], "did you mean 'Bandit'"),
        (["--agent", STRANGER, "--config", "optimsm=1"], r"optimsm"),
        (["--agent", "sb3:PPO", "--config", "gama=1"], "did you mean 'gamma'"),
        (["--config", "gama=1"], "did you mean 'gamma'"),
        (["--config", "gamma=2"], r"gamma=2 must be in \[0, 1\]"),
        (["--config", "gamma"], "key=value"),
        (["--config", "gamma=0.9", "gamma=0.8"], "twice"),
        (["--config", "learning_rate=line_0.1"], "lin_0.001"),
        (["--steps", "0"], "steps=0 must be at least 1"),
        (["--n-envs", "0"], "n_envs=0 must be at least 1"),
        (["--checkpoint-every", "0"], "checkpoint_every=0 must be at least 1"),
        (["--init", "/nowhere"], "no config.json"),
    ],
)
def test_errors_are_one_line_with_the_fix_and_leave_no_folder(tmp_path, capsys, more, message):
    args = ["train", "--out", tmp_path / "x", "--n-envs", 2]
    if "--n-envs" in more:
        args = args[:3]
    if "--env" not in more:
        args += ["--env", "CartPole-v1"]
    line = error_of(capsys, *args, *more)
    assert re.search(message, line), line
    assert list(tmp_path.iterdir()) == []


def test_weights_of_another_shape_are_refused(tmp_path, capsys):
    run_json(capsys, *train_args(tmp_path / "a", "--n-envs", 2, "--config", *QUICK, steps=100))
    args = train_args(tmp_path / "b", "--init", tmp_path / "a", env="AnswerPool-v0")
    assert "do not fit a TablePolicy" in error_of(capsys, *args)
    args = train_args(tmp_path / "b", "--init", tmp_path / "a", "--agent", "sb3:PPO")
    assert "needs one of our agents" in error_of(capsys, *args)


def test_existing_folders_are_refused_with_the_fix(tmp_path, capsys):
    run_json(capsys, *train_args(tmp_path / "a", "--n-envs", 2, "--config", *QUICK, steps=100))
    assert "llmgym resume" in error_of(capsys, *train_args(tmp_path / "a"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b/thesis.tex").write_text("years of work")
    assert "another --out" in error_of(capsys, *train_args(tmp_path / "b"))
    (tmp_path / "c").mkdir()  # an empty folder is welcome
    run_json(capsys, *train_args(tmp_path / "c", "--n-envs", 2, "--config", *QUICK, steps=100))


def test_errors_are_json_for_machines(capsys, tmp_path):
    assert main([*train_args(tmp_path / "x", env="CartPol-v1"), "--json"]) == 2
    assert "CartPole-v1" in json.loads(capsys.readouterr().out)["error"]


def test_folders_that_are_no_runs(tmp_path, capsys):
    for command in ("resume", "evaluate"):
        assert "no config.json" in error_of(capsys, command, tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "not a run's configuration" in error_of(capsys, "resume", tmp_path)
    create_run(tmp_path / "new", RunConfig("CartPole-v1", {}, 2, "ppo", {}, 0, 100))
    assert "no checkpoint yet" in error_of(capsys, "evaluate", tmp_path / "new")
    assert "episodes=0" in error_of(capsys, "evaluate", tmp_path / "new", "--episodes", 0)


def test_a_bug_in_training_leaves_its_traceback_in_the_folder(tmp_path, capsys):
    args = train_args(tmp_path / "x", "--agent", "stranger:Faulty", env="AnswerPool-v0")
    line = error_of(capsys, *args)
    assert "a bug of the stranger's own" in line and "error.txt" in line
    assert "ZeroDivisionError" in (tmp_path / "x/error.txt").read_text()


def test_an_unknown_subcommand_is_no_traceback():
    done = llmgym("trian")
    assert done.returncode == 2 and "Traceback" not in done.stderr and "train" in done.stdout + done.stderr


# --------------------------------------------------------------------------- pieces


def test_settings_are_json_or_text():
    given = ["a=1", "b=0.5", "c=null", "d=true", "e=[64, 64]", 'f={"net_arch": [8]}', "g=lin_0.001", "h=x=y"]
    assert parse_settings("config", given) == {
        "a": 1, "b": 0.5, "c": None, "d": True, "e": [64, 64], "f": {"net_arch": [8]}, "g": "lin_0.001",
        "h": "x=y",
    }  # fmt: skip
    with pytest.raises(UserError, match="key=value"):
        parse_settings("config", ["=1"])


def test_evaluation_carries_the_recurrent_state():
    """An agent that counts its own steps in its state sees it go from 0 in every episode."""
    seen = []

    class Counting:
        def predict(self, observation, state=None, episode_start=None, deterministic=False):
            state = 0 if state is None else state
            seen.append((state, bool(episode_start[0])))
            return state % 2, state + 1

    result = evaluate(Counting(), RunConfig("CartPole-v1", {}, 1, "ppo", {}, 0, 1), episodes=2)
    starts = [i for i, (state, _) in enumerate(seen) if state == 0]
    assert [i for i, (_, start) in enumerate(seen) if start] == starts and len(starts) == 2
    assert len(seen) == sum(result["returns"])


def test_check_reports_and_sets_the_exit_status(capsys):
    status = main(["check", STRANGER, "--env", "AnswerPool-v0", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert status == (0 if report["passed"] else 1)
    assert {r["status"] for r in report["results"]} <= {"passed", "failed", "skipped"}
    assert len(report["results"]) > 5
    assert "did you mean 'ppo'" in error_of(capsys, "check", "ppq")
    assert "did you mean 'CartPole-v1'" in error_of(capsys, "check", "ppo", "--env", "CartPol-v1")
