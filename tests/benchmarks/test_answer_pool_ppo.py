"""The answer-pool benchmark: what it measures, what it asks of agents, and its verdicts both ways."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import answer_pool_ppo as script
from common.stats import Estimate
from llmgym import AnswerPool

POOL = AnswerPool(
    proxy=np.array([[1.0, 0.0]]), gold=np.array([[-1.0, 2.0]]), ref_probs=np.array([[0.5, 0.5]])
)


def test_measures_of_a_known_policy() -> None:
    policy = np.array([[0.8, 0.2]])
    best = np.e / (np.e + 1)  # the optimum at beta 1: softmax of (1, 0)
    found = script.measure(POOL, policy, beta=1.0)
    assert found["proxy"] == pytest.approx(0.8)
    assert found["gold"] == pytest.approx(-0.8 + 0.4)
    assert found["kl_ref"] == pytest.approx(0.8 * np.log(1.6) + 0.2 * np.log(0.4))
    assert found["kl_opt"] == pytest.approx(0.8 * np.log(0.8 / best) + 0.2 * np.log(0.2 / (1 - best)))
    assert (found["p_max"], found["p_best"]) == pytest.approx((0.8, 0.8))
    assert script.measure(POOL, policy, beta=0.0)["kl_opt"] is None


def test_a_confident_policy_on_the_wrong_answer_shows() -> None:
    found = script.measure(POOL, np.array([[0.1, 0.9]]), beta=0.0)
    assert (found["p_max"], found["p_best"]) == pytest.approx((0.9, 0.1))


def row(
    beta: float, samples: int, gold: float = 0.0, kl: float | None = None, best: float = 0.0
) -> script.Row:
    exact = {name: Estimate(0.0, None, None, 10) for name in script.MEASURES}
    exact |= {
        "gold": Estimate(gold, None, None, 10),
        "kl_opt": Estimate(kl, None, None, 10),
        "p_best": Estimate(best, None, None, 10),
    }
    return script.Row("ppo", samples, beta, 10, **exact)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "endings"),
    [
        ([row(1.0, 64, kl=0.02)], ["met"]),
        ([row(1.0, 64, kl=0.0201)], ["MISSED"]),
        ([row(0.3, 256, kl=0.0101)], ["MISSED"]),
        ([row(0.1, 64, kl=5.0)], []),  # no target was set for it
        ([row(0.0, 64, gold=0.6, best=0.995), row(0.3, 64, gold=0.9, kl=0.03)], ["met", "met", "yes"]),
        ([row(0.0, 64, gold=0.9, best=0.98), row(0.3, 64, gold=0.9, kl=0.03)], ["MISSED", "met", "NO"]),
    ],
)
def test_verdicts(rows: list[script.Row], endings: list[str]) -> None:
    assert [line.split()[-1] for line in script.verdicts(rows)] == endings


def test_settings_go_to_the_fields_an_agent_has() -> None:
    args = script.Args(agent="reinforce")
    config = script.agent_config(args, 0.3, 64)
    assert config["beta"] == 0.3 and config["baseline"] == "batch_mean"
    assert not {"n_steps", "clip_range", "gae_lambda"} & set(config)
    assert script.agent_config(script.Args(), 0.3, 64)["batch_size"] == 64


class Stranger:
    def __init__(self, env: object, seed: int | None = None, learning_rate: float = 0.1, gamma: float = 0.9):
        raise NotImplementedError


def test_a_custom_class_keeps_its_own_settings() -> None:
    name = f"{__name__}:Stranger"
    assert script.agent_config(script.Args(agent=name), 0.0, 64) == {}
    asked = script.Args(agent=name, learning_rate=0.5)
    assert script.agent_config(asked, 0.0, 64) == {"learning_rate": 0.5}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--beta", "-1"], "--beta"),
        (["--samples", "1"], "--samples"),
        (["--runs", "0"], "--runs"),
        (["--agent", "pppo"], "'ppo'"),
    ],
)
def test_bad_options_are_one_line(options: list[str], said: str, tmp_path: Path) -> None:
    command = [sys.executable, script.__file__, *options, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stdout and "Traceback" not in done.stdout + done.stderr


def test_a_short_run_writes_what_it_says(tmp_path: Path) -> None:
    options = ["--beta", "0", "1", "--samples", "16", "--rounds", "5", "--runs", "2"]
    command = [sys.executable, script.__file__, *options, "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(r["beta"], r["samples"], r["seed"]) for r in summary["runs"]] == [
        (0, 16, 0), (0, 16, 1), (1, 16, 0), (1, 16, 1)
    ]  # fmt: skip
    # Five small rounds move the policy, from the reference, a little.
    assert all(0 < r["kl_ref"] < 0.5 for r in summary["runs"])
    assert len((tmp_path / "summary.csv").read_text().splitlines()) == 3
    assert (tmp_path / "frontier.png").stat().st_size > 10_000
