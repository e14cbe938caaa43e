"""Saved agents, and what a run writes."""

import json
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from worlds import POOL, parameters, sync

import agents
from agents.grpo import GRPO
from agents.metrics import METRICS
from agents.policies import MLPPolicy, TablePolicy
from agents.ppo import PPO
from agents.reinforce import Reinforce
from agents.remax import ReMax
from agents.rloo import RLOO

CONFIGS = {
    "ppo": {"n_steps": 16, "batch_size": 8, "n_epochs": 2},
    "reinforce": {},
    "rloo": {"num_generations": 2, "n_groups": 2},
    "remax": {"n_groups": 4},
    "grpo": {"num_generations": 2, "n_groups": 4, "batch_size": 4, "num_iterations": 2},
}
KINDS = {"ppo": PPO, "reinforce": Reinforce, "rloo": RLOO, "remax": ReMax, "grpo": GRPO}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "AnswerPool-v0"])
@pytest.mark.parametrize("name", list(KINDS))
def test_a_loaded_agent_goes_on_as_the_saved_one(name, env_id, tmp_path):
    def make_env():
        limit = {} if env_id == "AnswerPool-v0" else {"max_episode_steps": 40}
        return gym.make_vec(env_id, num_envs=2, **limit)

    saved = agents.make(name, make_env(), seed=0, **CONFIGS[name], learning_rate=np.float64(0.01)).learn(100)
    path = tmp_path / "new folder" / "agent.pt"
    saved.save(path)
    loaded = KINDS[name].load(str(path), make_env())
    assert [p.name for p in path.parent.iterdir()] == ["agent.pt"]  # no half-written file is left

    assert torch.equal(parameters(saved), parameters(loaded)) and loaded.config == saved.config
    assert (loaded.num_timesteps, loaded.n_updates) == (saved.num_timesteps, saved.n_updates)
    observations = np.array([make_env().single_observation_space.sample() for _ in range(5)])
    for deterministic in (True, False):  # sampled ones only agree if the generator does
        pair = [agent.predict(observations, deterministic=deterministic)[0] for agent in (saved, loaded)]
        np.testing.assert_array_equal(*pair)
    # The next update, with its optimiser state and its shuffles, is the same one.
    rollout = saved.collect()
    loaded.generator.set_state(saved.generator.get_state())
    saved.update(rollout)
    loaded.update(replace(rollout, policy_version=loaded.collector.policy_version))
    assert torch.equal(parameters(saved), parameters(loaded))
    loaded.learn(50)


def test_an_optimiser_that_was_not_restored_would_show(tmp_path):
    env = sync("CartPole-v1")
    saved = PPO(env, seed=0, **CONFIGS["ppo"], learning_rate=0.01).learn(100)
    fresh = PPO(env, seed=0, **CONFIGS["ppo"], learning_rate=0.01)
    fresh.policy.load_state_dict(saved.policy.state_dict())
    rollout = saved.collect()
    fresh.generator.set_state(saved.generator.get_state())
    saved.update(rollout)
    fresh.update(replace(rollout, policy_version=0))
    assert not torch.equal(parameters(saved), parameters(fresh))


def test_what_does_not_fit_is_refused(tmp_path):
    cartpole, pool = sync("CartPole-v1"), gym.make_vec("AnswerPool-v0", num_envs=2, pool=POOL)
    path = tmp_path / "agent.pt"
    PPO(cartpole, seed=0, policy_kwargs={"net_arch": (8,)}).save(path)
    assert PPO.load(path, cartpole).policy.weights[0].shape == (2, 4, 8)
    with pytest.raises(ValueError, match="agent.pt holds 'ppo', expected an agent saved by 'reinforce'"):
        Reinforce.load(path, cartpole)
    with pytest.raises(ValueError, match=r"agent.pt.*do(es)? not fit.*Box.*Discrete\(3\)"):
        PPO.load(path, sync("Acrobot-v1"))
    PPO(pool, seed=0).save(path)
    with pytest.raises(ValueError, match="agent.pt.*do(es)? not fit"):
        PPO.load(path, cartpole)


def test_what_is_no_saved_agent(tmp_path):
    env, path = sync("CartPole-v1"), tmp_path / "agent.pt"
    with pytest.raises(FileNotFoundError):
        PPO.load(path, env)
    for garbage in (b"", b"not an agent", b"PK\x03\x04 broken"):
        path.write_bytes(garbage)
        with pytest.raises(ValueError, match="agent.pt is not a saved agent"):
            PPO.load(path, env)
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match="agent.pt holds 'list'"):
        PPO.load(path, env)
    PPO(env, seed=0).save(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match="agent.pt is not a saved agent"):
        PPO.load(path, env)


def test_nothing_in_a_file_is_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    path = tmp_path / "agent.pt"
    torch.save({"algorithm": "ppo", "policy": Trap()}, path)
    with pytest.raises(ValueError, match="not a saved agent"):
        PPO.load(path, sync("CartPole-v1"))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", list(KINDS))
