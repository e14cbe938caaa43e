"""Policies against torch.distributions and plain networks."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from torch import nn

import llmgym  # noqa: F401  (registers the ids)
from agents.policies import GPTPolicy, MLPPolicy, Policy, TablePolicy, make_policy
from agents.policies.spaces import check_spaces, decode_actions, encode_observations, flat_size
from llmgym import AnswerPool

BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spaced(observation_space, action_space):
    """An environment that has spaces and nothing else."""

    class Spaced(gym.Env):
        def reset(self, *, seed=None, options=None):
            return self.observation_space.sample(), {}

        def step(self, action):
            return self.observation_space.sample(), 0.0, False, False, {}

    Spaced.observation_space, Spaced.action_space = observation_space, action_space
    return SyncVectorEnv([Spaced])


# --- the MLP ---


def towers(policy: MLPPolicy) -> tuple[nn.Sequential, nn.Sequential]:
    """Two plain networks with copies of the policy's weights."""
    networks = []
    for which, (weight, bias) in enumerate(
        [(policy.actor_weight, policy.actor_bias), (policy.critic_weight, policy.critic_bias)]
    ):
        layers = [(w[which], b[which, 0]) for w, b in zip(policy.weights, policy.biases, strict=True)]
        network = nn.Sequential()
        for w, b in [*layers, (weight, bias)]:
            linear = nn.Linear(*w.shape)
            linear.weight.data, linear.bias.data = w.detach().T.clone(), b.detach().clone()
            network.extend([linear, nn.Tanh()])
        networks.append(network[:-1])
    return networks[0], networks[1]


@pytest.fixture
def mlp() -> MLPPolicy:
    policy = MLPPolicy(BOX, spaces.Discrete(4), generator(), net_arch=(8, 5))
    for p in policy.parameters():  # biases start at 0 and the actor's head near 0: neither would show
        p.data += 0.3 * torch.randn(p.shape, generator=generator(1))
    return policy


def test_fused_forward_is_two_plain_networks(mlp):
    actor, critic = towers(mlp)
    observations = torch.randn(6, 3, generator=generator(2))
    logits, values = mlp(observations)
    np.testing.assert_allclose(logits.detach(), actor(observations).detach(), atol=1e-6)
    np.testing.assert_allclose(values.detach(), critic(observations)[:, 0].detach(), atol=1e-6)
    np.testing.assert_allclose(mlp.actor(observations).detach(), logits.detach(), atol=1e-6)
    np.testing.assert_allclose(mlp.value(observations).detach(), values.detach(), atol=1e-6)


def test_fused_gradient_is_that_of_two_plain_networks(mlp):
    actor, critic = towers(mlp)
    observations, actions = torch.randn(6, 3, generator=generator(3)), torch.tensor([0, 1, 2, 3, 0, 1])
    log_prob, entropy, value = mlp.evaluate(observations, actions)
    (log_prob.sum() + 0.3 * entropy.sum() + value.square().sum()).backward()
    distribution = torch.distributions.Categorical(logits=actor(observations))
    loss = distribution.log_prob(actions).sum() + 0.3 * distribution.entropy().sum()
    (loss + critic(observations).square().sum()).backward()

    plain = [[layer for layer in network if isinstance(layer, nn.Linear)] for network in (actor, critic)]
    for depth, (weight, bias) in enumerate(zip(mlp.weights, mlp.biases, strict=True)):
        for which in range(2):
            layer = plain[which][depth]
            np.testing.assert_allclose(weight.grad[which], layer.weight.grad.T, atol=1e-5)
            np.testing.assert_allclose(bias.grad[which, 0], layer.bias.grad, atol=1e-5)
    np.testing.assert_allclose(mlp.actor_weight.grad, plain[0][-1].weight.grad.T, atol=1e-5)
    np.testing.assert_allclose(mlp.critic_weight.grad, plain[1][-1].weight.grad.T, atol=1e-5)


def test_actor_and_critic_share_nothing(mlp):
    mlp.value(torch.ones(2, 3)).sum().backward()
    assert all((w.grad[0] == 0).all() and (w.grad[1] != 0).any() for w in mlp.weights)
    assert mlp.actor_weight.grad is None


