"""The D4RL benchmark: its measures against plain loops and formulas, its report, and small real runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import tyro
from scipy.stats import t as student

# ruff: noqa: E402, what follows needs these
for package in ("d3rlpy", "h5py", "mujoco"):
    pytest.importorskip(package)

import offline_d4rl as script
from common import offline_jobs as jobs
from common import offline_report as report
from common.files import to_plain
from common.runner import Outcome
from offline import files
from offline.datasets import episode_returns, make_dataset, take

# --- measures ---


def small_data(terminals, timeouts, rewards):
    n = len(rewards)
    return make_dataset(np.arange(n)[:, None], np.zeros((n, 1)), rewards, terminals, timeouts)


def test_returns_to_go_are_discounted_sums_within_episodes():
    data = small_data([0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0], [1.0, 2.0, 3.0, 10.0, 20.0, 5.0])
    expected = [1 + 0.5 * 2 + 0.25 * 3, 2 + 0.5 * 3, 3, 10 + 0.5 * 20, 20, 5]
    np.testing.assert_allclose(jobs.returns_to_go(data, 0.5), expected)


def test_critics_are_asked_where_the_return_is_known(monkeypatch):
    monkeypatch.setattr(jobs, "AHEAD", 2)
    data = small_data([0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 0, 0, 0], np.ones(7))
    rows, to_go = jobs.value_rows(data)
    assert rows.tolist() == [0, 1, 4, 5, 6]  # rows 2 and 3 are cut too soon, those of the terminal are not
    assert to_go[-1] == 1.0
    monkeypatch.setattr(jobs, "VALUE_ROWS", 3)
    fewer, _ = jobs.value_rows(data)
    assert len(fewer) == 3 and set(fewer) < set(rows)


class Linear:
    """A deterministic policy, for batches only."""

    weight = np.random.default_rng(3).normal(size=(11, 3))

    def predict(self, observation, deterministic):
        assert deterministic and observation.ndim == 2
        return np.tanh(observation @ self.weight).astype(np.float32), None


def test_playing_side_by_side_is_playing_one_after_the_other():
    starts, returns, discounted = jobs.play(Linear(), "Hopper-v5", 4)
    env = gym.make("Hopper-v5")
    lengths = []
    for i in range(4):
        observation, _ = env.reset(seed=jobs.EVALUATION_SEED + i)
        np.testing.assert_array_equal(starts[i], observation)
        rewards, ended = [], False
        while not ended:
            action = Linear().predict(observation[None], True)[0][0]
            observation, reward, terminated, truncated, _ = env.step(action)
            rewards.append(reward)
            ended = terminated or truncated
        assert returns[i] == pytest.approx(sum(rewards))
        assert discounted[i] == pytest.approx(sum(0.99**t * r for t, r in enumerate(rewards)))
        lengths.append(len(rewards))
    assert len(set(lengths)) > 1  # they did not all end together


def test_values_are_in_the_units_of_the_environment():
    from d3rlpy.preprocessing import ReturnBasedRewardScaler

    scaler = ReturnBasedRewardScaler(multiplier=1000.0, return_min=-10.0, return_max=40.0)  # times 20
    agent = SimpleNamespace(
        predict_value=lambda observations, actions: np.array([40.0, 60.0]),
        config=SimpleNamespace(reward_scaler=scaler),
    )
    np.testing.assert_allclose(jobs.action_values(agent, None, None), [2.0, 3.0])
    agent.config.reward_scaler = None
    np.testing.assert_allclose(jobs.action_values(agent, None, None), [40.0, 60.0])


@pytest.mark.parametrize("algo", ["bc", "cql", "iql", "td3bc", "rebrac", "sac"])
def test_every_network_has_the_width_that_is_asked_for(algo):
    from torch import nn

    from offline import algorithms

    data = make_dataset(np.random.default_rng(0).normal(size=(20, 3)), np.zeros((20, 2)), np.arange(20.0),
                        np.arange(20) % 5 == 4)  # fmt: skip
    agent = algorithms.make(algo, data, 0, **jobs.two_layers(algo, 7))
    modules = [m for m in vars(agent.algo.impl.modules).values() if isinstance(m, nn.Module)]
    sizes = [[x.out_features for x in m.modules() if isinstance(x, nn.Linear)] for m in modules]
    for network in filter(None, sizes):
        assert max(network) == 7 and network.count(7) % 2 == 0  # critics come in pairs
    assert any(sizes)
    if algo == "rebrac":
        assert any(isinstance(x, nn.LayerNorm) for m in modules for x in m.modules())


# --- the report, on made-up results ---


def run(seed, scores, predicted=None, discounted=100.0):
    """A run's result with one evaluation for each score."""
    evaluations = [
        {"step": 10 * (i + 1), "score": s, "return_mean": 30 * s, "discounted": discounted,
         "predicted": predicted, "predicted_rows": predicted}
        for i, s in enumerate(scores)
    ]  # fmt: skip
    return {"seed": seed, "evaluations": evaluations}


