"""The GPT policy: an independent GPT-2, cached against uncached, and what must not influence what."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.nn import functional as F

import agents
from agents.policies import GPT, GPTPolicy, Policy
from agents.training import FlatAdam, gradient_step

V, L = 7, 60
EOS = 2


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gpt(seed: int = 0, vocab_size: int = V, context: int = L, spread: float = 0.2, **kwargs) -> GPTPolicy:
    observations = spaces.Box(0, vocab_size, (context,), np.int64)
    policy = GPTPolicy(observations, spaces.Discrete(vocab_size), generator(seed), **kwargs)
    # A fresh network is all but uniform, and its biases and value head are 0: nothing would show.
    for i, p in enumerate(policy.parameters()):
        p.data += spread * torch.randn(p.shape, generator=generator(1000 * seed + i))
    return policy


def padded(rows, vocab_size: int = V, context: int = L) -> torch.Tensor:
    observations = torch.full((len(rows), context), vocab_size)
    for i, row in enumerate(rows):
        observations[i, : len(row)] = torch.as_tensor(row)
    return observations


def random_prompts(lengths, seed: int = 0) -> torch.Tensor:
    source = generator(seed)
    return padded([torch.randint(0, V, (n,), generator=source) for n in lengths])


def generate(policy, prompts, act, steps, ends=lambda action, t: action == EOS):
    """Plays the environment: returns the observations before each row's last action, and the actions.

    ``act(observations, active)`` gives the actions; a row ends when ``ends(action, t)`` says so.
    """
    observations, lengths = prompts.clone(), (prompts != V).sum(1)
    last, actions = prompts.clone(), torch.full((len(prompts), steps), -1)
    active = torch.ones(len(prompts), dtype=torch.bool)
    for t in range(steps):
        chosen = act(observations, active)
        assert (chosen[~active] == 0).all()
        actions[active, t], last[active] = chosen[active], observations[active]
        observations[active, (lengths + t)[active]] = chosen[active]
        active = active & ~ends(chosen, t)
        if not active.any():
            break
    return last, actions


@torch.no_grad()
def brute_force(policy, observation, actions):
    """log-prob, entropy and value of one response, from one uncached forward for each prefix."""
    n = int((actions >= 0).sum())
    filled = int((observation != V).sum())
    rows = []
    for t in range(n):
        prefix = padded([observation[: filled - n + 1 + t]])
        logits = policy.lm_head(policy.body(prefix[:, : filled - n + 1 + t])[:, -1]) / policy.temperature
        choice = torch.distributions.Categorical(logits=logits)
        rows.append(torch.cat([choice.log_prob(actions[t]), choice.entropy(), policy.value(prefix)]))
    return torch.stack(rows)


# --- the network ---


def as_gpt2(policy: GPTPolicy):
    """transformers' GPT-2 with copies of the policy's weights; its head has no bias."""
    transformers = pytest.importorskip("transformers")
    body = policy.body
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=L, n_embd=body.n_embd, n_layer=body.n_layer, n_head=body.n_head,
        activation_function="gelu", tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()

    def put(theirs, weight, bias):
        theirs.weight.data.copy_(weight)
        theirs.bias.data.copy_(bias)

    gpt2 = model.transformer
    gpt2.wte.weight.data.copy_(body.token_embedding)
    gpt2.wpe.weight.data.copy_(body.position_embedding)
    for theirs, ours in zip(gpt2.h, body.blocks, strict=True):
        put(theirs.ln_1, ours.ln_1.weight, ours.ln_1.bias)
        put(theirs.attn.c_attn, ours.qkv, torch.zeros(()))
        put(theirs.attn.c_proj, ours.attn_proj, torch.zeros(()))
        put(theirs.ln_2, ours.ln_2.weight, ours.ln_2.bias)
        put(theirs.mlp.c_fc, ours.fc, torch.zeros(()))
        put(theirs.mlp.c_proj, ours.fc_proj, torch.zeros(()))
    put(gpt2.ln_f, body.ln_f.weight, body.ln_f.bias)
    model.lm_head.weight.data.copy_(policy.lm_head.weight)
    return model


@torch.no_grad()
def test_the_network_is_gpt2():
    policy = gpt(n_layer=3, n_head=4, n_embd=32)
    model = as_gpt2(policy)
    tokens = torch.randint(0, V, (5, L), generator=generator(1))
    theirs = model(tokens).logits + policy.lm_head.bias
    ours = policy.lm_head(policy.body(tokens))
    assert ours.std() > 0.5  # or agreement would say little
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


@torch.no_grad()
def test_greedy_decoding_of_ragged_prompts_is_gpt2s():
    policy = gpt(n_layer=2, n_head=2, n_embd=32)
    policy.lm_head.bias.zero_()
    model = as_gpt2(policy)
    prompts = random_prompts([3, 9, 1, 6])
    state = policy.new_state(4)
    _, actions = generate(policy, prompts, lambda o, a: policy.mode(o, state, a), 12, ends=lambda a, t: a < 0)
    for row, ours in enumerate(actions):
        prompt = prompts[row][prompts[row] != V].unsqueeze(0)
        theirs = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert ours.tolist() == theirs[0, prompt.shape[1] :].tolist()


def test_initial_weights_are_gpt2s_and_nearly_uniform():
    policy = gpt(spread=0.0, n_layer=8, n_embd=128, n_head=4)
    block = policy.body.blocks[3]
    for weight, std in (
        (policy.body.token_embedding, 0.02), (block.qkv, 0.02), (block.fc, 0.02),
        (block.attn_proj, 0.02 / 4), (block.fc_proj, 0.02 / 4), (policy.lm_head.weight, 0.02),
    ):  # fmt: skip
        margin = 4 * std / np.sqrt(2 * weight.numel())
        assert weight.std().item() == pytest.approx(std, abs=margin)
    assert policy.lm_head.bias.abs().max() == 0
    observations = random_prompts([1, 20, 40])
    np.testing.assert_allclose(policy.probabilities(observations).detach(), np.full((3, V), 1 / V), atol=0.12)
    assert (policy.value(observations) == 0).all()


def test_equal_seeds_give_equal_weights_and_touch_no_global_generator():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first, second, other = (gpt(s, spread=0.0) for s in (0, 0, 1))
    first.sample(random_prompts([3]), generator())
    assert torch.equal(before, torch.get_rng_state())
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_training_mode_changes_nothing():
    """There is no dropout: log-probs of a rollout are those of the update, whatever the mode."""
    policy = gpt()
    observations, actions = random_prompts([4, 6]), torch.tensor([[1, 2], [3, -1]])
    training = policy.train().evaluate(observations, actions)
    evaluating = policy.eval().evaluate(observations, actions)
    assert all(torch.equal(a, b) for a, b in zip(training, evaluating, strict=True))


# --- evaluation of whole responses ---


def ragged_responses(policy, seed: int = 3):
    """Prompts and responses of different lengths: one ends at its first token, one never."""
    prompts = random_prompts([1, 5, 12, 3, 8, 2], seed)
    source = generator(seed)
    lengths = torch.tensor([1, 40, 17, 2, 31, 9])

    def act(observations, active):
        return torch.where(active, torch.randint(0, V, (6,), generator=source), 0)

    return generate(policy, prompts, act, 40, ends=lambda a, t: t + 1 >= lengths)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_evaluate_is_one_forward_for_each_prefix(temperature):
    policy = gpt(temperature=temperature)
    observations, actions = ragged_responses(policy)
    evaluation = policy.evaluate(observations, actions)
    for row in range(len(actions)):
        expected = brute_force(policy, observations[row], actions[row])
        n = len(expected)
        got = torch.stack(list(evaluation), -1)[row].detach()
        np.testing.assert_allclose(got[:n], expected, atol=1e-5)
        assert (got[n:] == 0).all()


def test_one_action_for_each_observation():
    policy = gpt()
    observations, actions = random_prompts([3, 8, 1]), torch.tensor([4, 0, 6])
    single, whole = policy.evaluate(observations, actions), policy.evaluate(observations, actions[:, None])
    for a, b in zip(single, whole, strict=True):
        assert a.shape == (3,) and torch.equal(a, b[:, 0])
    chosen = policy.probabilities(observations)[torch.arange(3), actions]
    np.testing.assert_allclose(single.log_prob.exp().detach(), chosen.detach(), atol=1e-6)
    np.testing.assert_allclose(single.value.detach(), policy.value(observations).detach(), atol=1e-6)


def test_a_row_without_actions_is_all_padding():
    policy = gpt()
    evaluation = policy.evaluate(random_prompts([3, 4]), torch.tensor([[-1, -1], [2, 5]]))
    assert all((field[0] == 0).all() for field in evaluation)
    assert (evaluation.log_prob[1] < 0).all()


def test_gradient_is_the_finite_difference():
    policy = gpt(n_layer=1, n_embd=8).double()
    observations, actions = ragged_responses(policy)
    weights = torch.randn(3, *actions.shape, generator=generator(4), dtype=torch.float64)

    def loss():
        return (torch.stack(list(policy.evaluate(observations, actions))) * weights).sum()

    loss().backward()
    for name, p in policy.named_parameters():
        direction = torch.randn(p.shape, generator=generator(5), dtype=torch.float64)
        with torch.no_grad():
            p += 1e-5 * direction
            above = loss()
            p -= 2e-5 * direction
            below = loss()
            p += 1e-5 * direction
        numeric = float(above - below) / 2e-5
        assert float((p.grad * direction).sum()) == pytest.approx(numeric, rel=1e-5, abs=1e-6), name


def test_padding_influences_nothing():
    policy = gpt()
    observations, actions = padded([[1, 0, 3], [2, 5, 0, 1, 4, 3, 0]]), torch.tensor([[0, 3], [5, -1]])
    whole = policy.evaluate(observations, actions)
    cut = policy.evaluate(observations[:, :9], actions[:, :2])
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))
    sum(field.sum() for field in whole).backward()
    assert (policy.body.token_embedding.grad[6] == 0).all()  # the embedding that padding borrows
    assert (policy.body.position_embedding.grad[7:] == 0).all()


def test_end_of_sequence_is_an_action_like_any_other():
    """The token that ends a response is in its log-prob and has a gradient, at the first place too."""
    policy = gpt()
    evaluation = policy.evaluate(random_prompts([4, 4]), torch.tensor([[EOS, -1], [1, EOS]]))
    (-evaluation.log_prob.sum()).backward()
    assert (evaluation.log_prob[[0, 1, 1], [0, 0, 1]] < 0).all() and evaluation.log_prob[0, 1] == 0
    assert policy.lm_head.bias.grad[EOS] < 0 and policy.lm_head.bias.grad.isfinite().all()


# --- temperature and ties ---


def flat(logits, **kwargs) -> GPTPolicy:
    """A policy with these logits whatever it reads."""
    policy = gpt(vocab_size=len(logits), context=4, **kwargs)
    policy.lm_head.weight.data.zero_()
    policy.lm_head.bias.data = torch.tensor(logits, dtype=torch.float32)
    return policy


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, -0.0181499), (1, -0.126928), (2, -0.3132617)])
def test_temperature_is_in_the_log_probs_and_in_the_samples(temperature, expected):
    policy = flat([2.0, 0.0], temperature=temperature)
    observations = torch.tensor([[1, 2, 2, 2]]).repeat(20_000, 1)
    log_prob = policy.evaluate(observations[:1], torch.tensor([[0]])).log_prob
    assert log_prob.item() == pytest.approx(expected, abs=1e-6)
    share = (policy.sample(observations, generator()) == 0).double().mean().item()
    p = np.exp(expected)
    assert share == pytest.approx(p, abs=4 * np.sqrt(p * (1 - p) / 20_000))


def test_greedy_takes_the_first_of_ties():
    policy = flat([1.0, 3.0, 3.0])
    observations = torch.tensor([[0, 3, 3, 3]])
    assert policy.mode(observations).tolist() == [1]
    assert policy.mode(observations, policy.new_state(1)).tolist() == [1]
    assert policy.evaluate(observations, torch.tensor([[1]])).log_prob.isfinite().all()


# --- decoding with the cache ---


def stepwise(policy, prompts, steps, ends):
    """Greedy responses with the cache, and the log-probs that decoding itself gave to the tokens."""
    state = policy.new_state(len(prompts))
    log_probs = torch.zeros(len(prompts), steps)
    count = iter(range(steps))

    def act(observations, active):
        rows, logits = policy._next_logits(observations, state, active)
        chosen = torch.zeros(len(observations), dtype=torch.int64)
        chosen[rows] = logits.argmax(-1)
        log_probs[rows, next(count)] = torch.log_softmax(logits, -1).amax(-1)
        return chosen

    with torch.inference_mode():
        observations, actions = generate(policy, prompts, act, steps, ends)
    return observations, actions, log_probs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_stepwise_and_teacher_forced_log_probs_agree(temperature):
    policy = gpt(temperature=temperature, n_layer=3, n_head=4, n_embd=32)
    lengths = torch.tensor([1, 40, 17, 2, 31, 9, 40, 25])
    prompts = random_prompts([1, 5, 12, 3, 8, 2, 19, 7])
    observations, actions, log_probs = stepwise(policy, prompts, 40, lambda a, t: t + 1 >= lengths)
    assert (actions >= 0).sum(1).tolist() == lengths.tolist()
    evaluated = policy.evaluate(observations.clone(), actions.clone()).log_prob.detach()
    np.testing.assert_allclose(log_probs, evaluated, atol=1e-5)


def test_rows_of_a_batch_do_not_depend_on_each_other():
    policy = gpt(n_embd=32)
    prompts = random_prompts([2, 21, 9, 5])
    lengths = torch.tensor([30, 12, 3, 22])
    _, together, log_probs = stepwise(policy, prompts, 30, lambda a, t: t + 1 >= lengths)
    for row, n in enumerate(lengths):
        alone = prompts[row : row + 1]

        def ends(action, t, n=n):
            return torch.tensor([t + 1 >= n])

        _, actions, alone_log_probs = stepwise(policy, alone, 30, ends)
        assert actions[0].tolist() == together[row].tolist()
        np.testing.assert_allclose(alone_log_probs[0], log_probs[row], atol=1e-5)
        _, uncached = generate(policy, alone, lambda o, a: policy.mode(o), 30, ends)
        assert uncached[0].tolist() == together[row].tolist()


def test_samples_with_and_without_the_cache_are_the_same():
    policy = gpt(n_embd=32)
    prompts = random_prompts([4, 1, 9, 9, 2, 30])
    runs = []
    for state in (policy.new_state(6), None):
        source = generator(8)
        runs.append(generate(policy, prompts, lambda o, a, s=state, g=source: policy.sample(o, g, s, a), 30))
    (cached_observations, cached), (observations, actions) = runs
    assert torch.equal(cached, actions) and torch.equal(cached_observations, observations)
    ended = (actions >= 0).sum(1)
    assert ended.min() < 10 < ended.max()  # rows ended at different times


def test_new_episodes_in_the_middle_are_read_afresh():
    """Rows begin again at different steps, with prompts of any length: also of the length cached plus one."""
    policy = gpt(n_embd=32)
    state, source = policy.new_state(3), generator(2)
    observations = random_prompts([4, 4, 4])
    state_before = policy.mode(observations, state)
    observations[:, 4] = state_before
    observations[1] = random_prompts([5], seed=9)[0]  # another episode, just as long as row 1 would be
    observations[2] = random_prompts([2], seed=9)[0]
    for step in range(12):
        active = torch.tensor([True, step % 5 != 3, True])
        cached = policy.mode(observations, state, active)
        assert torch.equal(cached, policy.mode(observations, None, active))
        lengths = (observations != V).sum(1)
        for row in range(3):
            if torch.rand((), generator=source) < 0.25:
                n = int(torch.randint(1, 30, (), generator=source))
                observations[row] = random_prompts([n], seed=100 * step + row)[0]
            elif active[row]:
                observations[row, lengths[row]] = cached[row]


def test_finished_rows_cost_nothing():
    policy = gpt()
    seen = []
    block = policy.body.blocks[0]
    block.register_forward_hook(lambda module, inputs, out: seen.append(out[..., 0].numel()))
    lengths = torch.tensor([1, 10, 4, 10, 6])
    state = policy.new_state(5)
    generate(policy, random_prompts([3] * 5), lambda o, a: policy.mode(o, state, a), 10,
             lambda a, t: t + 1 >= lengths)  # fmt: skip
    assert seen == [5 * 3, 4, 4, 4, 3, 3, 2, 2, 2, 2]
    assert policy.mode(random_prompts([3] * 5), state, torch.zeros(5, dtype=torch.bool)).tolist() == [0] * 5
    assert len(seen) == 10


def test_context_can_be_filled_to_its_end():
    policy = gpt(context=24)
    prompts = padded([[1, 2, 3], [4] * 23], context=24)
    state = policy.new_state(2)
    ends = torch.tensor([21, 1])
    observations, actions = generate(
        policy, prompts, lambda o, a: policy.mode(o, state, a), 21, lambda a, t: t + 1 >= ends
    )
    assert (observations[0] != V).sum() == 23
    observations[0, 23] = actions[0, 20]
    assert policy.value(observations).isfinite().all()
    # A full row that is shown again is not one that goes on, nor is one that differs in one token.
    for _ in range(2):
        assert torch.equal(policy.mode(observations, state), policy.mode(observations))
        observations[0, 0] = 5


def test_memory_that_was_never_written_is_never_read():
    policy = gpt(n_embd=32)
    prompts = random_prompts([3, 1, 25])
    lengths = torch.tensor([30, 4, 20])
    expected = stepwise(policy, prompts, 30, lambda a, t: t + 1 >= lengths)
    torch.use_deterministic_algorithms(True)  # torch then fills fresh memory with NaN
    try:
        assert torch.empty(3).isnan().all()
        got = stepwise(policy, prompts, 30, lambda a, t: t + 1 >= lengths)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_tokens_may_be_used_in_a_loss():
    """Tensors from inference mode may not; the tokens that sampling returns are none."""
    policy = gpt()
    observations = random_prompts([3, 4])
    actions = policy.sample(observations, generator(), policy.new_state(2))
    policy.evaluate(observations, actions[:, None]).log_prob.sum().backward()
    assert policy.lm_head.weight.grad.abs().sum() > 0


# --- training ---


def test_flat_adam_moves_what_decoding_and_evaluation_read():
    policy, untrained = gpt(), gpt()
    optimizer = FlatAdam(policy)
    observations, actions = ragged_responses(policy)
    before = policy.evaluate(observations, actions).log_prob.sum()
    for _ in range(3):
        gradient_step(-policy.evaluate(observations, actions).log_prob.sum(), optimizer, 1.0)
    assert policy.evaluate(observations, actions).log_prob.sum() > before + 1.0
    moved = [not torch.equal(a, b) for a, b in zip(policy.parameters(), untrained.parameters(), strict=True)]
    assert sum(moved) == len(moved) - 2  # all but the value head's weight and bias
    lengths = torch.full((4,), 20)
    prompts = random_prompts([2, 5, 3, 9])
    last, greedy, log_probs = stepwise(policy, prompts, 20, lambda a, t: t + 1 >= lengths)
    evaluated = policy.evaluate(last.clone(), greedy.clone()).log_prob.detach()
    np.testing.assert_allclose(log_probs, evaluated, atol=1e-5)


def test_it_learns_responses_by_heart_and_gives_them_back():
    """The task needs positions, attention and the prompt: repeat a prompt of any length backwards."""
    policy = gpt(spread=0.0, n_layer=2, n_embd=32, context=12)
    prompts = [[3, 1, 4], [1, 5], [6, 5, 3, 0], [4, 4, 1, 3, 6], [1, 5, 0]]
    responses = [[*reversed(p), EOS] for p in prompts]
    observations = padded([p + r[:-1] for p, r in zip(prompts, responses, strict=True)], context=12)
    actions = torch.full((5, 6), -1)
    for row, response in enumerate(responses):
        actions[row, : len(response)] = torch.tensor(response)
    optimizer = FlatAdam(policy)
    optimizer.param_groups[0]["lr"] = 5e-3
    for _ in range(120):
        gradient_step(-policy.evaluate(observations, actions).log_prob.sum(), optimizer, 1.0)
    assert policy.evaluate(observations, actions).log_prob.sum() > -0.5
    state = policy.new_state(5)
    _, greedy = generate(policy, padded(prompts, context=12), lambda o, a: policy.mode(o, state, a), 6)
    assert torch.equal(greedy, actions)


def test_without_a_value_head_values_are_zero():
    policy = gpt(value_head=False)
    with_head = gpt()
    observations, actions = ragged_responses(policy)
    evaluation = policy.evaluate(observations, actions)
    assert (evaluation.value == 0).all() and (policy.value(observations) == 0).all()
    assert not any("value" in name for name, _ in policy.named_parameters())
    np.testing.assert_allclose(
        evaluation.log_prob.detach(), with_head.evaluate(observations, actions).log_prob.detach(), atol=1e-6
    )


def test_the_body_stands_alone():
    """Reward and value models build on it: causal, and read at the last token."""
    body = GPT(V, 10, generator(), n_layer=2, n_head=2, n_embd=16)
    tokens = torch.randint(0, V, (3, 10), generator=generator(1))
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % V
    before, after = body(tokens), body(changed)
    assert torch.equal(before[:, :6], after[:, :6]) and not torch.isclose(before[:, 6:], after[:, 6:]).all()
    short = tokens.clone()
    short[1, 4:] = V
    last = body.last_hidden(short)
    np.testing.assert_allclose(last[1].detach(), before[1, 3].detach(), atol=1e-6)
    np.testing.assert_allclose(last[2].detach(), before[2, 9].detach(), atol=1e-6)
    assert isinstance(body.ln_f, nn.LayerNorm) and F.layer_norm(last, (16,)).shape == (3, 16)


# --- beside the rest of the package ---


def test_it_is_a_policy_that_can_be_copied():
    policy = gpt()
    assert isinstance(policy, Policy) and GPTPolicy.reads_sequences
    reference = copy.deepcopy(policy)
    observations, actions = ragged_responses(policy)
    original = policy.evaluate(observations, actions).log_prob
    for changed, kept in ((policy, reference), (reference, gpt())):
        for p in FlatAdam(changed).views:
            p.data.add_(0.1)
        assert not torch.isclose(changed.evaluate(observations, actions).log_prob, original).all()
        assert torch.equal(kept.evaluate(observations, actions).log_prob, original)


def test_an_agent_with_a_gpt_is_saved_and_loaded(tmp_path):
    env = gym.make_vec("TokenGeneration-v0", num_envs=4)
    kwargs = {"n_layer": 1, "n_head": 2, "n_embd": 16, "temperature": 0.8}
    agent = agents.make("reinforce", env, seed=3, policy="gpt", policy_kwargs=kwargs)
    agent.learn(200)
    agent.save(tmp_path / "agent.pt")
    loaded = agents.load("reinforce", tmp_path / "agent.pt", env)
    assert isinstance(loaded.policy, GPTPolicy) and loaded.policy.temperature == 0.8
    observation, _ = env.reset(seed=0)
    encoded = torch.from_numpy(observation.copy())
    assert torch.equal(loaded.policy.probabilities(encoded), agent.policy.probabilities(encoded))


# --- errors ---


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"n_embd": 30, "n_head": 4}, "n_embd=30 must be a multiple of n_head=4"),
        ({"n_layer": 0}, "n_layer=0 must be an integer >= 1"),
        ({"temperature": 0.0}, "temperature=0.0 must be a number > 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
    ],
)
def test_settings_out_of_range_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        gpt(**kwargs)


@pytest.mark.parametrize(
    "observation_space",
    [
        spaces.Box(0, V, (L,), np.float32),
        spaces.Box(0, V + 1, (L,), np.int64),
        spaces.Box(0, V, (2, L), np.int64),
        spaces.Discrete(V),
    ],
)
def test_spaces_of_another_task_are_an_error(observation_space):
    with pytest.raises(ValueError, match=r"Box\(0, V, \(L,\), int64\)"):
        GPTPolicy(observation_space, spaces.Discrete(V), generator())


def test_rows_that_cannot_be_read_are_named():
    policy = gpt()
    observations = random_prompts([3, 2])
    with pytest.raises(ValueError, match="row 1 has 3 actions, but its observation only 2 tokens"):
        policy.evaluate(observations, torch.tensor([[1, 1, 1], [1, 1, 1]]))
    observations[1] = V
    second = torch.tensor([False, True])
    for call in (
        policy.value,
        lambda o: policy.mode(o, None, second),
        lambda o: policy.mode(o, policy.new_state(2), second),
    ):
        with pytest.raises(ValueError, match="row 1 of the observations is empty"):
            call(observations)
    with pytest.raises(ValueError, match=r"\(2, 60\).*\(3, 60\)"):
        policy.mode(observations, policy.new_state(3))