def test_rows_of_a_batch_do_not_depend_on_each_other(mlp):
    observations, actions = torch.randn(33, 3, generator=generator(4)), torch.arange(33) % 4
    whole = mlp.evaluate(observations, actions)
    for row in range(33):
        one = mlp.evaluate(observations[row : row + 1], actions[row : row + 1])
        for together, alone in zip(whole, one, strict=True):
            assert together[row].item() == pytest.approx(alone.item(), abs=1e-6)


def test_gaussian_policy_agrees_with_torch():
    policy = MLPPolicy(BOX, spaces.Box(-1, 1, (2,)), generator())
    policy.log_std.data = torch.tensor([0.3, -0.5])
    observations = torch.randn(5, 3, generator=generator(1))
    actions = policy.sample(observations, generator(2))
    mean = policy.mode(observations)
    reference = torch.distributions.Normal(mean, policy.log_std.exp())
    log_prob, entropy, _ = policy.evaluate(observations, actions)
    np.testing.assert_allclose(log_prob.detach(), reference.log_prob(actions).sum(-1).detach(), atol=1e-5)
    np.testing.assert_allclose(entropy.detach(), reference.entropy().sum(-1).detach(), atol=1e-5)
    log_prob.sum().backward()
    assert policy.log_std.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="Discrete"):
        policy.probabilities(observations)


def test_mode_and_probabilities_belong_to_one_distribution(mlp):
    observations = torch.randn(9, 3, generator=generator(5))
    probabilities = mlp.probabilities(observations)
    np.testing.assert_allclose(probabilities.sum(-1).detach(), np.ones(9), atol=1e-6)
    assert (probabilities.argmax(-1) == mlp.mode(observations)).all()
    for action in range(4):
        log_prob = mlp.evaluate(observations, torch.full((9,), action)).log_prob
        np.testing.assert_allclose(log_prob.exp().detach(), probabilities[:, action].detach(), atol=1e-6)


def test_initial_policy_is_nearly_uniform_and_its_layers_orthogonal():
    policy = MLPPolicy(BOX, spaces.Discrete(4), generator())
    probabilities = policy.probabilities(torch.randn(20, 3, generator=generator(1)))
    np.testing.assert_allclose(probabilities.detach(), np.full((20, 4), 0.25), atol=0.02)
    square = policy.weights[1][0].detach()  # 64 x 64, gain sqrt(2)
    np.testing.assert_allclose(square @ square.T, 2.0 * np.eye(64), atol=1e-5)


def test_equal_seeds_give_equal_weights_and_touch_no_global_generator():
    torch.manual_seed(11)
    np.random.seed(11)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, second, other = (MLPPolicy(BOX, spaces.Discrete(4), generator(s)) for s in (0, 0, 1))
    for policy in (first, second):
        policy.sample(torch.ones(2, 3), generator(0))
    gaussian = MLPPolicy(BOX, spaces.Box(-1, 1, (2,)), generator())
    gaussian.sample(torch.ones(2, 3), generator(0))
    assert torch.equal(before, torch.get_rng_state())
    assert (np.random.get_state()[1] == numpy_before).all()
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.weights[0], other.weights[0])


def test_mlp_without_a_hidden_layer_is_an_error():
    with pytest.raises(ValueError, match=r"net_arch=\(\)"):
        MLPPolicy(BOX, spaces.Discrete(2), generator(), net_arch=())


# --- the table ---


def test_table_starts_at_the_reference_of_the_environment():
    pool = AnswerPool.random(3, 6, seed=0)
    native = gym.make_vec("AnswerPool-v0", num_envs=2, pool=pool)
    wrapped = SyncVectorEnv([lambda: gym.make("AnswerPool-v0", pool=pool)] * 2)
    for env in (native, wrapped):
        policy = make_policy("auto", env, generator())
        assert isinstance(policy, TablePolicy)
        np.testing.assert_allclose(policy.probabilities(torch.arange(3)).detach(), pool.ref_probs, atol=1e-6)
        assert (policy.value(torch.arange(3)) == 0).all()


def test_table_without_a_reference_starts_uniform():
    policy = make_policy("auto", spaced(spaces.Discrete(2), spaces.Discrete(5)), generator())
    np.testing.assert_allclose(policy.probabilities(torch.tensor([1, 0])).detach(), np.full((2, 5), 0.2))
    with pytest.raises(ValueError, match=r"\(2, 4\).*\(2, 5\)"):
        TablePolicy(2, 5, np.zeros((2, 4)))