def test_a_row_is_what_its_columns_say():
    first, second = [90.0, *range(10)], [0.0, 50.0, *range(10, 19)]
    row = report.make_row("hopper-medium", "iql", [run(0, first, 150.0), run(1, second, 130.0)])
    assert row.runs == [4.5, np.mean([50, *range(10, 19)])]  # of the last ten; there were eleven
    assert row.recent.value == pytest.approx(np.mean(row.runs))
    assert row.last.value == (9 + 18) / 2
    assert (row.last.low, row.last.high, row.last.n) == (9, 18, 2)
    assert row.best.value == (90 + 50) / 2
    stds = [np.std(range(10), ddof=1), np.std([50, *range(10, 19)], ddof=1)]
    assert row.deviation.value == pytest.approx(np.mean(stds))
    assert (row.predicted.value, row.measured.value, row.over_estimation.value) == (140, 100, 40)


def test_an_algorithm_without_a_critic_has_no_values():
    row = report.make_row("hopper-medium", "bc", [run(0, [1.0, 2.0])])
    assert row.predicted.value is row.measured.value is row.over_estimation.value is None
    assert report.value_table([row], DATA) == []


@pytest.mark.parametrize(
    "dataset, algo, expected",
    [("halfcheetah-medium", "bc", 42.6), ("hopper-medium", "bc", 52.9), ("walker2d-medium", "bc", 75.3),
     ("halfcheetah-medium", "cql", 44.0), ("hopper-medium", "cql", 58.5), ("walker2d-medium", "cql-10", 72.5),
     ("halfcheetah-medium", "iql", 47.4), ("hopper-medium", "iql", 66.3), ("walker2d-medium", "iql", 78.3),
     ("hopper-mixed", "iql", None), ("hopper-random", "bc", None), ("hopper-medium", "cql-1", None),
     ("hopper-medium", "sac", None)],
)  # fmt: skip
def test_published_scores_stand_beside_the_same_data_and_algorithm_only(dataset, algo, expected):
    assert report.published(dataset, algo) == expected
    row = report.make_row(dataset, algo, [run(0, [1.0])])
    table = report.score_table([row], {dataset: {"score": 30.0, "parts": {}}})
    assert table[1][-1] == ("-" if expected is None else str(expected))


DATA = {"hopper-medium": {"score": 44.0, "parts": {}, "discounted_rows": 210.0, "collected": True}}


def test_tables_name_the_data_and_the_best_as_what_it_is():
    rows = [report.make_row("hopper-medium", "bc", [run(0, [50.0])]),
            report.make_row("hopper-medium", "sac", [run(0, [5.0], 900.0)])]  # fmt: skip
    assert report.SCORE_COLUMNS[3] == "best (chosen on the same episodes)"
    assert report.score_table(rows, DATA) == [
        ["hopper-medium: the data itself", "44.0", "44.0", "-", "-", "-"],
        ["  BC", "50.0", "50.0", "50.0", "-", "52.9"],
        ["  SAC, no conservatism", "5.0", "5.0", "5.0", "-", "-"],
    ]
    assert report.value_table(rows, DATA) == [
        ["hopper-medium: the data itself", "-", "-", "-", "210.0"],
        ["  SAC, no conservatism", "900.0", "100.0", "800.0", "900.0"],
    ]


