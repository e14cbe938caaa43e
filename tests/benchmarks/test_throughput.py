"""Counting, timing, ratios and verdicts of the throughput benchmark against hand calculations."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

import agents
import throughput
from common.cartpole import RecordedCartPole, ScoreClock, make_cartpole
from common.environments import Episode, EpisodeLog, RecordEpisodes
from common.speed_env import NATIVE, SYNC, step_for
from common.speed_ppo import BARE, OURS, SB3, SB3_OURS, choosing, reaching
from common.speed_profile import PIECES, PieceTimer, profile, shares
from common.speed_report import make_ratios, outcome, verdicts
from common.speed_settings import OURS_BEST, SB3_BEST, SB3_ZOO
from common.timing import Sample, Timing, in_turns, speed_ratios, spread
from llmgym import AnswerPool

ROOT = Path(__file__).resolve().parents[2]


def sample(case, arm, seed, turn, amount, wall, cpu, **measures):
    return Sample(case, arm, seed, turn, amount, Timing(wall, cpu), measures)


# --------------------------------------------------------------------------- ratios and their spread


def test_ratios_are_taken_pair_by_pair():
    samples = [
        sample("c", "a", 0, 0, 600, 2.0, 1.0),  # 300 a second by wall clock, 600 by CPU time
        sample("c", "b", 0, 0, 500, 5.0, 5.0),  # 100, 100
        sample("c", "b", 1, 0, 400, 1.0, 0.5),  # 400, 800: in another order than the partner
        sample("c", "a", 1, 0, 800, 1.0, 1.0),  # 800, 800
        sample("other", "a", 1, 0, 1, 1.0, 1.0),
    ]
    assert speed_ratios(samples, "c", "a", "b", "wall") == [3.0, 2.0]
    assert speed_ratios(samples, "c", "a", "b", "cpu") == [6.0, 1.0]
    found = spread([3.0, 2.0, 7.0, 2.5])
    assert (found.value, found.low, found.high, found.n) == (2.75, 2.0, 7.0, 4)


def test_seconds_to_a_goal_are_rates_of_one():
    samples = [sample("c", "a", 0, 0, 1, 3.0, 2.0), sample("c", "b", 0, 0, 1, 12.0, 9.0)]
    assert speed_ratios(samples, "c", "a", "b", "wall") == [pytest.approx(4.0)]
    assert speed_ratios(samples, "c", "a", "b", "cpu") == [pytest.approx(4.5)]


def test_ratios_refuse_samples_without_a_partner():
    samples = [sample("c", "a", 0, 0, 1, 1, 1), sample("c", "b", 1, 0, 1, 1, 1)]
    with pytest.raises(ValueError, match="not measured on the same seeds"):
        speed_ratios(samples, "c", "a", "b", "cpu")
    with pytest.raises(ValueError, match="two samples of one seed"):
        speed_ratios([samples[0], samples[0], samples[1]], "c", "a", "b", "cpu")


def test_arms_take_turns():
    calls = []

    def arm(name):
        def work(seed):
            calls.append((seed, name))
            return 10.0, Timing(2.0, 1.0), {"seed was": seed}

        return work

    samples = in_turns("c", {"A": arm("A"), "B": arm("B")}, [5, 6], 2)
    assert calls == [(seed, name) for seed in (5, 6) for _ in range(2) for name in "AB"]
    assert [(s.seed, s.turn, s.arm) for s in samples[:4]] == [
        (5, 0, "A"), (5, 0, "B"), (5, 1, "A"), (5, 1, "B"),
    ]
    assert samples[3].rate("wall") == 5.0 and samples[3].measures == {"seed was": 5}


# --------------------------------------------------------------------------- counting steps


class FixedLength(gym.Env):
    """Episodes of `length` steps, every reward 1."""

    observation_space = gym.spaces.Box(0, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.k = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.k += 1
        return np.zeros(1, np.float32), 1.0, self.k == self.length, False, {}


def test_steps_that_only_reset_are_not_counted():
    # Rows of 1 and 3 steps under next-step autoreset: in two vector steps the first row takes one
    # step and is reset, the second takes two.
    logs = [EpisodeLog(), EpisodeLog()]
    env = SyncVectorEnv(
        [lambda: RecordEpisodes(FixedLength(1), logs[0]), lambda: RecordEpisodes(FixedLength(3), logs[1])]
    )
    env.reset(seed=0)
    transitions, timing = step_for(env, np.zeros((1, 2), int), 1e-9)
    assert transitions == logs[0].steps + logs[1].steps == 3
    assert timing.cpu > 0 and timing.wall > 0

    for log in logs:
        log.steps = 0
    env.reset(seed=0)
    transitions, _ = step_for(env, np.zeros((1, 2), int), 0.02)
    assert transitions == logs[0].steps + logs[1].steps  # what the environments themselves saw
    assert logs[1].steps > 12


def test_same_step_counts_every_step():
    env = gym.make_vec("AnswerPool-v0", num_envs=5)
    env.reset(seed=0)
    assert step_for(env, np.zeros((1, 5), int), 1e-9)[0] == 10


# --------------------------------------------------------------------------- CartPole's record


def test_native_cartpole_is_recorded_as_its_scalar_rows_are():
    """The episodes of the same physics, stepped row by row with Gymnasium's scalar environment."""
    log = EpisodeLog()
    env = RecordedCartPole(log, 3)
    observation, _ = env.reset(seed=4)
    rng = np.random.default_rng(0)
    scalar = gym.make("CartPole-v1").unwrapped
    # The scalar environment computes in float64 from the same start; the record is its lengths.
    starts, actions, lengths = [env.state[:, i].copy() for i in range(3)], [[], [], []], []
    for _ in range(200):
        action = rng.integers(2, size=3)
        executed = ~env.prev_done
        for row in range(3):
            if executed[row]:
                actions[row].append(int(action[row]))
        _, reward, terminated, truncated, _ = env.step(action)
        assert np.array_equal(reward, executed)
        for row in np.flatnonzero(terminated | truncated):
            scalar.reset()
            scalar.state = starts[row]
            ends = [scalar.step(a)[2] for a in actions[row]]
            assert ends == [False] * (len(ends) - 1) + [True]
            lengths.append(len(ends))
            actions[row] = []
        for row in np.flatnonzero(~executed):
            starts[row] = env.state[:, row].copy()
    assert len(lengths) > 10
    assert [e.length for e in log.episodes] == lengths
    assert [e.total for e in log.episodes] == lengths
    assert log.steps == sum(lengths) + sum(map(len, actions))


