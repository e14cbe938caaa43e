"""The DPO benchmark: its prediction against simulation, its verdicts, and a small run."""

from __future__ import annotations

import json

import numpy as np
import pytest

import dpo_pairs as script
from common.stats import Estimate
from llmgym import AnswerPool


def test_the_prediction_for_two_answers_by_hand():
    """A uniform reference, equal rewards, beta 1: half the pairs differ, each with information 1/4.

    The difference d of the two log-probs has variance 8 / n, and KL = d^2 / 8 at the optimum (1/2, 1/2).
    """
    pool = AnswerPool(np.zeros((1, 2)), np.zeros((1, 2)), np.full((1, 2), 0.5))
    assert script.predicted_error(pool, 1.0) == pytest.approx(1.0)
    # The information grows with beta^2; two prompts get half of the pairs each.
    assert script.predicted_error(pool, 0.5) == pytest.approx(4.0)
    two = AnswerPool(np.zeros((2, 2)), np.zeros((2, 2)), np.full((2, 2), 0.5))
    assert script.predicted_error(two, 1.0) == pytest.approx(2.0)


def test_sampled_pairs_follow_the_reference_and_the_rewards():
    pool = AnswerPool.random(2, 3, seed=0)
    n = 20_000
    preferences = script.sample(pool, n, seed=0)
    chosen, rejected = preferences.chosen, preferences.rejected
    assert (chosen.observations == rejected.observations).all() and len(preferences) == n
    for prompt in range(2):
        here = chosen.observations == prompt
        drawn = np.concatenate([chosen.actions[here], rejected.actions[here]])
        share = np.bincount(drawn, minlength=3) / len(drawn)
        ref = pool.ref_probs[prompt]
        assert (np.abs(share - ref) < 4 * np.sqrt(ref * (1 - ref) / len(drawn))).all()
        for a, b in ((0, 1), (1, 2)):
            wins = ((chosen.actions == a) & (rejected.actions == b) & here).sum().item()
            losses = ((chosen.actions == b) & (rejected.actions == a) & here).sum().item()
            p = 1 / (1 + np.exp(pool.proxy[prompt, b] - pool.proxy[prompt, a]))
            error = np.sqrt(p * (1 - p) / (wins + losses))
            assert abs(wins / (wins + losses) - p) < 4 * error


def row(mean: float) -> script.Row:
    return script.Row(1000, 0.5, Estimate(mean, None, None, 3), [mean] * 3)


@pytest.mark.parametrize(("kl", "ending"), [(1e-4, "met."), (1.1e-4, "MISSED.")])
def test_verdicts_go_both_ways(kl, ending):
    first, last = script.verdicts(kl, [row(0.4)])
    assert first.endswith(ending) and "mean KL 0.4000 over 3 data sets" in last and "0.5000" in last


@pytest.mark.parametrize("option", [{"pairs": ()}, {"pairs": (0,)}, {"runs": 0}, {"epochs": 0},
                                    {"beta": 0.0}, {"learning_rate": -1.0}])  # fmt: skip
def test_bad_options_are_named(option, capsys):
    assert script.main(script.Args(**option)) == 2
    assert next(iter(option)).replace("_", "-") in capsys.readouterr().out


def test_a_small_run_writes_its_files(tmp_path):
    args = script.Args(pairs=(500, 2000), runs=2, out=tmp_path)
    assert script.main(args) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["population_kl"] < 1e-4
    assert [r["pairs"] for r in summary["rows"]] == [500, 2000] and len(summary["rows"][0]["kl"]) == 2
    assert (tmp_path / "dpo_pairs.png").stat().st_size > 10_000