def test_of_mixed_data_the_policies_stand_by_themselves():
    data = {"hopper-mixed": {"score": 3.0, "parts": {"random": 1.0, "medium": 44.0}}}
    row = report.make_row("hopper-mixed", "bc", [run(0, [50.0]), run(1, [52.0])])
    assert report.score_table([row], data)[:3] == [
        ["hopper-mixed: the data itself", "3.0", "3.0", "-", "-", "-"],
        ["  its random episodes", "1.0", "1.0", "-", "-", "-"],
        ["  its medium episodes", "44.0", "44.0", "-", "-", "-"],
    ]
    lines = report.verdicts([row], data)
    assert lines[1].startswith("hopper-mixed, BC vs the data itself: 48.0")
    assert lines[2].startswith("hopper-mixed, BC vs its medium episodes: 7.0")


def test_differences_have_welchs_interval():
    a, b = np.array([40.0, 45.0, 52.0]), np.array([60.0, 61.0, 59.5, 62.0])
    found = report.difference(a, b)
    u, v = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    freedom = (u + v) ** 2 / (u**2 / (len(a) - 1) + v**2 / (len(b) - 1))
    half = student.ppf(0.975, freedom) * np.sqrt(u + v)
    assert found.n == 3 and found.value == pytest.approx(a.mean() - b.mean())
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half))
    found = report.difference(a, 30.0)  # of a mean and a known number
    half = student.ppf(0.975, 2) * np.sqrt(u)
    assert found.n == 3 and found.value == pytest.approx(a.mean() - 30)
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half))
    assert report.difference([3.0, 3.0], [1.0, 1.0]).low == 2.0
    assert report.difference([3.0], [1.0, 2.0]).low is None


@pytest.mark.parametrize(
    "iql, word",
    [([60.0, 61.0, 62.0], "lower"), ([30.0, 31.0, 32.0], "higher"), ([20.0, 45.0, 80.0], "open"),
     ([60.0], "open (one run tells nothing of the spread)")],
)  # fmt: skip
def test_verdicts_go_every_way(iql, word):
    rows = [report.make_row("hopper-medium", "bc", [run(i, [s]) for i, s in enumerate([44.0, 45.0, 46.0])]),
            report.make_row("hopper-medium", "iql", [run(i, [s]) for i, s in enumerate(iql)])]  # fmt: skip
    lines = report.verdicts(rows, DATA)
    assert lines[1].startswith(f"hopper-medium, BC vs IQL: {45 - np.mean(iql):.1f}")
    assert lines[1].endswith(f": {word}")
    assert lines[2].startswith("hopper-medium, BC vs the data itself: 1.0 [-1.5, 3.5]: open")


@pytest.mark.parametrize(
    "predicted, word", [([900.0, 950.0], "over-estimates"), ([5.0, 8.0], "under-estimates"),
                        ([90.0, 120.0], "open"), ([900.0], "no interval with one run")],
)  # fmt: skip
def test_the_verdict_on_sac_says_what_its_critic_does(predicted, word):
    row = report.make_row("hopper-medium", "sac", [run(i, [5.0], p) for i, p in enumerate(predicted)])
    assert report.verdicts([row], DATA)[-1].endswith(f": {word}")


def test_the_origin_of_the_data_is_said():
    ours, given = {"collected": True}, {"collected": False}
    assert script.origin({"hopper-medium": given}) == "Data: the files of --data."
    both = script.origin({"hopper-medium": given, "hopper-mixed": ours})
    assert both.startswith("hopper-mixed: collected with this project, not D4RL's own data")
    assert both.endswith("The others are the files of --data.")