def test_native_cartpole_is_recorded_under_sb3s_adapter():
    log = EpisodeLog()
    model = agents.make("sb3:PPO", make_cartpole("native", 4, log, 0), seed=0, n_steps=64, batch_size=64)
    model.learn(512)
    # SB3 resets rows within the step, so every one of its steps is a transition.
    assert log.steps == model.num_timesteps == 512
    assert [e.total for e in log.episodes] == [e["r"] for e in model.ep_info_buffer][-100:]


@pytest.mark.parametrize("kind", ["sync", "dummy", "native"])
def test_every_kind_of_cartpole_is_recorded(kind):
    log = EpisodeLog()
    env = make_cartpole(kind, 2, log, 0)
    env.reset()
    for _ in range(100):
        env.step(np.array([1, 1]))
    assert log.episodes and all(8 <= e.length <= 11 and e.total == e.length for e in log.episodes)


# --------------------------------------------------------------------------- time to a score


class HandClock:
    def __init__(self):
        self.time = Timing(100.0, 10.0)

    def __call__(self):
        return self.time


def test_score_clock_stops_at_the_decisive_episode():
    hand = HandClock()
    clock = ScoreClock(threshold=10.0, budget=50.0, window=3, clock=hand)
    for k, total in enumerate([30.0, 30.0, 3.0, 3.0, 20.0, 7.0, 1.0], start=1):
        assert clock.reached is None or k > 3
        hand.time = Timing(100.0 + 2 * k, 10.0 + k)
        clock(Episode(0, total, 1))
    # Two episodes are no mean of three; the third makes 21. Later means (12, 8.7, ...) change nothing.
    assert clock.reached == Timing(6.0, 3.0)
    assert clock.result() == (Timing(6.0, 3.0), True) and not clock.running()


