"""The sweep from the command line to its files, with a few steps."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

import cartpole_clip_sweep as sweep
from common.clip_report import judge_groups, measure, summary_row
from common.collapse import METHODS, RATES, collapse_rows
from common.control import ZOO_CARTPOLE, agent_config, default_n_envs, train
from common.environments import Episode, EpisodeLog
from common.runner import Job, Outcome

ROOT = Path(__file__).parents[2]

CUSTOM_AGENT = '''
"""An agent that knows nothing of the project: one plain environment, a coin for a policy."""
import gymnasium as gym
import numpy as np


class Coin:
    def __init__(self, env, seed=None, side=0.5):
        assert isinstance(env, gym.Env)
        self.env, self.side, self.rng = env, side, np.random.default_rng(seed)
        self.fails = seed == 1000 and FAILS

    def learn(self, total_timesteps):
        self.env.reset()
        for step in range(total_timesteps):
            if self.fails and step == 50:
                raise FloatingPointError("the coin landed on its edge")
            _, _, terminated, truncated, _ = self.env.step(self.predict(None)[0])
            if terminated or truncated:
                self.env.reset()
        return self

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        return int(self.rng.random() < self.side), state

    def save(self, path):
        pass

    @classmethod
    def load(cls, path, env):
        return cls(env)
'''


def run_script(*options, path=None):
    folders = [str(ROOT), str(path)] if path else [str(ROOT)]
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "cartpole_clip_sweep.py"), *map(str, options)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=600,
    )


def check_figure(path):
    image = matplotlib.image.imread(path)
    assert image.shape[0] > 500 and image.shape[1] > 900 and image[..., :3].std() > 0.05


def test_ppo_end_to_end(tmp_path):
    options = ["--steps", 600, "--runs", 1, "--clip", 0.1, 0.2, 0.3, "none", "--out", tmp_path]
    done = run_script(*options, "--threshold", 15)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'Expectation "0.2 is the best balance' in done.stdout
    assert "too few runs to say" in done.stdout  # one run
    assert f"wrote {tmp_path / 'collapse.png'}" in done.stdout
    check_figure(tmp_path / "learning_curves.png")
    check_figure(tmp_path / "collapse.png")

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [row["clip"] for row in summary["groups"]] == [0.1, 0.2, 0.3, "none"]
    assert len(summary["collapse"]) == len(METHODS) * len(RATES)
    with (tmp_path / "summary.csv").open() as file:
        table = list(csv.DictReader(file))
    for row, cells in zip(summary["groups"], table, strict=True):
        assert row["reached"] == 0 or row["episodes_to_threshold"]["value"] >= 100
        name = f"ppo_clip-{row['clip']}_lambda-0.8_scale-1"
        log = EpisodeLog.load(tmp_path / name / "seed-0" / "episodes.csv")
        # CartPole pays 1 a step, so the record checks itself. Three rollouts of 8 x 32 steps; what
        # is not in it are the last, unfinished episodes.
        assert log.returns.tolist() == [episode.length for episode in log.episodes]
        assert 256 < log.returns.sum() <= log.end_steps[-1] <= 768
        assert row["last_mean"]["value"] == pytest.approx(log.returns[-100:].mean())
        assert float(cells["last_mean"]) == row["last_mean"]["value"]

    config = json.loads(
        (tmp_path / "ppo_clip-none_lambda-0.8_scale-1/seed-0/config.json").read_text()
    )
    assert config["agent_config"] == ZOO_CARTPOLE | {"clip_range": None}
    assert config["n_envs"] == 8

    # Again with another threshold: an analysis, so no run is repeated.
    again = run_script(*options, "--threshold", 20)
    assert again.returncode == 0
    assert f"{4 + len(summary['collapse'])} of {4 + len(summary['collapse'])} runs" in again.stdout


@pytest.fixture
def coin(tmp_path, monkeypatch):
    """Folder of a module with the custom agent; the agent's name is "coin_agent:Coin"."""
    (tmp_path / "coin_agent.py").write_text(CUSTOM_AGENT.replace("FAILS", "False"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "coin_agent", raising=False)
    return tmp_path


def test_custom_agent_on_a_plain_env_and_a_failing_run(coin, tmp_path):
    (coin / "coin_agent.py").write_text(CUSTOM_AGENT.replace("FAILS", "True"))
    out = tmp_path / "out"
    done = run_script(
        "--agent", "coin_agent:Coin", "--runs", 3, "--steps", 400, "--out", out, path=coin
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the coin landed on its edge" in done.stdout and '"seed": 1000' in done.stdout
    summary = json.loads((out / "summary.json").read_text())
    (row,) = summary["groups"]  # no clip range: one group
    assert (row["clip"], row["gae_lambda"], row["runs"]) == (None, None, 2)
    assert summary["expectation"] == {} and summary["collapse"] == []
    config = json.loads((out / "coin_agent-Coin_scale-1/seed-2000/config.json").read_text())
    assert config["n_envs"] == 1 and config["agent_config"] == {}
    log = EpisodeLog.load(out / "coin_agent-Coin_scale-1/seed-2000/episodes.csv")
    assert log.returns.sum() <= 400 and len(log.episodes) > 5
    assert len(EpisodeLog.load(out / "coin_agent-Coin_scale-1/seed-1000/episodes.csv").episodes) > 0


def test_runs_are_reproducible_and_their_environments_differ(coin, tmp_path):
    def returns(seed, name):
        config = {
            "env": "CartPole-v1", "agent": "coin_agent:Coin", "n_envs": 1, "reward_scale": 1.0,
            "steps": 300, "seed": seed, "agent_config": {},
        }  # fmt: skip
        train(config, tmp_path / name)
        return EpisodeLog.load(tmp_path / name / "episodes.csv").returns.tolist()

    assert returns(0, "a") == returns(0, "b") != returns(1, "c")


def test_agent_config_takes_the_zoos_settings_or_none(coin):
    assert agent_config("ppo", clip_range=0.1) == ZOO_CARTPOLE | {"clip_range": 0.1}
    assert agent_config("sb3:PPO", clip_range=0.1) == ZOO_CARTPOLE | {"clip_range": 0.1}
    assert agent_config("reinforce", clip_range=0.1, learning_rate=0.5) == {"learning_rate": 0.5}
    assert agent_config("coin_agent:Coin", clip_range=0.1) == {}
    names = ("ppo", "sb3:PPO", "sb3_contrib:TRPO", "coin_agent:Coin")
    assert [default_n_envs(name) for name in names] == [8, 8, 8, 1]


def test_grid_is_full_and_its_names_differ():
    args = sweep.Args(clip=(0.1, "none"), reward_scale=(1.0, 0.01), gae_lambda=(0.8, 1.0))
    groups = sweep.make_groups(args)
    cells = [(group.clip, group.reward_scale, group.gae_lambda) for group in groups]
    assert sorted(map(str, cells)) == sorted(
        str((clip, scale, lam))
        for clip in (0.1, "none")
        for scale in (1.0, 0.01)
        for lam in (0.8, 1.0)
    )
    assert len({group.folder for group in groups}) == 8 == len({group.label for group in groups})
    assert len({group.panel for group in groups}) == 4
    jobs = [job for group in groups for job in sweep.make_jobs(args, group)]
    assert len({job.name for job in jobs}) == 8 * 5
    for group in groups:
        for job in sweep.make_jobs(args, group):
            assert job.config["reward_scale"] == group.reward_scale
            assert job.config["agent_config"]["gae_lambda"] == group.gae_lambda
    assert {job.config["seed"] for job in jobs} == {0, 1000, 2000, 3000, 4000}


def test_an_agent_without_a_clip_range_is_one_group(coin):
    (group,) = sweep.make_groups(sweep.Args(agent="reinforce"))
    assert (group.clip, group.gae_lambda, group.label) == (None, None, "reinforce")
    with pytest.raises(ValueError, match="no field gae_lambda"):
        sweep.make_groups(sweep.Args(agent="coin_agent:Coin", gae_lambda=(0.8, 0.9)))


def test_quick_leaves_explicit_options_alone():
    quick = sweep.apply_quick(sweep.Args(quick=True), sweep.QUICK)
    assert (quick.clip, quick.runs, quick.steps, quick.collapse) == ((0.2,), 2, 100_000, False)
    assert quick.out != sweep.Args().out  # or it would overwrite runs of the full sweep
    own = sweep.apply_quick(sweep.Args(quick=True, clip=(0.3,), out=Path("x")), sweep.QUICK)
    assert (own.clip, own.out, own.runs) == ((0.3,), Path("x"), 2)
    assert sweep.apply_quick(sweep.Args(), sweep.QUICK) == sweep.Args()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (sweep.Args(runs=0), "--runs is 0"),
        (sweep.Args(n_envs=0), "--n-envs is 0"),
        (sweep.Args(clip=(0.2, 0.2)), "--clip needs one or more different"),
        (sweep.Args(clip=(-0.1,)), "--clip -0.1"),
        (sweep.Args(gae_lambda=(1.5,)), "--gae-lambda 1.5"),
        (sweep.Args(env="CartPoll-v1"), "CartPoll"),
        (sweep.Args(agent="pppo"), "did you mean 'ppo'"),
    ],
)
def test_bad_options_are_one_line(args, message, capsys):
    assert sweep.main(args) == 2
    captured = capsys.readouterr().out
    assert message in captured and "Traceback" not in captured