# --- options ---


@pytest.mark.parametrize(
    "change, message",
    [({"seeds": 0}, "--seeds is 0"), ({"data_steps": 0}, "--data-steps is 0"), ({"algos": ()}, "--algos is"),
     ({"steps": 1000, "eval_every": 300}, "--steps is 1000, must be a multiple of --eval-every, 300"),
     ({"algos": ("bc", "bc")}, "a name twice"), ({"algos": ("cql", "cql-10")}, "which are the same"),
     ({"datasets": ("hopper-random", "hopper-random-v2")}, "a name twice"),
     ({"datasets": ("ant-random",)}, "'ant-random': a name begins with one of halfcheetah, hopper, walker2d"),
     ({"datasets": ("hopper-expert",)}, "'hopper-expert', and no --data; what can be collected: hopper-"),
     ({"data": Path("nowhere")}, "--data nowhere is not a folder")],
)  # fmt: skip
def test_bad_options_are_named(change, message, capsys):
    assert script.main(script.Args(**change)) == 2
    assert message in " ".join(capsys.readouterr().out.split())


def test_a_missing_policy_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(jobs.acting, "WEIGHTS", tmp_path)
    assert script.main(script.Args(datasets=("hopper-mixed",), out=tmp_path)) == 2
    assert "shipped for Hopper-v5" in capsys.readouterr().out


# --- small real runs ---


def in_process(function, todo, out, workers, title, console):
    """`run_jobs` without processes, whose start costs more than these jobs."""
    outcomes = []
    for job in todo:
        folder = out / job.name
        folder.mkdir(parents=True, exist_ok=True)
        outcomes.append(Outcome(job, folder, json.loads(json.dumps(to_plain(function(job.config, folder))))))
    return outcomes