def test_score_clock_takes_the_threshold_itself_and_nothing_below():
    clock = ScoreClock(10.0, 50.0, window=2, clock=HandClock())
    clock(Episode(0, 10.0, 1))
    clock(Episode(0, 9.99, 1))
    assert clock.reached is None and clock.running()
    clock(Episode(0, 10.01, 1))
    assert clock.reached is not None


def test_failed_run_counts_as_its_budget():
    hand = HandClock()
    clock = ScoreClock(10.0, 5.0, clock=hand)
    hand.time = Timing(120.0, 14.9)
    assert clock.running()
    hand.time = Timing(130.0, 15.5)
    assert not clock.running()
    assert clock.result() == (Timing(30.0, 5.0), False)


@pytest.mark.parametrize("arm", [OURS, SB3])
def test_both_stop_when_the_score_is_reached(arm, monkeypatch):
    monkeypatch.setattr("common.speed_ppo.THRESHOLD", 15.0)  # at random play it is about 20
    settings = {"env": "native", "n_envs": 8, "total_timesteps": 1_000_000, "n_steps": 16, "batch_size": 128}
    amount, timing, measures = reaching(arm, settings, budget=600.0)(0)
    assert amount == 1.0 and measures["reached"] and timing.cpu > 0
    assert 100 * 15 * 0.8 < measures["env_steps"] < 10_000


# --------------------------------------------------------------------------- the answer pool


def test_bare_loop_solves_the_pool_with_the_same_updates():
    config = throughput.pool_config("ppo", throughput.Args())
    pool, distances = AnswerPool.default(), {}
    for arm in (OURS, BARE):
        amount, _, measures = choosing(arm, 100, 64, 0.3, config)(0)
        assert amount == 6400 and measures["updates"] == 400
        distances[arm] = measures["kl_opt"]
    start = pool.kl(pool.ref_probs, pool.optimal_policy(0.3))
    assert all(distance < 0.1 * start for distance in distances.values()), (start, distances)


def test_sb3_has_the_same_samples_and_updates():
    config = throughput.pool_config("sb3:PPO", throughput.Args())
    amount, _, measures = choosing(SB3, 5, 64, 0.3, config)(0)
    assert config["beta"] == 0.3 and amount == 320 and measures["updates"] == 20


# --------------------------------------------------------------------------- the profile


def test_pieces_count_their_own_time_only():
    times = iter([0.0, 1.0, 4.0, 6.0, 6.5, 16.0])
    timer = PieceTimer(clock=lambda: next(times))
    with timer.piece("outer"):  # from 0
        with timer.piece("inner"):  # from 1 to 4
            pass
        with timer.piece("inner"):  # from 6 to 6.5
            pass
    assert dict(timer.seconds) == {"outer": 1.0 + 2.0 + 9.5, "inner": 3.5}
    assert shares({"a": 3.0, "b": 1.0}) == {"a": 0.75, "b": 0.25}


def test_profile_finds_every_piece_and_changes_nothing():
    config = {"n_steps": 8, "batch_size": 16, "n_epochs": 2}
    plain, profiled = (
        agents.make("ppo", make_cartpole("sync", 4, EpisodeLog(), 0), seed=0, **config) for _ in range(2)
    )
    plain.learn(320)
    seconds = profile(profiled, 320)
    assert list(seconds) == list(PIECES) and min(seconds.values()) > 0
    grad = agents.ppo.training.gradient_step
    assert grad.__module__ == "agents.training"  # the timers are gone
    assert "collect" not in vars(profiled)
    for a, b in zip(plain.policy.parameters(), profiled.policy.parameters(), strict=True):
        assert (a == b).all()


# --------------------------------------------------------------------------- the report


