"""Process rewards change the credit and not the objective; the arithmetic of the curves by hand."""

import json
from pathlib import Path

import numpy as np
import pytest

import token_credit as script
from common.runner import Outcome
from common.tables import make_console

CURVE = {"tokens": [0, 10, 20, 30], "reward": [0.0, 1.0, 2.0, 5.0], "kl": [10.0, 10.0, 0.0, 10.0]}


def test_both_rewards_have_one_objective_and_another_gradient():
    config = {"gae_lambda": 0.95, "beta": 0.1, "steps": 1_500, "seed": 0}
    token, end = (script.train(config | {"reward_at": at}, Path()) for at in ("token", "end"))
    # The same weights and seeds: the first rollout is the same, and so is its total reward.
    for name in ("tokens", "reward", "kl"):
        assert token[name][0] == pytest.approx(end[name][0], abs=1e-5)
    assert token["kl"][1] != end["kl"][1]
    assert len(token["tokens"]) > 1 and token["tokens"][0] == 0


def test_curves_by_hand():
    np.testing.assert_allclose(script.objective(CURVE, 0.1), [-1.0, 0.0, 2.0, 4.0])
    values = np.arange(20.0)
    means = script.smoothed(values)
    assert means[0] == 0.0 and means[3] == 1.5 and means[19] == np.mean(values[10:])
    assert script.crossing(CURVE, 0.1, 0.2) == 20  # means -1, -0.5, 0.33, 1.25
    assert script.crossing(CURVE, 0.1, 2.0) is None


def test_report(tmp_path, capsys):
    args = script.Args(gae_lambda=(0.95,), runs=2, beta=0.1, out=tmp_path)
    outcomes = []
    for job in script.make_jobs(args):
        gain = 1.0 if job.config["reward_at"] == "token" else 0.0
        curve = CURVE | {"reward": [r + gain for r in CURVE["reward"]]}
        outcomes.append(Outcome(job, tmp_path, curve))
    script.report(make_console(), args, outcomes)
    assert "worth 1.00 [1.00, 1.00] of the objective" in capsys.readouterr().out.replace("\n", " ")
    summary = json.loads((tmp_path / "summary.json").read_text())
    token, end = summary["rows"]
    assert token["objective"]["value"] == pytest.approx(5.0) and end["objective"]["value"] == 4.0
    # The optimum at beta 0.1 is 4.65.
    assert end["kl_opt"]["value"] == pytest.approx((summary["optimum"] - 4.0) / 0.1)
    assert summary["optimum"] == pytest.approx(4.65, abs=0.005)
    assert (tmp_path / "token_credit.png").stat().st_size > 10_000


@pytest.mark.parametrize("option, value", [("steps", 0), ("beta", 0.0), ("gae_lambda", (1.5,))])
def test_bad_options_are_named(option, value, capsys):
    assert script.main(script.Args(**{option: value})) == 2
    assert f"--{option.replace('_', '-')} is" in capsys.readouterr().out
