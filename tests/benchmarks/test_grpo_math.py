"""The mathematics benchmark: its measures against brute force, its arms, and a small real run."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro

import agents
import grpo_math as script
from agents.groups import collect_groups
from common import math_arms as arms
from common import math_jobs as jobs
from common import math_measure as measure
from common import math_sb3
from common.files import to_plain
from common.runner import Outcome
from common.stats import Estimate

TASK = {"digits": 1, "reverse_digits": True}


def test_pass_at_k_is_the_mean_over_all_subsets():
    correct = np.array([[1, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [1, 1, 1, 1, 1]])
    for k in range(1, 6):
        subsets = list(itertools.combinations(range(5), k))
        expected = np.mean([[row[list(s)].any() for s in subsets] for row in correct])
        assert measure.pass_at_k(correct, k) == pytest.approx(expected)


def test_demonstrations_are_the_sums_written_backwards():
    env = measure.make_env(1, {"digits": 2, "reverse_digits": True}, n_train=30, seed=4)
    task = env.unwrapped.task
    data = measure.demonstrations(env)
    assert data.observations.shape == (30, task.sequence_length)
    for seen, actions in zip(data.observations.numpy(), data.actions.numpy(), strict=True):
        text = task.decode(seen[seen != task.pad])
        answer = actions[actions >= 0]
        a, b = map(int, text.partition("=")[0].split("+"))
        assert task.decode(answer[:-1])[::-1] == str(a + b) and answer[-1] == task.eos_id
        assert text.partition("=")[2] == task.decode(answer[:-1])  # all but the last token was seen


class Solver:
    """Knows the answers of problems with an even first number, and says 0 to the others."""

    def __init__(self, env):
        self.task = env.unwrapped.task
        self.text = {}
        for prompt, problem in zip(self.task.prompts, self.task.problems, strict=True):
            even = int(problem.prompt.partition("+")[0]) % 2 == 0
            self.text[tuple(prompt)] = self.task.tokenizer.encode(problem.solution if even else "0")

    def predict(self, observations, deterministic):
        actions = np.zeros(len(observations), np.int64)
        for row, seen in enumerate(observations):
            tokens = seen[seen != self.task.pad]
            prompt = next(p for p in self.text if tuple(tokens[: len(p)]) == p)
            said, answer = len(tokens) - len(prompt), self.text[prompt]
            actions[row] = answer[said] if said < len(answer) else self.task.eos_id
        return actions, None

    # What the collector asks of a policy of ours.
    reads_sequences = True

    def new_state(self, n_rows):
        return None

    def sample(self, observations, generator, state=None, active=None):
        return torch.from_numpy(self.predict(observations.numpy(), False)[0])

    def mode(self, observations, state=None, active=None):
        return self.sample(observations, None)

    def evaluate(self, observations, actions):
        zeros = torch.zeros(actions.shape)
        return agents.policies.base.Evaluation(zeros, zeros, zeros)


@pytest.mark.parametrize("make", [measure.answer_with, math_sb3.answer_with])
def test_answers_are_in_the_order_of_the_tasks(make):
    env = measure.make_env(7, TASK, "held_out")
    problems = env.unwrapped.task.problems
    chosen = np.tile(np.arange(len(problems))[::-1], 2)  # more than the environment has rows
    found = make(Solver(env))(env, chosen, True, 0)
    sums = [list(map(int, problems[k].prompt.rstrip("=").split("+"))) for k in chosen]
    right = [a % 2 == 0 or a + b == 0 for a, b in sums]
    np.testing.assert_array_equal(found["correct"] > 0.5, right)
    np.testing.assert_array_equal(
        found["length"], [1 + len(str(a + b)) if a % 2 == 0 else 2 for a, b in sums]
    )
    assert not found["cut"].any()
    assert measure.accuracy(make(Solver(env)), env) == pytest.approx(np.mean(right))


def test_steps_of_demonstrations_are_what_the_environment_shows():
    env = measure.make_env(5, TASK, n_train=5, seed=1)
    data = measure.demonstrations(env)
    seen, tokens = math_sb3.steps_of(data, env.unwrapped.task.pad)
    observations, _ = env.reset(seed=0, options={"task_id": np.arange(5)})
    shown = [[] for _ in range(5)]
    for t in range(data.actions.shape[1]):
        now = data.actions[:, t].numpy()
        for row in np.flatnonzero(now >= 0):
            shown[row].append((observations[row].tolist(), int(now[row])))
        observations, *_ = env.step(np.where(now >= 0, now, 0))
    expected = [pair for row in shown for pair in row]
    assert [(s.tolist(), int(t)) for s, t in zip(seen, tokens, strict=True)] == expected


def test_pairs_are_the_groups_whose_rewards_differ():
    env = measure.make_env(16, TASK)
    policy = jobs.new_policy(env, 0)
    agent = agents.make("dpo", env, seed=0, policy=policy)
    rollout = collect_groups(agent.collector, 8, 2)
    assert jobs.verified_pairs(replace_returns(rollout, np.ones(16))) is None
    first_is_right = np.arange(16) % 3 == 0
    rollout = replace_returns(rollout, first_is_right.astype(float))
    pairs = jobs.verified_pairs(rollout)
    ids = rollout.episodes.group_ids
    differing = [g for g in range(8) if first_is_right[ids == g].sum() == 1]
    assert len(pairs) == len(differing) > 0
    prompts = rollout.observations
    for row, group in enumerate(differing):
        members = np.flatnonzero(ids == group)
        right = members[first_is_right[members]][0]
        wrong = members[~first_is_right[members]][0]
        assert (pairs.chosen.observations[row] == prompts[right]).all()
        assert (pairs.rejected.observations[row] == prompts[wrong]).all()


def replace_returns(rollout, returns):
    return replace(rollout, episodes=replace(rollout.episodes, returns=returns))


@pytest.mark.parametrize("name", [a.name for a in arms.ARMS.values() if a.kind == "rl"])
def test_arms_have_two_gradient_steps_for_each_256_completions(name):
    arm = arms.find_arm(name)
    env = measure.make_env(256 if arm.agent in ("grpo", "ppo") else 128, TASK)
    agent = agents.make(arm.agent, env, seed=0, policy=jobs.new_policy(env, 0), **arm.config)
    rollout = agent.collect()
    rollout.episodes.returns[::2] = 1.0  # an update without any signal might take no step
    agent.update(rollout)
    assert agent.n_updates / len(rollout.episodes.returns) == 2 / 256


def test_parts_name_arms_and_presets_keep_their_switches():
    assert {name for part in arms.PARTS.values() for name in part} == set(arms.ARMS)
    chosen = arms.chosen_arms(["main", "groups"], ["dapo"])
    assert [a.name for a in chosen] == ["grpo-8", "sft", "grpo-2", "grpo-4", "grpo-16", "preset-dapo"]
    assert chosen[-1].config["epsilon_high"] == 0.28 and chosen[-1].config["dynamic_sampling"]


def test_each_trainer_goes_on_from_the_one_before(tmp_path):
    """Fine-tuning to a quarter of the sums of two digits; GRPO, which is paid more and more; DPO."""
    config = {"seed": 0, "task": {"digits": 2, "reverse_digits": True}, "n_train": 250,
              "start_accuracy": 0.25, "problems": 10, "samples": 8}  # fmt: skip
    start = jobs.start_job(config | {"arm": "start"}, make(tmp_path, "start"))
    assert start["curve"][-1]["accuracy"] >= 0.25 > start["curve"][-2]["accuracy"]
    config |= {"completions": 12_800, "init": "start"}
    run = jobs.arm_job(config | {"arm": "grpo-8"}, make(tmp_path, "grpo-8"))
    assert run["curve"][0]["accuracy"] == max(p["accuracy"] for p in start["curve"])
    rates = [p["pass_rate"] for p in run["curve"][1:]]
    first, last = np.mean(rates[:5]), np.mean(rates[-5:])
    assert last - first > 4 * np.sqrt(2 * 0.25 / (12_800 / 5))  # of 2,560 completions each
    chained = jobs.arm_job(
        config | {"arm": "chain-dpo", "init": "grpo-8"}, make(tmp_path, "chain-dpo")
    )
    assert chained["curve"][0]["accuracy"] == max(p["accuracy"] for p in run["curve"])
    assert chained["curve"][1]["pairs"] > 100


def make(root: Path, arm: str) -> Path:
    folder = root / arm / "seed-0"
    folder.mkdir(parents=True)
    return folder


def row(name: str, runs: list[float]) -> script.Row:
    mean = Estimate(100 * float(np.mean(runs)), None, None, len(runs))
    return script.Row(name, name, *[mean] * 10, to_90=[], runs=runs)


@pytest.mark.parametrize(
    "runs, verdict", [([0.9, 0.95], "is met ("), ([0.89, 0.95], "met by some seeds"), ([0.5, 0.89], "MISSED")]
)
def test_verdicts_go_every_way(runs, verdict):
    rows = {"grpo-8": row("grpo-8", runs)}
    assert verdict in script.verdicts(rows, row("start", [0.3]))[1]


@pytest.mark.parametrize(
    "change, message",
    [({"seeds": 1}, "--seeds is 1"), ({"completions": 10}, "--completions is 10"), ({"parts": ()}, "--parts"),
     ({"presets": ("dapoo",)}, "dapo"), ({"start_accuracy": 0.0}, "--start-accuracy is 0.0"),
     ({"init": Path("nowhere")}, "--init nowhere has no seed-3")],
)  # fmt: skip
def test_bad_options_are_named(change, message, capsys):
    assert script.main(script.Args(**change)) == 2
    assert message in capsys.readouterr().out


def in_process(function, todo, out, workers, title, console):
    """`run_jobs` without processes, whose start costs more than these jobs."""
    outcomes = []
    for job in todo:
        folder = out / job.name
        folder.mkdir(parents=True, exist_ok=True)
        result = json.loads(json.dumps(to_plain(function(job.config, folder))))
        (folder / "result.json").write_text(json.dumps(result))
        outcomes.append(Outcome(job, folder, result))
    return outcomes


def test_the_script_end_to_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "run_jobs", in_process)
    monkeypatch.setattr(jobs, "SFT_MOST", 4)
    monkeypatch.setattr(jobs, "EVALUATIONS", 3)
    monkeypatch.setattr(math_sb3, "CLONING_EPOCHS", 2)
    sizes = {"--digits": "1", "--n-train": "20", "--completions": "2048", "--problems": "4",
             "--samples": "8", "--seeds": "2", "--seed": "0"}  # fmt: skip
    command = list(itertools.chain.from_iterable(sizes.items()))
    one, two = tmp_path / "one", tmp_path / "two"
    args = tyro.cli(script.Args, args=[*command, "--out", str(one), "--parts", "main", "baselines",
                                       "probes", "--presets", "dr-grpo"])  # fmt: skip
    assert script.main(args) == 0
    printed = capsys.readouterr().out
    assert "After SFT" in printed and "Paid by the lenient verifier" in printed
    summary = json.loads((one / "summary.json").read_text())
    names = [record["name"] for record in summary["table"]]
    assert names == ["start", "grpo-8", "sft", "rloo", "reinforce", "ppo", "sb3-ppo", "lenient",
                     "preset-dr-grpo"]  # fmt: skip
    assert all(len(record["runs"]) == 2 for record in summary["table"])
    assert (one / "grpo_math.png").stat().st_size > 50_000
    assert (one / "table.csv").read_text().count("\n") == 1 + len(names)

    # Every run of another call can start from the weights that an arm of this one saved.
    args = tyro.cli(script.Args, args=[*command, "--out", str(two), "--parts", "chain",
                                       "--init", str(one / "sft")])  # fmt: skip
    assert script.main(args) == 0
    for seed in (0, 1):
        sft, grpo, dpo = (
            json.loads((folder / f"seed-{seed}" / "result.json").read_text())["curve"]
            for folder in (one / "sft", two / "chain-grpo", two / "chain-dpo")
        )
        assert grpo[0]["accuracy"] == max(p["accuracy"] for p in sft)
        assert dpo[0]["accuracy"] == max(p["accuracy"] for p in grpo)


def test_samples_of_a_measure_go_by_its_seed():
    env = measure.make_env(64, TASK, "held_out")
    policy = jobs.new_policy(env, 0)
    tasks = np.arange(8).repeat(8)
    first, again, other = (measure.answer_with(policy)(env, tasks, False, s)["length"] for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