def test_verdicts_name_what_was_met_and_what_was_not():
    samples = [
        sample("CartPole, Zoo settings", OURS, 0, 0, 200, 1.0, 1.0, final_return=90.0),
        sample("CartPole, Zoo settings", SB3, 0, 0, 100, 1.0, 1.0, final_return=80.0),
        sample("answer pool", OURS, 0, 0, 64, 1.0, 1.0, kl_opt=0.1, updates=4),
        sample("answer pool", SB3, 0, 0, 64, 7.0, 5.0, kl_opt=0.1, updates=4),
    ]
    met, missed = verdicts(make_ratios(samples))
    assert "target 1.8 times or more met (measured 2.00 [2.00, 2.00] by CPU time" in met
    # The wall clock's 7 would do; the CPU clock decides.
    assert "target 6 times or more MISSED (measured 5.00 [5.00, 5.00] by CPU time, 7.00" in missed


def test_runs_that_failed_are_named_and_never_judged_alone():
    case, done, failed = "CartPole to 475", {"reached": True}, {"reached": False}
    samples = [
        sample(case, OURS, 0, 0, 1, 4.0, 4.0, **done),
        sample(case, SB3, 0, 0, 1, 60.0, 60.0, **failed),
        sample(case, SB3_OURS, 0, 0, 1, 8.0, 8.0, **done),
    ]
    first, second = verdicts(make_ratios(samples))
    assert "target 4 times or more met (measured 15.00" in first
    assert "in 1 of 1 pairs a run did not get there and counts as its budget" in first
    assert "has no target (measured 2.00 [2.00, 2.00]" in second and "counts as" not in second

    samples[0] = sample(case, OURS, 0, 0, 1, 10.0, 10.0, **failed)
    first, _ = verdicts(make_ratios(samples))
    assert "NOT JUDGED, in 1 pairs neither got there" in first


def test_outcome_counts_equal_runs_once():
    runs = [(0, 0, 10.0), (0, 1, 10.0), (1, 0, 40.0)]  # seed, turn, return
    samples = [sample("c", OURS, seed, turn, 1, 1, 1, final_return=mean) for seed, turn, mean in runs]
    assert outcome(samples) == "last 100 episodes: 25 [10, 40]"


def test_environments_are_compared_too():
    samples = [
        sample("AnswerPool, default x 8", NATIVE, 0, 0, 900, 1.0, 1.0, n_envs=8),
        sample("AnswerPool, default x 8", SYNC, 0, 0, 100, 1.0, 1.0, n_envs=8),
    ]
    (ratio,) = make_ratios(samples)
    assert ratio.cpu.value == 9.0 and ratio.target is None and verdicts([ratio]) == []


# --------------------------------------------------------------------------- the script


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seeds": 0}, "--seeds is 0"),
        ({"n_envs": (8, 8)}, "--n-envs"),
        ({"budget": 0.0}, "--budget is 0.0"),
        ({"samples": 1}, "--samples is 1"),
        ({"new_tokens": 0}, "--new-tokens is 0"),
        ({"parts": ()}, "--parts is empty"),
    ],
)
def test_bad_options_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        throughput.check(throughput.Args(**change))


def test_best_settings_are_settings_of_both():
    extra = {"env", "n_envs", "total_timesteps"}
    for settings in (OURS_BEST, SB3_BEST, SB3_ZOO):
        assert set(settings) - extra <= agents.config_fields("ppo") & agents.config_fields("sb3:PPO")
        assert extra <= set(settings)


def test_the_script_end_to_end(tmp_path):
    command = [
        sys.executable, "benchmarks/throughput.py", "--quick", "--parts", "env", "identical", "threshold",
        "pool", "profile", "--n-envs", "1", "4", "--env-seconds", "0.01", "--steps", "512", "--rounds", "3",
        "--budget", "0.2", "--out", str(tmp_path),
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": "."}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "answer pool, our PPO / SB3's PPO: target 6 times or more" in run.stdout
    assert "[smallest, largest]" in run.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary["targets"]) == 5 and set(summary["profiles"]) == {"CartPole", "answer pool"}
    with (tmp_path / "samples.csv").open() as file:
        rows = list(csv.DictReader(file))
    # 3 environments x 2 sizes x 2 arms, then 2, 4 and 3 arms.
    assert len(rows) == len(summary["samples"]) == 12 + 2 + 4 + 3
    assert {row["updates"] for row in rows if row["case"] == "answer pool"} == {"12"}
    assert (tmp_path / "ratios.csv").exists() and (tmp_path / "throughput.png").stat().st_size > 10_000