def test_table_evaluates_as_torch_does_and_only_moves_its_rows():
    policy = TablePolicy(3, 4, torch.randn(3, 4, generator=generator(), dtype=torch.float64).numpy())
    policy.values.data = torch.tensor([1.0, 2.0, 3.0])
    observations, actions = torch.tensor([2, 0, 2]), torch.tensor([1, 3, 0])
    log_prob, entropy, value = policy.evaluate(observations, actions)
    reference = torch.distributions.Categorical(logits=policy.logits[observations])
    np.testing.assert_allclose(log_prob.detach(), reference.log_prob(actions).detach(), atol=1e-6)
    np.testing.assert_allclose(entropy.detach(), reference.entropy().detach(), atol=1e-6)
    assert value.tolist() == [3.0, 1.0, 3.0] == policy.value(observations).tolist()
    (log_prob.sum() + entropy.sum() + value.sum()).backward()
    assert policy.logits.grad is not None and (policy.logits.grad[1] == 0).all()
    assert (policy.logits.grad[[0, 2]] != 0).all() and policy.values.grad.tolist() == [1, 0, 2]


def test_table_may_start_with_impossible_answers():
    """A reference that never gives some answers: probability 0, a finite entropy, a finite gradient."""
    start = np.log(np.array([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]), where=[[1, 1, 0], [1, 1, 1]],
                   out=np.full((2, 3), -np.inf))  # fmt: skip
    policy = TablePolicy(2, 3, start)
    log_prob, entropy, _ = policy.evaluate(torch.tensor([0, 1]), torch.tensor([1, 2]))
    np.testing.assert_allclose(entropy.detach(), [np.log(2), 1.0296531], atol=1e-6)
    (log_prob.sum() + entropy.sum()).backward()
    assert policy.logits.grad is not None and policy.logits.grad.isfinite().all()
    assert set(policy.sample(torch.zeros(500, dtype=torch.int64), generator()).tolist()) == {0, 1}


# --- spaces ---


def test_both_kinds_satisfy_the_protocol(mlp):
    assert isinstance(mlp, Policy) and isinstance(TablePolicy(2, 2), Policy)


def test_discrete_observations_count_from_zero_and_are_one_hot_in_the_mlp():
    space = spaces.Discrete(4, start=10)
    encoded = encode_observations(space, np.array([10, 13]))
    assert encoded.dtype == torch.int64 and encoded.tolist() == [0, 3]
    assert encode_observations(space, np.array([[12]])).tolist() == [2]
    policy = make_policy("mlp", spaced(space, spaces.Discrete(2)), generator(), net_arch=[6])
    actor, critic = towers(policy)
    one_hot = torch.eye(4)[[0, 3]]
    np.testing.assert_allclose(policy.actor(encoded).detach(), actor(one_hot).detach(), atol=1e-6)
    np.testing.assert_allclose(policy.value(encoded).detach(), critic(one_hot)[:, 0].detach(), atol=1e-6)


def test_other_observations_become_flat_floats():
    binary = spaces.MultiBinary([2, 3])
    assert flat_size(binary) == 6 and flat_size(spaces.MultiBinary(5)) == 5
    raw = np.arange(12, dtype=np.int8).reshape(2, 2, 3) % 2
    encoded = encode_observations(binary, raw)
    assert encoded.dtype == torch.float32 and encoded.tolist() == raw.reshape(2, 6).tolist()
    image = spaces.Box(0, 255, (2, 2), np.uint8)
    assert encode_observations(image, np.full((3, 2, 2), 255, np.uint8)).tolist() == [[255.0] * 4] * 3
    assert encode_observations(spaces.Box(-1, 1, ()), np.array([0.5, -0.5])).tolist() == [[0.5], [-0.5]]


