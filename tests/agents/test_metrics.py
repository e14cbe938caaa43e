"""Metrics, schedules and configuration checks."""

import json

import numpy as np
import pytest

from agents.metrics import METRICS, TrainingLog, describe
from agents.ppo import PPOConfig
from agents.reinforce import ReinforceConfig
from agents.schedules import schedule
from agents.training import make_config


def strict(text: str):
    """JSON as the standard has it: Python's reader also takes NaN and Infinity."""

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_metrics_are_strict_json_lines_and_events(tmp_path):
    values = {"train/loss": 0.5, "train/approx_kl": float("inf"), "train/value_loss": float("-inf"),
              "rollout/ep_rew_mean": float("nan")}  # fmt: skip
    with TrainingLog(100, tmp_path / "deep" / "er", progress_bar=False) as log:
        log.write(10, 10, values)
        log.write(20, 20, {"train/loss": 0.25})
    lines = strict((tmp_path / "deep" / "er" / "metrics.jsonl").read_text())
    assert lines == [
        {"step": 10, "train/loss": 0.5, "train/approx_kl": None, "train/value_loss": None,
         "rollout/ep_rew_mean": None},
        {"step": 20, "train/loss": 0.25},
    ]  # fmt: skip

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "deep" / "er"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(10, 0.5), (20, 0.25)]
    assert "rollout/ep_rew_mean" not in events.Tags()["scalars"]


def test_a_name_without_a_definition_cannot_be_logged(tmp_path):
    with TrainingLog(10, tmp_path, progress_bar=False) as log, pytest.raises(KeyError, match="train/made_up"):
        log.write(1, 1, {"train/made_up": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with TrainingLog(10, None, progress_bar=False) as log:
        log.write(1, 1, {"train/loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_the_bar_shows_the_return_and_the_position(capsys):
    with TrainingLog(100, None, progress_bar=True) as log:
        log.write(50, 50, {"rollout/ep_rew_mean": 12.5})
    shown = capsys.readouterr().out
    assert "12.50" in shown and "50/100 steps" in shown


def test_the_page_of_definitions_names_every_metric():
    page = describe()
    assert all(name in page and meaning in page for name, meaning in METRICS.items())
    assert len(page.splitlines()) == len(METRICS)


def test_schedules():
    assert [schedule(0.3)(p) for p in (1.0, 0.5, 0.0)] == [0.3] * 3
    assert [schedule("lin_0.3")(p) for p in (1.0, 0.5, 0.0)] == [0.3, 0.15, 0.0]
    assert schedule(0)(0.5) == 0.0
    assert schedule("lin_1e-3")(0.5) == 5e-4


@pytest.mark.parametrize(
    "value", ["0.3", "lin", "lin_", "lin_x", "log_0.1", "lin_nan", "lin_inf", "lin_-0.1", -0.1, None, True,
              float("nan"), float("inf"), [0.1]]
)  # fmt: skip
def test_what_is_no_schedule_is_named(value):
    with pytest.raises(ValueError, match=r"learning_rate=.*allowed.*lin_0.001"):
        schedule(value, "learning_rate")


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [("n_steps", 0, ">= 1"), ("n_steps", 2.5, ">= 1"), ("batch_size", -3, ">= 1"), ("n_epochs", 1.5, ">= 1"),
     ("gamma", 1.01, r"in \[0, 1\]"), ("gae_lambda", -0.1, r"in \[0, 1\]"), ("gamma", float("nan"), "in"),
     ("clip_range", "0.2", "lin_"), ("clip_range", -0.2, "allowed"), ("learning_rate", -1e-3, "allowed"),
     ("clip_range_vf", 0.0, "> 0"), ("max_grad_norm", 0, "> 0"), ("target_kl", -0.01, "> 0"),
     ("beta", -0.1, ">= 0"), ("ent_coef", "big", ">= 0"), ("vf_coef", float("inf"), ">= 0"),
     ("kl_in", "los", "did you mean 'loss'"), ("kl_estimator", "k4", "k1, k2, k3")],
)  # fmt: skip
def test_bad_values_of_ppo_name_field_value_and_what_is_allowed(field, value, allowed):
    with pytest.raises(ValueError, match=f"{field}={value!r}.*{allowed}"):
        PPOConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [("n_episodes", 0, ">= 1"), ("n_episodes", 1.5, ">= 1"), ("gamma", 2, r"in \[0, 1\]"),
     ("baseline", "batch_meen", "did you mean 'batch_mean'"), ("learning_rate", "fast", "lin_")],
)  # fmt: skip
def test_bad_values_of_reinforce_name_field_value_and_what_is_allowed(field, value, allowed):
    with pytest.raises(ValueError, match=f"{field}={value!r}.*{allowed}"):
        ReinforceConfig(**{field: value})


def test_off_and_numpy_numbers_are_accepted():
    PPOConfig(clip_range=None, clip_range_vf=None, max_grad_norm=None, target_kl=None)
    given = {"n_steps": np.int64(8), "learning_rate": np.float32(0.25), "gamma": np.float64(0.5)}
    config = make_config(PPOConfig, given)
    assert [(type(x), x) for x in (config.n_steps, config.learning_rate, config.gamma)] == [
        (int, 8), (float, 0.25), (float, 0.5)
    ]  # fmt: skip