def test_a_policy_or_reference_given_as_an_object_is_given_again(name, tmp_path):
    env = gym.make_vec("AnswerPool-v0", num_envs=4, pool=POOL)
    reference = TablePolicy(2, 4)
    given = {"policy": TablePolicy(2, 4), "reference": reference, "beta": 0.1}
    agent = agents.make(name, env, seed=0, **given, **CONFIGS[name])
    agent.learn(50)
    path, kind = tmp_path / "agent.pt", KINDS[name]
    agent.save(path)
    with pytest.raises(ValueError, match="with a reference of its own; pass reference="):
        kind.load(path, env, policy=TablePolicy(2, 4))
    with pytest.raises(ValueError, match="with a policy of its own; pass policy="):
        kind.load(path, env, reference=reference)
    loaded = kind.load(path, env, reference=reference, policy=TablePolicy(2, 4))
    assert torch.equal(parameters(agent), parameters(loaded))
    loaded.learn(20)


def test_a_loaded_agent_may_be_saved_and_trained_apart(tmp_path):
    env = sync("CartPole-v1")
    first = PPO(env, seed=0, **CONFIGS["ppo"])
    first.save(tmp_path / "a.pt")
    second = PPO.load(tmp_path / "a.pt", env)
    before = parameters(first)
    second.learn(64)
    assert torch.equal(before, parameters(first)) and not torch.equal(before, parameters(second))
    second.save(tmp_path / "a.pt")  # over the old one
    assert torch.equal(parameters(PPO.load(tmp_path / "a.pt", env)), parameters(second))


# --- what a run writes ---


@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize("env_id", ["CartPole-v1", "AnswerPool-v0"])
def test_a_run_writes_metrics_that_are_described(name, env_id, tmp_path):
    env = gym.make_vec(env_id, num_envs=4)
    config = {"beta": 0.1} if env_id == "AnswerPool-v0" else {}
    agent = agents.make(name, env, seed=0, **CONFIGS[name], **config)
    steps = []
    agent.learn(300, run_dir=tmp_path / "run", callback=lambda a: steps.append(a.num_timesteps))

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert [line["step"] for line in lines] == steps == [line["time/total_timesteps"] for line in lines]
    for line in lines:
        assert set(line) - {"step"} <= set(METRICS)
    last = lines[-1]
    assert last["rollout/ep_rew_mean"] == pytest.approx(np.mean(agent.collector.recent_returns))
    assert last["rollout/ep_len_mean"] == pytest.approx(np.mean(agent.collector.recent_lengths))
    assert last["train/n_updates"] == agent.n_updates
    assert ("train/kl_ref" in last) is (env_id == "AnswerPool-v0")
    assert list((tmp_path / "run").glob("events.out.tfevents*"))
    agent.learn(1, run_dir=tmp_path / "run")  # appends
    more = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert more.startswith(text) and len(more.splitlines()) == len(lines) + 1


@pytest.mark.parametrize("name", list(KINDS))
def test_writing_does_not_change_the_run(name, tmp_path):
    def run(**options):
        agent = agents.make(name, sync("CartPole-v1"), seed=0, **CONFIGS[name])
        return parameters(agent.learn(100, **options))

    assert torch.equal(run(), run(run_dir=tmp_path, progress_bar=True))


def test_metrics_mean_what_the_page_says():
    env = gym.make_vec("AnswerPool-v0", num_envs=64, pool=POOL)
    agent = PPO(env, seed=0, n_steps=4, batch_size=256, n_epochs=1, beta=0.1, learning_rate=0.0)
    agent.policy.logits.data += torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    rollout = agent.collect()
    batch = agent.prepare(rollout)
    metrics = agent.update(rollout)
    advantage = batch.returns - batch.old_values
    policy = agent.policy.probabilities(torch.arange(2)).detach().double().numpy()
    tasks = rollout.flat(rollout.observations).numpy()
    entropy = -(policy * np.log(policy)).sum(1)[tasks].mean()
    assert metrics["train/entropy"] == pytest.approx(entropy, rel=1e-5)
    sampled = np.log(policy / POOL.ref_probs)[tasks, rollout.flat(rollout.actions).numpy()]
    assert metrics["train/kl_ref"] == pytest.approx(sampled.mean(), rel=1e-4)
    assert metrics["train/value_loss"] == pytest.approx(advantage.square().mean().item(), rel=1e-5)
    variance = 1 - advantage.var() / batch.returns.var()
    assert metrics["train/explained_variance"] == pytest.approx(variance.item(), abs=1e-5)
    assert metrics["rollout/ep_len_mean"] == 1.0
    assert metrics["rollout/ep_rew_mean"] == pytest.approx(np.mean(list(agent.collector.recent_returns)))
    # Whitened advantages at ratio 1: the loss of the policy is minus their mean, which is 0.
    assert metrics["train/policy_gradient_loss"] == pytest.approx(0, abs=1e-6)
    total = metrics["train/policy_gradient_loss"] + 0.5 * metrics["train/value_loss"]
    assert metrics["train/loss"] == pytest.approx(total, rel=1e-5)


def test_mlp_weights_in_a_file_are_those_of_the_policy(tmp_path):
    agent = PPO(sync("CartPole-v1"), seed=0, **CONFIGS["ppo"]).learn(32)
    assert isinstance(agent.policy, MLPPolicy)
    agent.save(tmp_path / "agent.pt")
    state = torch.load(tmp_path / "agent.pt", weights_only=True)
    for name, value in agent.policy.state_dict().items():
        assert torch.equal(state["policy"][name], value)