def make_log(returns):
    """A log of a single CartPole: as many steps as return."""
    ends = np.cumsum(returns)
    episodes = [Episode(int(end), float(r), r) for end, r in zip(ends, returns, strict=True)]
    return EpisodeLog(int(ends[-1]), episodes)


def test_summary_by_hand():
    group = sweep.make_groups(sweep.Args())[1]
    learns = make_log([20] * 100 + [500] * 100 + [400, 500])
    fails = make_log([20] * 150)
    row = summary_row(measure(group, [learns, fails, learns], 450))
    # 450 = (20 (100 - k) + 500 k) / 100 at k = 89.6, so episode 190; then 10 x 500, 400, 500.
    assert row["reached"] == 2 and row["episodes_to_threshold"].value == 190
    after = np.std([500] * 10 + [400, 500], ddof=1)
    assert row["std_after"].value == pytest.approx(after) and row["std_after"].n == 2
    assert row["last_mean"].value == pytest.approx((2 * 499 + 20) / 3)


def test_verdict_for_each_panel_that_has_the_three_clips():
    args = sweep.Args(clip=(0.1, 0.2, 0.3, "none"), reward_scale=(1.0, 0.1))
    log = make_log([20] * 120)
    results = [measure(group, [log] * 2, 450) for group in sweep.make_groups(args)]
    assert list(judge_groups(results)) == ["reward x 1", "reward x 0.1"]
    assert judge_groups(results[:2]) == {}


