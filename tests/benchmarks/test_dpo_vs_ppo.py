"""Distance and accuracy against other ways to find them, costs, and every run function on tiny data."""

import json
import sys

import numpy as np
import pytest
import torch

import dpo_vs_ppo as script
from agents.policies.base import Evaluation
from common import dpo_arms, dpo_report
from common.rlhf_pipeline import draw_preferences, gold_accuracy, gold_task, make_policy, score_records
from common.runner import Outcome
from common.tables import make_console
from llmgym.token_solution import TokenSolution

TINY = {"seed": 3, "beta": 0.8, "sft_samples": 64, "pairs": 64, "samples": 64}


@pytest.fixture(autouse=True)
def few_held_out_pairs(monkeypatch):
    monkeypatch.setattr(dpo_arms, "HELD_OUT_PAIRS", 128)
    monkeypatch.setattr(dpo_arms, "NORMALISATION_SAMPLES", 64)


class Scored:
    """A policy of which only the log-prob of a whole answer matters: ``scores(answers)`` as a first token."""

    def __init__(self, scores):
        self.scores = scores

    def evaluate(self, observations, actions):
        log_prob = torch.zeros(actions.shape)
        log_prob[:, 0] = self.scores(dpo_arms.Records(observations, actions))
        return Evaluation(log_prob, torch.zeros_like(log_prob), torch.zeros_like(log_prob))


# --- measures ---


def test_reference_log_probs_are_sums_over_the_bigram_table():
    task = gold_task()
    records = draw_preferences(task, 20, seed=1).chosen
    expected = []
    for observation, actions in zip(records.observations.tolist(), records.actions.tolist(), strict=True):
        response = [token for token in actions if token >= 0]
        seen = [token for token in observation if token != task.pad]
        sequence = [*seen, response[-1]]
        steps = range(len(sequence) - len(response), len(sequence))
        expected.append(sum(task.reference.log_probs[sequence[t - 1], sequence[t]] for t in steps))
    np.testing.assert_allclose(dpo_arms.reference_log_probs(task, records), expected, rtol=1e-6)


def test_the_distance_is_what_the_objective_lacks():
    """KL(pi || pi*) = (J* - J) / beta, and J* comes from the recursion; prompts are sampled equally often."""
    task, beta = gold_task(), 0.8
    found = dpo_arms.measure(task, make_policy(task, 0), TINY | {"beta": beta, "samples": 80})
    best = TokenSolution(task).optimal_objective(beta)
    assert found["kl_opt"] > 5
    assert found["kl_opt"] == pytest.approx((best - found["objective"]) / beta, abs=1e-6)
    assert found["objective"] == pytest.approx(found["gold"] - beta * found["kl"])


def test_accuracy_of_the_implicit_reward():
    task = gold_task()
    pairs = dpo_arms.with_reference(task, draw_preferences(task, 300, seed=2))

    def reference(records):
        return dpo_arms.reference_log_probs(task, records)

    def tilted(records):
        return reference(records) + 10.0 * torch.from_numpy(score_records(task, records)).float()

    # float32 sums leave ties of the gold reward to the last bit, so they are left out.
    gold = [score_records(task, part) for part in (pairs.preferences.chosen, pairs.preferences.rejected)]
    apart = pairs.select(torch.from_numpy(np.flatnonzero(np.abs(gold[0] - gold[1]) > 1e-3)))
    assert 100 < len(apart) < 300
    best = gold_accuracy(task, apart.preferences)
    assert 0.6 < best < 1.0
    assert dpo_arms.implicit_accuracy(Scored(tilted), apart) == pytest.approx(best)
    assert dpo_arms.implicit_accuracy(Scored(reference), pairs) == 0.5  # every pair is a tie


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a process")
def test_the_peak_counts_from_the_beginning_of_each_run():
    with dpo_arms.Cost() as large:
        torch.ones(64 * 2**18)  # 64 MiB, freed at once
    with dpo_arms.Cost() as small:
        torch.ones(2**18)
    assert 60 < large.result["peak_mib"] < 80
    assert small.result["peak_mib"] < 10
    assert large.result["cpu_seconds"] > 0 and large.result["wall_seconds"] > 0


# --- the report's arithmetic ---


def setting(rate, *kl_opt):
    return dpo_report.Setting("DPO", rate, 1, list(kl_opt))


def test_tuning_by_hand():
    tuning = dpo_report.tune([setting(1e-3, 2.0, 4.0), setting(3e-3, 0.0, 2.0), setting(1e-2, 8.0, 8.0)])
    assert (tuning.best, tuning.median, tuning.worst) == (1.0, 3.0, 8.0)
    assert tuning.chosen.learning_rate == 3e-3
    assert tuning.deviation == pytest.approx(np.std([3.0, 1.0, 8.0]))