SIZES = ["--data-steps", "500", "--steps", "20", "--eval-every", "10", "--episodes", "1", "--seeds", "2"]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A whole call on random data of Hopper: its folder and what it printed."""
    out = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr(script, "run_jobs", in_process)
        patch.setattr(script.Console, "print", lambda self, *args, **kwargs: printed.append(args[0]))
        args = ["--datasets", "hopper-random-v2", "--algos", "bc", "iql", "sac", "--out", str(out), *SIZES]
        assert script.main(tyro.cli(script.Args, args=args)) == 0
    return out, "\n".join(str(p) for p in printed)


def test_the_script_end_to_end(first):
    out, printed = first
    with open(out / "evaluations.csv") as file:
        records = list(csv.DictReader(file))
    assert [(r["algo"], r["seed"], r["step"]) for r in records] == [
        (algo, seed, step) for algo in ("bc", "iql", "sac") for seed in "01" for step in ("10", "20")
    ]
    for record in records:  # Hopper's published reference returns
        expected = 100 * (float(record["return_mean"]) + 20.272305) / (3234.3 + 20.272305)
        assert float(record["score"]) == pytest.approx(expected)
        assert (record["predicted"] == "") == (record["algo"] == "bc")
    summary = json.loads((out / "summary.json").read_text())
    assert [row["algo"] for row in summary["table"]] == ["bc", "iql", "sac"]
    assert summary["data"]["hopper-random"]["parts"] == {}
    assert summary["data"]["hopper-random"]["rows"] == 500 and summary["data"]["hopper-random"]["collected"]
    assert "not D4RL's own data" in summary["origin"]
    assert all(line in printed for line in summary["verdicts"])
    assert (out / "curves_hopper-random.png").stat().st_size > 30_000
    assert (out / "table.csv").read_text().count("\n") == 4


def test_mixed_data_tells_its_policies_apart(tmp_path):
    config = jobs.data_config("hopper-mixed", None, 3000, 2)
    found = jobs.data_job(config, tmp_path)
    data = files.read(tmp_path / "hopper-mixed.hdf5")
    ends = np.cumsum(np.bincount(data.episode_index))
    whole = {"medium": ends < 1500, "random": (ends > 1500) & (ends < 3000)}  # the last of each was cut
    scores = 100 * (episode_returns(data) + 20.272305) / (3234.3 + 20.272305)
    assert found["parts"] == {name: pytest.approx(scores[chosen].mean()) for name, chosen in whole.items()}
    assert found["score"] == pytest.approx(scores.mean())
    assert found["parts"]["medium"] > 30 > found["score"] > found["parts"]["random"]
    assert found["rows"] == 3000 and not (tmp_path / "parts").exists()


def test_a_file_that_is_given_is_used_as_it_is(first, tmp_path, monkeypatch):
    """The collected file by way of --data gives the same evaluations; another one in its place is read."""
    out, _ = first
    monkeypatch.setattr(script, "run_jobs", in_process)
    collected = out / "data" / "hopper-random"
    args = ["--datasets", "hopper-random", "--algos", "bc", "--out", str(tmp_path / "same"), *SIZES]
    assert script.main(tyro.cli(script.Args, args=[*args, "--data", str(collected)])) == 0
    lines = (out / "evaluations.csv").read_text().splitlines()
    assert (tmp_path / "same" / "evaluations.csv").read_text().splitlines() == lines[:5]
    assert not list((tmp_path / "same").rglob("*.hdf5"))

    d4rl = tmp_path / "d4rl"
    d4rl.mkdir()
    data = take(files.read(collected / "hopper-random.hdf5"), np.arange(300))
    data.metadata.clear()
    files.write(data, d4rl / "hopper-medium-v2.hdf5")
    args = ["--datasets", "hopper-medium", "--algos", "bc", "--out", str(tmp_path / "other"), *SIZES]
    assert script.main(tyro.cli(script.Args, args=[*args, "--data", str(d4rl)])) == 0
    summary = json.loads((tmp_path / "other" / "summary.json").read_text())
    found = summary["data"]["hopper-medium"]
    assert (found["rows"], found["return_mean"]) == (300, pytest.approx(data.rewards.sum() / data.n_episodes))
    assert summary["origin"] == "Data: the files of --data."
    assert summary["table"][0]["published"] == 52.9


@pytest.mark.parametrize("stop", ["in the evaluation", "before the checkpoint"])
def test_a_stopped_run_goes_on_to_the_same_numbers(first, tmp_path, monkeypatch, stop):
    out, _ = first
    path = out / "data" / "hopper-random" / "hopper-random.hdf5"
    config = {"dataset": "hopper-random", "path": str(path), "algo": "sac", "seed": 1, "steps": 20,
              "eval_every": 5, "episodes": 1, "hidden": 16}  # fmt: skip
    (tmp_path / "stopped").mkdir()
    (tmp_path / "whole").mkdir()
    whole = jobs.train_job(config, tmp_path / "whole")
    steps_taken = []
    with monkeypatch.context() as patch:
        name = "measure" if stop == "in the evaluation" else "print"
        original, calls = getattr(jobs, name, print), []

        def third_call_fails(*args, **kwargs):
            calls.append(0)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        patch.setattr(jobs, name, third_call_fails, raising=False)
        with pytest.raises(KeyboardInterrupt):
            jobs.train_job(config, tmp_path / "stopped")
    measure = jobs.measure

    def watched(agent, *rest):
        steps_taken.append(agent.num_steps)
        return measure(agent, *rest)

    monkeypatch.setattr(jobs, "measure", watched)
    again = jobs.train_job(config, tmp_path / "stopped")
    assert steps_taken == [15, 20]  # what was measured and saved is not measured again
    assert to_plain(again) == to_plain(whole)
    assert [e["step"] for e in again["evaluations"]] == [5, 10, 15, 20]

    other = jobs.train_job(config | {"steps": 10}, tmp_path / "stopped")  # another run begins anew
    assert [e["step"] for e in other["evaluations"]] == [5, 10]