def test_collapse_counts(tmp_path):
    outcomes = []
    histories = {0: [20] * 100 + [500] * 200, 1: [500] * 200 + [9] * 200, 2: [9] * 200}
    for seed, returns in histories.items():
        folder = tmp_path / str(seed)
        make_log(returns).save(folder / "episodes.csv")
        config = {"method": "PPO, clip 0.2", "agent_config": {"learning_rate": 0.01}, "seed": seed}
        outcomes.append(Outcome(Job(str(seed), config), folder, {}))
    (row,) = collapse_rows("CartPole-v1", outcomes)
    assert (row["runs"], row["collapsed"]) == (3, 2)
    assert row["last_mean"].value == pytest.approx((500 + 9 + 9) / 3)
    assert collapse_rows("CartPole-v1", []) == []


def test_sb3_agent_leaves_a_complete_record(tmp_path):
    config = {
        "env": "CartPole-v1", "agent": "sb3:PPO", "n_envs": 8, "reward_scale": 0.1,
        "steps": 512, "seed": 0, "agent_config": agent_config("sb3:PPO", clip_range=0.2),
    }  # fmt: skip
    result = train(config, tmp_path)
    log = EpisodeLog.load(tmp_path / "episodes.csv")
    assert result["episodes"] == len(log.episodes) > 10
    assert log.returns.tolist() == [episode.length for episode in log.episodes]  # not scaled
    assert np.all(np.diff(log.end_steps) > 0)
