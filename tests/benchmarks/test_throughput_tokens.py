"""The part tokens of the throughput benchmark: what is counted, what is timed, and what it says."""

import json

import numpy as np
import pytest
import torch

import throughput
from agents.policies.kv_cache import KVCache
from common import speed_tokens
from common.speed_tokens import (
    CACHED,
    EARLY,
    EOS,
    EOS_CHANCE,
    EVALUATION,
    FIXED,
    GENERATE,
    PROMPT,
    TOKEN_PIECES,
    UNCACHED,
    VOCAB,
    count_tokens,
    generating,
    looping,
    make_policy,
    make_task,
    profile_loop,
)
from common.speed_tokens_report import overhead_verdicts
from common.timing import Timing


def test_tokens_count_up_to_the_first_end():
    completions = np.array([
        [5, 6, 7, 8],  # 4: no end
        [EOS, 6, EOS, 8],  # 1
        [5, 6, 7, EOS],  # 4
        [5, EOS, EOS, EOS],  # 2: the rest is padding
    ])  # fmt: skip
    assert count_tokens(completions) == 4 + 1 + 4 + 2


@pytest.mark.parametrize("case", [FIXED, EARLY])
def test_the_chance_of_an_end_is_as_stated(case):
    task = make_task(32, 8)
    observations = torch.full((32, PROMPT + 8), VOCAB)
    observations[:, :PROMPT] = torch.from_numpy(np.stack([np.asarray(p) for p in task.prompts]))
    with torch.no_grad():
        chance = make_policy(task, EOS_CHANCE[case]).probabilities(observations)[:, EOS]
    # Untrained logits are near 0, not equal to it: their deviation s gives the others exp(s^2 / 2) each.
    torch.testing.assert_close(chance.mean().item(), EOS_CHANCE[case], rtol=0.05, atol=0.0)


def expected_tokens(n_rows, limit, chance):
    """Mean and variance of the sum of ``n_rows`` lengths, geometric and cut at ``limit``."""
    lengths = np.arange(1, limit + 1)
    probabilities = chance * (1 - chance) ** (lengths - 1)
    probabilities[-1] = (1 - chance) ** (limit - 1)
    mean = (probabilities * lengths).sum()
    return n_rows * mean, n_rows * ((probabilities * lengths**2).sum() - mean**2)


@pytest.mark.parametrize("arm", [CACHED, GENERATE])
def test_both_sample_the_lengths_that_the_chance_implies(arm):
    if arm == GENERATE:
        pytest.importorskip("transformers")
    n_rows, limit = 48, 24
    task = make_task(n_rows, limit)
    for case, chance in EOS_CHANCE.items():
        if arm == GENERATE:
            work = generating(task, chance, n_rows)
        else:
            work = looping(task, make_policy(task, chance), n_rows, cached=True)
        tokens, timing, _ = work(0)
        assert timing.cpu > 0
        if case == FIXED:
            assert tokens == n_rows * limit
        else:
            # The chance itself is only near 1 / 20 (see above): a margin for that too.
            mean, variance = expected_tokens(n_rows, limit, chance)
            assert abs(tokens - mean) < 4 * np.sqrt(variance) + 0.03 * mean


def test_generate_leaves_the_global_generator_alone():
    pytest.importorskip("transformers")
    before = torch.get_rng_state()
    generating(make_task(2, 2), 0.05, 2)(0)
    assert torch.equal(before, torch.get_rng_state())


def test_with_and_without_the_cache_the_loop_does_the_same(monkeypatch):
    task = make_task(6, 12)
    policy = make_policy(task, 0.2)
    steps = []
    attend = KVCache.attend
    monkeypatch.setattr(KVCache, "attend", lambda *args: steps.append(1) or attend(*args))
    with_cache = looping(task, policy, 6, cached=True)(3)[0]
    assert steps
    steps.clear()
    assert looping(task, policy, 6, cached=False)(3)[0] == with_cache < 6 * 12
    assert not steps  # it has no cache indeed
    assert policy.new_state(6) is not None  # and the policy has it back


def test_the_evaluation_is_timed_apart(monkeypatch):
    # Every look at the clock takes a second of one and two of the other: start, evaluation from 1 to 2, end.
    ticks = iter(range(4))

    def now():
        tick = next(ticks)
        return Timing(2.0 * tick, 1.0 * tick)

    monkeypatch.setattr(speed_tokens, "now", now)
    task = make_task(2, 3)
    tokens, timing, measures = looping(task, make_policy(task, 0.0), 2, cached=True)(0)
    assert (tokens, timing, measures) == (6, Timing(4.0, 2.0), {"evaluation_cpu": 1.0})


def test_the_profile_finds_every_piece_and_leaves_no_timer():
    task = make_task(4, 6)
    policy = make_policy(task, 0.0)
    before = [getattr(KVCache, name) for name in ("advance", "attend", "follow", "admit")]
    seconds = profile_loop(task, policy, 4, 0)
    assert list(seconds) == [*TOKEN_PIECES, EVALUATION] and min(seconds.values()) > 0
    assert before == [getattr(KVCache, name) for name in ("advance", "attend", "follow", "admit")]
    assert not {"sample", "_logits"} & set(vars(policy)) and "decode" not in vars(policy.body)


def test_overhead_is_judged_within_the_loop_only():
    network = dict.fromkeys(TOKEN_PIECES, 0.0) | {"network: head": 86.0, EVALUATION: 900.0}
    low = network | {"environment": 6.0, "sampling": 4.0, "bookkeeping: records": 4.0}
    high = network | {"environment": 10.0, "bookkeeping: rows of the cache": 11.0}
    met, missed = overhead_verdicts({FIXED: [low], EARLY: [low, high, high]})
    assert "target below 15% of the loop met (measured 14.0 [14.0, 14.0] %)" in met
    assert "MISSED (measured 19.6 [14.0, 19.6] %)" in missed


def test_the_part_runs_without_transformers(tmp_path, monkeypatch, capsys):
    for module in (speed_tokens, throughput):
        monkeypatch.setattr(module, "has_transformers", lambda: False)
    args = throughput.Args(parts=("tokens",), seeds=2, turns=1, completions=3, new_tokens=3, out=tmp_path)
    assert throughput.main(args) == 0
    assert "transformers is not installed (extra llm); its arm is left out" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(r["case"], r["fast"], r["slow"]) for r in summary["ratios"]] == [
        (FIXED, CACHED, UNCACHED), (EARLY, CACHED, UNCACHED),
    ]  # fmt: skip
    assert len(summary["samples"]) == 2 * 2 * 2 and list(summary["profiles"]) == [FIXED, EARLY]
    assert len(summary["targets"]) == 2  # those of the profile
    assert (tmp_path / "throughput.png").stat().st_size > 10_000


def test_generate_is_judged_where_it_is_there(tmp_path, capsys):
    pytest.importorskip("transformers")
    args = throughput.Args(parts=("tokens",), seeds=1, turns=1, completions=2, new_tokens=2, out=tmp_path)
    assert throughput.main(args) == 0
    printed = capsys.readouterr().out
    assert "tokens, fixed length, loop / transformers generate: target 2 times or more" in printed
    assert "tokens, early ends, loop / transformers generate: target 3 times or more" in printed
