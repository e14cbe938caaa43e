"""The CQL penalty and the expectile loss by hand, against quadrature and scipy, and against d3rlpy's own."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

pytest.importorskip("d3rlpy")

from d3rlpy.algos import CQLConfig, DiscreteCQLConfig, IQLConfig
from d3rlpy.models import VectorEncoderFactory
from d3rlpy.torch_utility import TorchMiniBatch

from offline.losses import cql_penalty, discrete_cql_penalty, expectile_loss

DOUBLE = torch.float64
SMALL = VectorEncoderFactory([16, 16], activation="tanh")


def build(config, action_size, seed=0):
    algo = config.create("cpu")
    torch.manual_seed(seed)
    algo.create_impl((3,), action_size)
    return algo.impl


def batch(n, action_size, discrete=False):
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    if discrete:
        actions = torch.randint(action_size, (n, 1), generator=generator).float()
    else:
        actions = torch.tanh(normal(n, action_size))
    zeros = torch.zeros(n, 1)
    return TorchMiniBatch(
        normal(n, 3), actions, normal(n, 1), normal(n, 3), actions, zeros, zeros, zeros + 1, "cpu"
    )


def gradients(loss, modules):
    return torch.autograd.grad(loss, list(modules.parameters()), retain_graph=True)


# --------------------------------------------------------------------------- expectile


def test_expectile_loss_by_hand():
    # tau = 0.7: 0.7 * 2^2 for the positive one, 0.3 * 1^2 for the negative one; half their sum
    assert expectile_loss(torch.tensor([2.0, -1.0], dtype=DOUBLE), 0.7).item() == pytest.approx(1.55)
    u = torch.tensor([1.5, -0.5, 3.0], dtype=DOUBLE)
    assert expectile_loss(u, 0.5).item() == pytest.approx(u.square().mean().item() / 2)


@pytest.mark.parametrize("tau", [0.1, 0.5, 0.7, 0.9])
def test_the_minimum_of_the_expectile_loss_is_the_expectile(tau):
    q = torch.from_numpy(np.random.default_rng(0).gamma(2.0, size=50))
    v = torch.tensor(stats.expectile(q.numpy(), tau), requires_grad=True)
    (slope,) = torch.autograd.grad(expectile_loss(q - v, tau), v)
    assert slope.item() == pytest.approx(0, abs=1e-6)
    at_minimum = expectile_loss(q - v, tau)
    assert all(expectile_loss(q - v - shift, tau) > at_minimum for shift in (-0.01, 0.01))


@pytest.mark.parametrize("tau", [0.3, 0.7, 0.9])
def test_expectile_loss_is_d3rlpys(tau):
    impl = build(IQLConfig(expectile=tau), 2)
    data = batch(40, 2)
    with torch.no_grad():
        q = impl._targ_q_func_forwarder.compute_expected_q(data.observations, data.actions, "min")
    value = impl.modules.value_func
    ours, theirs = expectile_loss(q - value(data.observations), tau), impl.compute_value_loss(data)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(gradients(ours, value), gradients(theirs, value), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("tau", [0.0, 1.0, -0.1, float("nan")])
def test_expectiles_outside_the_open_interval_are_refused(tau):
    with pytest.raises(ValueError, match="expectile="):
        expectile_loss(torch.zeros(1), tau)


# --------------------------------------------------------------------------- discrete penalty


def test_discrete_penalty_by_hand():
    values = torch.tensor([[0.0, math.log(3.0)], [1.0, 1.0]], dtype=DOUBLE)
    # log(1 + 3) - 0 for action 0 of the first row, log(2 e) - 1 = log 2 for the second
    penalty = discrete_cql_penalty(values, torch.tensor([0, 1]))
    assert penalty.item() == pytest.approx((math.log(4) + math.log(2)) / 2)


def test_discrete_penalty_is_d3rlpys():
    config = DiscreteCQLConfig(encoder_factory=SMALL, n_critics=1)
    impl = build(config, 5)
    data = batch(40, 5, discrete=True)
    theirs = impl._compute_conservative_loss(data.observations, data.actions.long())
    values = impl._q_func_forwarder.compute_expected_q(data.observations)
    ours = discrete_cql_penalty(values, data.actions.long()[:, 0])
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(gradients(ours, impl.q_function), gradients(theirs, impl.q_function), strict=True):
        torch.testing.assert_close(a, b)


# --------------------------------------------------------------------------- continuous penalty


def test_continuous_penalty_by_hand():
    # One state, two actions of density 1/2 and 1: log((2 e^1 + e^2) / 2) - 0.5
    penalty = cql_penalty(
        torch.tensor([[1.0, 2.0]], dtype=DOUBLE),
        torch.tensor([[math.log(0.5), 0.0]], dtype=DOUBLE),
        torch.tensor([0.5], dtype=DOUBLE),
    )
    assert penalty.item() == pytest.approx(math.log((2 * math.e + math.e**2) / 2) - 0.5)


def test_continuous_penalty_of_any_densities_is_the_integral():
    """Uniform actions and those of a Gaussian, each with its own density, estimate one integral."""
    rng = np.random.default_rng(0)
    n = 200_000
    normal = stats.truncnorm(-3, 1, loc=0.5, scale=0.5)  # on [-1, 1]
    actions = np.concatenate([rng.uniform(-1, 1, n), normal.rvs(n, random_state=rng)])
    densities = np.concatenate([np.full(n, math.log(0.5)), normal.logpdf(actions[n:])])

    def q(action):
        return 2 * np.sin(3 * action) - action**2

    exact = math.log(integrate.quad(lambda action: math.exp(q(action)), -1, 1)[0]) - q(0.3)
    penalty = cql_penalty(
        torch.from_numpy(q(actions))[None], torch.from_numpy(densities)[None], torch.tensor([q(0.3)])
    )
    assert penalty.item() == pytest.approx(exact, abs=0.01)  # standard error about 0.002


def cql(**fields):
    return CQLConfig(
        actor_encoder_factory=SMALL, critic_encoder_factory=SMALL, alpha_threshold=0.0, **fields
    )


def test_continuous_penalty_is_d3rlpys_with_one_over_n_and_its_gradient_is_the_same():
    weight, n = 4.0, 7
    impl = build(cql(conservative_weight=weight, n_action_samples=n), 2)
    data = batch(30, 2)
    torch.manual_seed(5)
    theirs = impl._compute_conservative_loss(
        data.observations, data.actions, data.next_observations, data.returns_to_go
    )
    torch.manual_seed(5)  # the same draws, in d3rlpy's order: policy at s, policy at s', uniform
    drawn = [
        impl._compute_policy_is_values(policy_obs, data.observations, data.returns_to_go)
        for policy_obs in (data.observations, data.next_observations)
    ]
    drawn.append(impl._compute_random_is_values(data.observations))
    values = torch.cat([v for v, _ in drawn], dim=2)
    densities = torch.cat([torch.as_tensor(p).expand(2, 30, n) for _, p in drawn], dim=2)
    logged = impl._q_func_forwarder.compute_expected_q(data.observations, data.actions, "none")[..., 0]
    ours = cql_penalty(values, densities, logged)
    torch.testing.assert_close(weight * (ours + math.log(3 * n)), theirs.mean())
    ours, theirs = gradients(weight * ours, impl.q_function), gradients(theirs.mean(), impl.q_function)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_d3rlpys_continuous_penalty_is_the_integral():
    """Its densities of policy and uniform actions are right, once log(3 N) is taken off."""
    n = 20_000
    impl = build(cql(conservative_weight=1.0, n_action_samples=n), 1)
    data = batch(4, 1)
    grid = torch.linspace(-1, 1, 2001)[:, None]
    with torch.no_grad():
        for part in impl.q_function.parameters():
            part.mul_(3.0)  # values that vary with the action
        torch.manual_seed(0)
        estimate = impl._compute_conservative_loss(
            data.observations, data.actions, data.next_observations, data.returns_to_go
        ).mean() - math.log(3 * n)
        logged = impl._q_func_forwarder.compute_expected_q(data.observations, data.actions, "none")[..., 0]
        exact = []
        for row, state in enumerate(data.observations):
            values = impl._q_func_forwarder.compute_expected_q(state.expand(2001, 3), grid, "none")[..., 0]
            integral = torch.trapezoid(values.double().exp(), grid[:, 0].double(), dim=1)
            exact.append(integral.log() - logged[:, row])
            assert values.std(dim=1).min() > 0.05
    assert estimate.item() == pytest.approx(torch.stack(exact).mean().item(), abs=0.01)