def test_integers_of_64_bits_stay_integers_and_the_mlp_takes_them():
    """Token ids must not go through float32, which skips integers from 2 ** 24 on."""
    space = spaces.Box(-9, 2**40, (2, 2), np.int64)
    raw = np.array([[[1, 2], [3, 2**24 + 1]], [[-4, 0], [0, 7]]])
    encoded = encode_observations(space, raw)
    assert encoded.dtype == torch.int64 and encoded.tolist() == raw.tolist()
    raw += 1
    assert encoded[0, 0, 0] == 1
    policy = make_policy("mlp", spaced(space, spaces.Discrete(3)), generator(), net_arch=[6])
    small = encode_observations(space, np.array([[[1, 2], [3, 4]], [[-4, 0], [0, 7]]]))
    actor, critic = towers(policy)
    flat = small.reshape(2, 4).float()
    np.testing.assert_allclose(policy.actor(small).detach(), actor(flat).detach(), atol=1e-6)
    np.testing.assert_allclose(policy.evaluate(small, torch.tensor([0, 2])).value.detach(),
                               critic(flat)[:, 0].detach(), atol=1e-6)  # fmt: skip
    single = spaces.Box(0, 9, (), np.int64)
    encoded = encode_observations(single, np.array([3, 5]))
    policy = make_policy("mlp", spaced(single, spaces.Discrete(3)), generator())
    assert encoded.tolist() == [3, 5] and policy.value(encoded).shape == (2,)


def test_encoding_copies():
    raw = np.zeros((2, 3), np.float32)
    encoded = encode_observations(BOX, raw)
    raw += 1
    assert (encoded == 0).all()


def test_actions_become_the_environments():
    assert decode_actions(spaces.Discrete(4, start=-2), torch.tensor([0, 3])).tolist() == [-2, 1]
    assert decode_actions(spaces.Discrete(4), torch.tensor([0, 3])).tolist() == [0, 3]
    box = spaces.Box(np.array([-1, -np.inf], np.float32), np.array([2, 0], np.float32))
    raw = torch.tensor([[-5.0, -5.0], [5.0, 5.0], [0.5, -0.5]])
    assert decode_actions(box, raw).tolist() == [[-1, -5], [2, 0], [0.5, -0.5]]
    assert raw.tolist() == [[-5.0, -5.0], [5.0, 5.0], [0.5, -0.5]]


@pytest.mark.parametrize(
    ("observation_space", "action_space", "message"),
    [
        (spaces.Dict({"a": BOX}), spaces.Discrete(2), "observation_space.*Box, Discrete, MultiBinary"),
        (spaces.MultiDiscrete([2, 3]), spaces.Discrete(2), "observation_space.*Box, Discrete, MultiBinary"),
        (BOX, spaces.MultiDiscrete([2, 3]), "action_space.*allowed: Discrete, Box"),
        (BOX, spaces.Box(-1, 1, (2, 2)), r"action_space.*shape \[D\]"),
    ],
)
def test_unsupported_spaces_are_named_with_what_is_allowed(observation_space, action_space, message):
    with pytest.raises(ValueError, match=message):
        check_spaces(observation_space, action_space)
    with pytest.raises(ValueError, match=message):
        make_policy("auto", spaced(observation_space, action_space), generator())


def test_policy_names():
    control = spaced(BOX, spaces.Discrete(2))
    assert isinstance(make_policy("auto", control, generator()), MLPPolicy)
    with pytest.raises(ValueError, match="policy='table' needs Discrete"):
        make_policy("table", control, generator())
    tokens = spaced(spaces.Box(0, 5, (8,), np.int64), spaces.Discrete(5))
    assert isinstance(make_policy("auto", tokens, generator()), GPTPolicy)
    assert make_policy("gpt", tokens, generator(), n_layer=3).body.n_layer == 3
    assert isinstance(make_policy("mlp", tokens, generator()), MLPPolicy)
    for other in (
        spaced(spaces.Box(0, 6, (8,), np.int64), spaces.Discrete(5)),  # the largest id is not the padding
        spaced(spaces.Box(-1, 5, (8,), np.int64), spaces.Discrete(5)),
        spaced(spaces.Box(0, 5, (8,), np.int32), spaces.Discrete(5)),
        spaced(spaces.Box(0, 5, (8, 1), np.int64), spaces.Discrete(5)),
        spaced(spaces.Box(0, 5, (8,), np.int64), spaces.Discrete(5, start=1)),
        control,
    ):
        assert isinstance(make_policy("auto", other, generator()), MLPPolicy)
        with pytest.raises(ValueError, match=r"a GPT needs observations Box\(0, V, \(L,\), int64\)"):
            make_policy("gpt", other, generator())
    with pytest.raises(ValueError, match="policy='lstm'.*auto, table, mlp, gpt"):
        make_policy("lstm", control, generator())
