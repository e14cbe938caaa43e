"""Presets: each builds an agent that trains, and says what it was read from."""

import re
from dataclasses import fields

import gymnasium as gym
import pytest
from task_world import task_env
from worlds import POOL

import agents
from agents import presets
from agents.grpo import GRPOConfig
from llmgym.vector import AutoresetMode

NAMES = ["dapo", "deepseekmath", "dr-grpo", "gspo", "openrlhf", "trl", "verl"]


def length_of(name: str) -> dict[str, int]:
    return {"max_completion_length": 5} if name == "dr-grpo" else {}


def test_names_are_sorted_and_unknown_ones_give_the_nearest():
    assert presets.names() == NAMES
    with pytest.raises(ValueError, match="preset='drgrpo' is unknown; did you mean 'dr-grpo'.*dapo, "):
        presets.preset("drgrpo")


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_builds_an_agent_that_trains(name):
    for env in (gym.make_vec("AnswerPool-v0", num_envs=8, pool=POOL),
                task_env("native", AutoresetMode.SAME_STEP, 8)[0]):  # fmt: skip
        agent = agents.make("grpo", env, seed=0, **presets.preset(name), **length_of(name), num_generations=4)
        for field, value in presets.preset(name).items():
            assert getattr(agent.config, field) == value
        agent.learn(200)
        assert agent.n_updates > 0
        assert all(p.isfinite().all() for p in agent.policy.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_says_what_it_was_read_from_and_how_it_is_tested(name):
    preset = presets.PRESETS[name]
    version = r"arXiv \d{4}\.\d{5}v\d|commits? [0-9a-f]{8}|TRL \d+\.\d+\.\d+"
    assert re.search(version, preset.source), preset.source
    compared = preset.tested != presets.NOT_TESTED
    assert compared == ("TRL" in preset.tested) == (name not in ("verl", "openrlhf"))
    assert presets.NOT_TESTED == "read from source, not tested against it"


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_holds_choices_and_no_sizes(name):
    """Whatever it leaves open is the default of the configuration."""
    sizes = {"learning_rate", "num_generations", "n_groups", "batch_size", "max_grad_norm", "policy",
             "policy_kwargs", "max_completion_length"}  # fmt: skip
    names = {field.name for field in fields(GRPOConfig)}
    assert set(presets.preset(name)) <= names - sizes
    given = presets.preset(name)
    given["beta"] = 99.0  # a copy: the next one is as before
    assert presets.preset(name)["beta"] != 99.0


def test_the_defaults_are_those_of_the_preset_trl_but_for_one():
    """TRL corrects the KL in the loss unless it is told not to; here it has to be asked for."""
    config = GRPOConfig()
    differing = {k for k, value in presets.preset("trl").items() if getattr(config, k) != value}
    assert differing == {"use_bias_correction_kl"} and not config.use_bias_correction_kl


@pytest.mark.parametrize(
    ("name", "expected"),
    [("deepseekmath", {"beta": 0.04, "kl_estimator": "k3", "loss_type": "grpo"}),
     ("dr-grpo", {"scale_rewards": "none", "loss_type": "dr_grpo"}),
     ("dapo", {"epsilon": 0.2, "epsilon_high": 0.28, "dynamic_sampling": True, "loss_type": "dapo"}),
     ("gspo", {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}),
     ("verl", {"delta": 3.0, "std_eps": 1e-6, "beta": 0.001, "loss_type": "bnpo"}),
     ("openrlhf", {"std_eps": 1e-9, "beta": 0.01, "loss_type": "bnpo"})],
)  # fmt: skip
def test_what_sets_a_preset_apart(name, expected):
    assert expected.items() <= presets.preset(name).items()


def test_the_preset_trl_is_what_trl_does_without_being_told():
    """Every field that both configurations have, but for the step size and the constant of "dr_grpo"."""
    trl = pytest.importorskip("trl")
    theirs = {field.name: field.default for field in fields(trl.GRPOConfig)}
    ours = GRPOConfig(**presets.preset("trl"))
    shared = {field.name for field in fields(ours)} & set(theirs) - {"learning_rate", "max_completion_length"}
    assert len(shared) == 12
    assert {name: getattr(ours, name) for name in shared} == {name: theirs[name] for name in shared}
