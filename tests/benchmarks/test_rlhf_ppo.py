"""The RLHF benchmark: its self-test (and that it can fail), exact quantities, alarms, runs and resume."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tyro

import rlhf_ppo as script
from common import rlhf_jobs, rlhf_measure, rlhf_pipeline, rlhf_selftest
from common.rlhf_report import Arm, exact_optima, make_rows, verdicts, write_samples
from common.runner import Job, Outcome
from llmgym.syllable_task import syllable_task
from llmgym.token_solution import TokenSolution
from llmgym.token_tasks import TokenTask


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def task() -> TokenTask:
    return rlhf_pipeline.small_task()


@pytest.fixture(scope="module")
def setup() -> rlhf_selftest.Setup:
    """The trained stages, made once."""
    return rlhf_selftest.make_setup()


# ------------------------------------------------------------------------------------------- self-test


def test_selftest_passes(setup: rlhf_selftest.Setup) -> None:
    lines: list[str] = []
    assert rlhf_selftest.run_selftest(lines.append, setup) == []
    assert len(lines) == len(rlhf_selftest.CHECKS) >= 12


def test_every_check_is_run() -> None:
    defined = {name for name in vars(rlhf_selftest) if name.startswith("check_")}
    assert {check.__name__ for check in rlhf_selftest.CHECKS} == defined


@pytest.mark.parametrize(
    ("check", "broken"),
    [
        (rlhf_selftest.check_sft_close_to_the_reference, {"sft": {"loss": 1.6, "floor": 1.4}}),
        (rlhf_selftest.check_reward_model_normalised, {"mean": 0.3}),
        (rlhf_selftest.check_reward_model_above_chance, {"accuracy": 0.51}),
        (rlhf_selftest.check_probabilities_of_all_responses_sum_to_one, {"half": True}),
        (rlhf_selftest.check_optimum_by_enumeration_equals_soft_value_iteration, {"gold": 1.001}),
    ],
)
def test_what_is_broken_fails(setup: rlhf_selftest.Setup, check: Any, broken: dict[str, Any]) -> None:
    listed = setup.listed
    if "half" in broken:  # half of the responses are missing
        half = len(listed.ref) // 2
        responses = listed.responses.take(np.arange(half))
        setup = dataclasses.replace(setup, listed=dataclasses.replace(listed, responses=responses))
    elif "gold" in broken:
        gold = listed.gold * broken["gold"]
        setup = dataclasses.replace(setup, listed=dataclasses.replace(listed, gold=gold))
    elif "sft" in broken:
        setup = dataclasses.replace(setup, **broken)
    else:
        setup = dataclasses.replace(setup, report=setup.report._replace(**broken))
    with pytest.raises(rlhf_selftest.CheckFailed):
        check(setup)


def test_a_failed_check_is_named_and_the_others_still_run(setup: rlhf_selftest.Setup) -> None:
    lines: list[str] = []
    wrong = dataclasses.replace(setup, report=setup.report._replace(mean=0.3))
    checks = (rlhf_selftest.check_reward_model_normalised, rlhf_selftest.check_reward_model_above_chance)
    found = rlhf_selftest.run_selftest(lines.append, wrong, checks)
    assert len(found) == 1 and found[0].startswith("reward model normalised: mean 0.300")
    assert [line.split()[0] for line in lines] == ["FAILED", "ok"]


def test_the_exit_status_of_a_failed_selftest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "run_selftest", lambda say: ["kl in the reward: off by 3"])
    assert script.main(script.Args(selftest=True)) == 1
    monkeypatch.setattr(script, "run_selftest", lambda say: [])
    assert script.main(script.Args(selftest=True)) == 0


# ---------------------------------------------------------------------------------- tasks and records


def test_the_gold_reward_is_the_task_s_in_deviations() -> None:
    plain, scaled = syllable_task(), rlhf_pipeline.gold_task()
    responses = rlhf_pipeline.sample_reference(plain, 2_000, seed=1)
    slope, intercept = np.polyfit(plain.score(responses), scaled.score(responses), 1)
    fitted = slope * plain.score(responses) + intercept
    np.testing.assert_allclose(scaled.score(responses), fitted, atol=1e-9)  # an affine function of it
    solution = TokenSolution(plain)
    mean = solution.evaluate(solution.reference_policy(), 0.0).reward
    assert slope * mean + intercept == pytest.approx(0.0, abs=1e-9)
    deviation = scaled.score(rlhf_pipeline.sample_reference(plain, 40_000, seed=2)).std()
    assert deviation == pytest.approx(1.0, abs=0.03)
    # So the optimum at beta is that of the plain reward at beta / slope.
    a = TokenSolution(scaled).optimal_policy(0.5)
    np.testing.assert_allclose(a, solution.optimal_policy(0.5 / slope), atol=1e-8)


def test_all_responses_are_listed_once(task: TokenTask) -> None:
    found = rlhf_measure.all_responses(task, 1)
    rows = {
        tuple(tokens[:length])
        for tokens, length in zip(found.tokens.tolist(), found.lengths.tolist(), strict=True)
    }
    letters, eos = range(4), 4
    expected = {(*word, eos) for n in range(6) for word in product(letters, repeat=n)}
    expected |= set(product(letters, repeat=6))
    assert rows == expected and len(found) == len(expected) == 5461
    assert set(found.task_ids) == {1}


def test_records_and_back(task: TokenTask) -> None:
    for some in (task, rlhf_pipeline.gold_task()):
        responses = rlhf_pipeline.sample_reference(some, 300, seed=0)
        records = rlhf_pipeline.as_records(some, responses)
        back = rlhf_pipeline.as_responses(some, records.observations.numpy(), records.actions.numpy())
        for field in ("task_ids", "tokens", "lengths", "stop_reasons"):
            np.testing.assert_array_equal(getattr(back, field), getattr(responses, field))
    row, n = 7, int(responses.lengths[7])
    prompt = list(some.prompts[responses.task_ids[row]])
    seen = prompt + responses.tokens[row, : n - 1].tolist()
    assert records.observations[row].tolist()[: len(seen) + 1] == [*seen, some.pad]
    strange = records.observations.numpy().copy()
    strange[3, 0] = (strange[3, 0] + 1) % 19
    with pytest.raises(ValueError, match="row 3 has no prompt"):
        rlhf_pipeline.as_responses(some, strange, records.actions.numpy())


def test_preferences_follow_bradley_terry(task: TokenTask) -> None:
    """The share of preferences that the gold reward agrees with, against its expectation, within 4 errors."""
    n = 5_000
    preferences = rlhf_pipeline.draw_preferences(task, n, seed=3)
    chosen, rejected = (
        rlhf_pipeline.score_records(task, part) for part in (preferences.chosen, preferences.rejected)
    )
    gap = np.abs(chosen - rejected)
    expected = np.where(gap == 0, 0.5, 1 / (1 + np.exp(-gap))).mean()
    assert rlhf_pipeline.gold_accuracy(task, preferences) == pytest.approx(expected, abs=4 * 0.5 / np.sqrt(n))
    prompts = [p.observations[:, :2] for p in (preferences.chosen, preferences.rejected)]
    assert torch.equal(*prompts)  # both answer the same prompt
    again = rlhf_pipeline.draw_preferences(task, n, seed=3)
    assert torch.equal(again.chosen.actions, preferences.chosen.actions)


def test_the_learned_reward_pays_its_score_and_reports_gold(setup: rlhf_selftest.Setup) -> None:
    responses = rlhf_pipeline.sample_reference(setup.task, 50, seed=4)
    scores = rlhf_pipeline.learned_task(setup.task, setup.model).judge(responses)
    direct = setup.model.score(rlhf_pipeline.as_records(setup.task, responses)).numpy()
    np.testing.assert_allclose(scores.total, direct, atol=1e-5)
    np.testing.assert_allclose(scores.components["gold"], setup.task.score(responses))


# ------------------------------------------------------------------------------------------- measures


def test_the_optimum_of_the_learned_reward_is_the_best_policy(setup: rlhf_selftest.Setup) -> None:
    """Its objective is what it is measured to reach, and any mixture with another policy is worse."""
    listed, beta = setup.listed, 0.3
    objective, optimum = listed.optimum(listed.proxy, beta)
    found = rlhf_measure.exact_measures(listed, optimum, beta)
    assert found["objective"] == pytest.approx(objective, abs=1e-9)
    assert found["kl_learned"] == pytest.approx(0.0, abs=1e-9)
    other = rlhf_measure.policy_log_probs(listed, setup.policy)
    for share in (0.01, 0.5):
        mixed = np.logaddexp(np.log(1 - share) + optimum, np.log(share) + other)
        worse = rlhf_measure.exact_measures(listed, mixed, beta)
        assert worse["objective"] is not None and worse["kl_learned"] is not None
        assert worse["objective"] < objective
        assert objective - worse["objective"] == pytest.approx(beta * worse["kl_learned"], abs=1e-5)


def test_sampled_measures_agree_with_exact_ones(setup: rlhf_selftest.Setup) -> None:
    beta, n = 0.5, 4_000
    sampled = rlhf_measure.sample_policy(setup.task, setup.model, setup.policy, n, seed=5)
    found = rlhf_measure.sampled_measures(TokenSolution(setup.task), sampled, beta)
    log_probs = rlhf_measure.policy_log_probs(setup.listed, setup.policy)
    exact = rlhf_measure.exact_measures(setup.listed, log_probs, beta)
    error = {"proxy": 1.0, "gold": 1.0, "length": sampled.responses.lengths.std(),
             "kl": (sampled.log_probs - sampled.ref_log_probs).std(), "kl_opt": 3.0}  # fmt: skip
    for name, deviation in error.items():
        assert found[name] == pytest.approx(exact[name], abs=4 * 1.1 * deviation / np.sqrt(n)), name


# --------------------------------------------------------------------------------------------- alarms


def curve(kl: list[float], length: list[float]) -> list[dict[str, Any]]:
    return [{"step": 10 * i, "kl": k, "length": n} for i, (k, n) in enumerate(zip(kl, length, strict=True))]


@pytest.mark.parametrize(
    ("kl", "length", "clip", "expected"),
    [
        ([0.1, 1, 2, 4, 8], [9, 10, 11, 12, 13], [0.1] * 20, ["KL and length climb"]),
        ([0.1, 1, 2, 4, 8], [9, 9, 9, 9, 9], [0.1] * 20, []),  # KL alone
        ([2, 2, 2, 2, 2], [9, 10, 11, 12, 13], [0.1] * 20, []),  # length alone
        ([0.1, 0.2, 0.3, 0.4, 0.5], [9, 10, 11, 12, 13], [0.1] * 20, []),  # by less than a nat
        ([2] * 5, [9] * 5, [0.1] * 5 + [0.31] * 10 + [0.1], ["the clip fraction stays"]),
        ([2] * 5, [9] * 5, [0.31] * 9 + [0.1] + [0.31] * 9, []),  # never ten in a row
        ([2], [9], [], []),
    ],
)
def test_alarms(kl: list[float], length: list[float], clip: list[float], expected: list[str]) -> None:
    found = rlhf_jobs.alarms(curve(kl, length), clip)
    assert [line.startswith(begin) for line, begin in zip(found, expected, strict=True)] == [True] * len(
        found
    )


# ----------------------------------------------------------------------------------------------- runs


def outcome(arm: Arm, first: dict[str, Any], last: dict[str, Any], best: float) -> Outcome:
    config = {"size": arm.size, "reward": arm.reward, "beta": arm.beta, "seed": 0}
    points = [{"step": 0, **first}, {"step": 5, **first, "gold": best}, {"step": 9, **last}]
    sample = {"prompt": "ba", "response": "kob", "ended": "eos", "proxy": 1.0, "gold": 2.0}
    updates = [{"step": 9, "clip_fraction": 0.1, "value_loss": 0.5}]
    result = {"curve": points, "updates": updates, "alarms": [], "before": [sample], "after": [sample]}
    return Outcome(Job("x", config), Path("x"), result)


@pytest.mark.parametrize(
    ("proxy", "gold", "best", "ending"),
    [(4.0, -3.0, 2.0, "yes, gold falls"), (4.0, 2.0, 2.1, "yes, gold stays behind"), (2.0, 1.8, 1.9, "no")],
)
def test_verdict_on_over_optimisation(proxy: float, gold: float, best: float, ending: str) -> None:
    start = {"proxy": 0.0, "gold": 0.0, "kl": 0.1, "length": 9.0, "entropy": 2.0, "kl_opt": None}
    run = outcome(Arm("large", "learned", 0.0), start, start | {"proxy": proxy, "gold": gold}, best)
    rows = make_rows([run])
    assert [line.rsplit(": ", 1)[1] for line in verdicts(rows, exact_optima([rows[0].arm]))] == [ending]


def test_verdict_on_the_distance_to_the_optimum(tmp_path: Path) -> None:
    start = {"proxy": 0.0, "gold": 0.0, "kl": 0.1, "length": 4.0, "entropy": 1.0, "kl_opt": 3.2}
    arm = Arm("small", "gold", 0.5)
    optimum = TokenSolution(rlhf_pipeline.small_task()).optimal_objective(0.5)
    for after, ending in ((0.5, "yes"), (3.3, "NO")):
        run = outcome(arm, start, start | {"gold": 1.0, "kl": 1.0, "kl_opt": after}, 1.0)
        lines = verdicts(make_rows([run]), exact_optima([arm]))
        assert lines[0].endswith(f"approaches it: {ending}")
        assert lines[1].endswith(f"gold less beta KL 0.50; optimum {optimum:.2f}, reference 0")
    text = write_samples([run], tmp_path / "samples.txt").read_text()
    assert "small, gold reward, beta 0.5, seed 0: after PPO" in text and "ba > kob." in text


def test_ppo_resumes_to_the_same_weights(setup: rlhf_selftest.Setup, tmp_path: Path) -> None:
    """A run on the learned reward that stops in the middle goes on to the weights of an unbroken one."""
    target = rlhf_pipeline.learned_task(setup.task, setup.model)

    def make() -> Any:
        return rlhf_pipeline.make_ppo(
            target, setup.policy, seed=7, model=setup.model, beta=0.1, n_envs=16, batch_size=8, n_epochs=2
        )

    unbroken = make().learn(600)
    updates = 0

    def stop(agent: Any) -> bool:
        nonlocal updates
        updates += 1
        if updates == 4:
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt):
        make().learn(600, run_dir=tmp_path, checkpoint_every=100, callback=stop)
    resumed = make().learn(600, run_dir=tmp_path, checkpoint_every=100, resume=True)
    for name, weight in unbroken.policy.state_dict().items():
        assert torch.equal(weight, resumed.policy.state_dict()[name]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of --selftest and --train"),
        ({"selftest": True, "train": True}, "one of --selftest and --train"),
        ({"train": True, "beta": ()}, "--beta"),
        ({"train": True, "beta": (-0.1,)}, "--beta"),
        ({"train": True, "runs": 0}, "--runs is 0"),
        ({"train": True, "reference": "gpt"}, "--reference is 'gpt'; allowed: ngram, sft"),
        ({"train": True, "kl_in": "both"}, "--kl-in is 'both'"),
        ({"train": True, "learning_rate": 0.0}, "--learning-rate"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        script.check(script.Args(**options))
    assert script.main(script.Args(**options)) == 2


def test_a_tiny_run_leaves_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small task only, in this process, with the other places of reference and KL."""
    tiny = script.STAGES["small"] | {"sft_samples": 300, "policy": {"n_embd": 16, "n_layer": 1}}
    monkeypatch.setattr(script, "STAGES", {"small": tiny})
    monkeypatch.setattr(script, "training_figure", lambda runs, optima, path: path)  # needs the large task
    monkeypatch.setattr(script, "run_jobs", run_here)
    args = script.Args(
        train=True, beta=(0.0, 0.5), runs=1, steps=900, pairs=300, out=tmp_path, reference="sft", kl_in="loss"
    )
    assert script.main(args) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    arms = [(row["arm"]["reward"], row["arm"]["beta"]) for row in summary["rows"]]
    assert arms == [("learned", 0.0), ("learned", 0.5), ("gold", 0.5)]
    run = summary["runs"][1]
    assert run["ppo"]["kl_in"] == "loss" and run["ppo"]["normalize_advantage"] is False
    assert run["curve"][0]["step"] == 0 and run["curve"][-1]["step"] >= 300
    assert {"proxy", "gold", "kl", "kl_opt", "kl_learned", "length", "entropy"} <= set(run["curve"][-1])
    assert len(run["after"]) == 8 and (tmp_path / "small.png").exists()
    assert (tmp_path / "samples.txt").exists() and (tmp_path / "summary.csv").exists()


def run_here(function: Any, jobs: list[Job], out: Path, *rest: Any) -> list[Outcome]:
    """`common.runner.run_jobs` in this process."""
    outcomes = []
    for job in jobs:
        (out / job.name).mkdir(parents=True)
        outcomes.append(Outcome(job, out / job.name, function(job.config, out / job.name)))
    return outcomes


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tyro.cli(script.Args, args=["--help"])
    text = capsys.readouterr().out
    for field in dataclasses.fields(script.Args):
        assert f"--{field.name.replace('_', '-')}" in text