def test_the_cost_of_ppo_has_the_reward_model_in_it():
    model = {"wall_seconds": 3.0, "cpu_seconds": 2.0, "peak_mib": 90.0}
    policy = {"wall_seconds": 10.0, "cpu_seconds": 9.0, "peak_mib": 70.0}
    total = {"wall_seconds": 13.0, "cpu_seconds": 11.0, "peak_mib": 90.0}
    assert dpo_report.add_costs(model, policy) == total
    assert dpo_report.add_costs(model | {"peak_mib": None}, policy)["peak_mib"] == 70.0


def results(dpo, ppo):
    cost = {"wall_seconds": 1.0, "cpu_seconds": 1.0, "peak_mib": 1.0}
    names = ("accuracy", "gold", "kl", "objective", "length")
    others = dict.fromkeys(names, 1.0) | {"cost": cost}
    return {
        arm: [others | {"kl_opt": x} for x in kl_opt]
        for arm, kl_opt in (("SFT", dpo), ("DPO", dpo), ("PPO", ppo))
    }


@pytest.mark.parametrize(
    "dpo, ppo, said",
    [
        ([1.0, 1.1, 1.2, 1.3, 1.4], [0.9, 1.0, 1.1, 1.1, 1.2], "PPO is nearer"),
        ([1.0, 1.1, 1.2, 1.3, 1.4], [1.1, 1.2, 1.3, 1.5, 1.6], "DPO is nearer"),
        ([1.0, 1.1, 1.2, 1.3, 1.4], [0.9, 1.2, 1.1, 1.4, 1.4], "not told apart"),
        ([1.0, 1.1], [2.0, 2.1], "too few runs"),
    ],
)
def test_what_the_pairs_of_a_seed_say(dpo, ppo, said):
    found = results(dpo, ppo)
    rows = [dpo_report.make_row(arm, runs) for arm, runs in found.items()]
    tunings = [dpo_report.tune([setting(1e-3, 1.0)])]
    assert said in dpo_report.verdicts(tunings, found, rows)[0]


# --- the script ---


def test_grids_are_as_large_and_use_other_seeds_than_the_comparison():
    args = script.Args()
    grids = {arm: script.grid_jobs(args, arm) for arm in ("DPO", "PPO")}
    assert len(grids["DPO"]) == len(grids["PPO"]) == 12
    finals = script.final_jobs(args, setting(1e-3))
    assert len(finals) == 5
    seeds = {job.config["seed"] for job in finals}
    assert seeds.isdisjoint(job.config["seed"] for jobs in grids.values() for job in jobs)
    starts = {job.name: job.config for job in script.start_jobs(args)}
    for job in [*finals, *grids["DPO"], *grids["PPO"]]:
        assert starts[job.config["start"]]["seed"] == job.config["seed"]
        assert starts[job.config["start"]].items() <= job.config.items()


@pytest.mark.parametrize(
    "option, value", [("pairs", 0), ("learning_rates", ()), ("epochs", (1, 1)), ("beta", 0.0)]
)
def test_bad_options_are_named(option, value, capsys):
    assert script.main(script.Args(**{option: value})) == 2
    assert f"--{option.replace('_', '-')} is" in capsys.readouterr().out


def test_every_run_and_the_report(tmp_path):
    """The run functions as the runner calls them, in this process."""
    args = script.Args(
        **TINY, steps=1_500, learning_rates=(1e-3,), epochs=(1,), runs=1, tuning_runs=1, out=tmp_path
    )  # fmt: skip

    def outcome(function, job):
        folder = tmp_path / job.name
        folder.mkdir(parents=True)
        return Outcome(job, folder, function(job.config, folder))

    start = outcome(dpo_arms.make_start, script.start_jobs(args)[0]).result
    found = {"SFT": [start | {"cost": start["sft_cost"]}]}
    tunings = []
    for arm, train in script.TRAIN.items():
        done = [outcome(train, job) for job in script.final_jobs(args, script.Setting(arm, 1e-3, 1, []))]
        tunings.append(script.read_grid(arm, done))
        found[arm] = [run.result for run in done]
        # It begins at the SFT policy of its seed, and a little training moves it a little.
        assert 0 < abs(found[arm][0]["kl_opt"] - start["kl_opt"]) < 3
    assert found["PPO"][0]["steps"] >= 1_500

    script.report(make_console(), args, tunings, found)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [row["arm"] for row in summary["rows"]] == ["SFT", "DPO", "PPO"]
    assert summary["optimum"]["objective"] == pytest.approx(TokenSolution(gold_task()).optimal_objective(0.8))
    assert (tmp_path / "dpo_vs_ppo.png").stat().st_size > 10_000
    assert (tmp_path / "summary.csv").read_text().startswith("arm,runs,accuracy,accuracy_low")
