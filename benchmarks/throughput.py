"""How fast are the environments, and our PPO beside Stable-Baselines3's, measured in turns in one run?

    python benchmarks/throughput.py
    python benchmarks/throughput.py --quick
    python benchmarks/throughput.py --parts identical threshold --seeds 5

The parts:

    env         environment steps per second, native vector environment against SyncVectorEnv
    identical   training on CartPole with RL Baselines3 Zoo's settings: environment steps per second
    threshold   seconds until the mean return of 100 training episodes is 475: each at its best
                settings (how they were found: `common.speed_settings`), SB3 in its DummyVecEnv; SB3
                at ours, native rows included; and SB3 at the Zoo's
    pool        training on the answer pool with the KL penalty, at equal samples and updates, beside a
                bare autograd loop; our policy is a table, SB3's its MlpPolicy
    tokens      completions of a small GPT, tokens per second: the environment loop with its cache, without
                it, and `generate` of transformers' GPT-2 of the same size (left out where transformers is
                not installed); and where the loop's time goes
    profile     where our PPO's time goes

Everything runs in one process on one torch thread. Arms take turns (A B A B for each seed), and a
ratio is taken within each pair, so that a busy spell of the machine meets both. Under --out it
leaves `summary.json`, `samples.csv`, `ratios.csv` and `throughput.png`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console

import answer_pool_ppo
from common.files import write_json
from common.quick import apply_quick
from common.runner import versions
from common.speed_env import measure_env
from common.speed_figure import speed_figure
from common.speed_ppo import OURS, SB3, measure_identical, measure_pool, measure_threshold, warm_up
from common.speed_profile import measure_profile
from common.speed_report import make_ratios, print_agents, print_env, print_profile, verdicts
from common.speed_tokens import TOKEN_CASES, has_transformers, measure_tokens
from common.speed_tokens_report import overhead_verdicts, print_token_profile, print_tokens
from common.tables import make_console, write_csv
from common.timing import Sample, now

Part = Literal["env", "identical", "threshold", "pool", "tokens", "profile"]
PARTS: tuple[Part, ...] = ("env", "identical", "threshold", "pool", "tokens", "profile")


@dataclass(frozen=True)
class Args:
    """Measure the speed of environments and agents, in turns, with the spread over seeds."""

    parts: tuple[Part, ...] = PARTS
    """What to measure."""
    seeds: int = 3
    """Seeds of every measurement."""
    seed: int = 0
    """The first seed; the others count up from it."""
    turns: int = 2
    """Turns of every arm for each seed, in the parts identical, pool and tokens."""
    n_envs: tuple[int, ...] = (1, 8, 64, 512, 4096)
    """Numbers of environments of the part env."""
    env_seconds: float = 0.15
    """CPU seconds of stepping for each speed of the part env."""
    steps: int = 20_480
    """Environment steps of a run of the parts identical and profile."""
    rounds: int = 300
    """Rounds of a run on the answer pool."""
    samples: int = 64
    """Answers sampled in each round."""
    beta: float = 0.3
    """Weight of the KL to the reference policy on the answer pool."""
    completions: int = 64
    """Completions sampled at a time in the part tokens."""
    new_tokens: int = 64
    """The most tokens of a completion."""
    budget: float = 60.0
    """CPU seconds after which a run of the part threshold has failed; it counts as that much."""
    out: Path = Path("results/throughput")
    """Folder for the tables and the figure."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """A taste in seconds: of the options left at their defaults, --seeds becomes 1, --turns 1, --n-envs
    1 64, --env-seconds 0.05, --steps 2048, --rounds 30, --new-tokens 16, --budget 2, --out
    results/throughput_quick. Such a budget ends most runs of the part threshold."""


QUICK: dict[str, Any] = {
    "seeds": 1,
    "turns": 1,
    "n_envs": (1, 64),
    "env_seconds": 0.05,
    "steps": 2048,
    "rounds": 30,
    "new_tokens": 16,
    "budget": 2.0,
    "out": Path("results/throughput_quick"),
}


def check(args: Args) -> None:
    """Raise ValueError, naming the option, for values that no run can use."""
    for name in ("seeds", "turns", "steps", "rounds", "completions", "new_tokens"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be at least 1")
    for name in ("env_seconds", "budget", "beta"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be above 0")
    if args.samples < 2:
        raise ValueError(f"--samples is {args.samples}, must be at least 2")
    if not args.n_envs or min(args.n_envs) < 1 or len(set(args.n_envs)) < len(args.n_envs):
        raise ValueError(f"--n-envs {args.n_envs} is not allowed: different numbers, each at least 1")
    if not args.parts:
        raise ValueError(f"--parts is empty; allowed: one or more of {', '.join(PARTS)}")


def pool_config(agent: str, args: Args) -> dict[str, Any]:
    """The settings of `answer_pool_ppo.py` for that agent."""
    pool_args = answer_pool_ppo.Args(agent=agent)
    return answer_pool_ppo.agent_config(pool_args, args.beta, args.samples)


def measure(
    args: Args, part: Part, report: Callable[[Sample], None]
) -> tuple[list[Sample], dict[str, list[dict[str, float]]]]:
    """The samples of one part, and the profiles of those that have them."""
    seeds = range(args.seed, args.seed + args.seeds)
    ours = pool_config("ppo", args)
    if part == "env":
        return measure_env(args.n_envs, seeds, 1, args.env_seconds, report), {}
    if part == "identical":
        return measure_identical(seeds, args.turns, args.steps, report), {}
    if part == "threshold":
        return measure_threshold(seeds, args.budget, report), {}
    if part == "pool":
        configs = {OURS: ours, SB3: pool_config("sb3:PPO", args)}
        return (
            measure_pool(seeds, args.turns, args.rounds, args.samples, args.beta, configs, report),
            {},
        )
    if part == "tokens":
        return measure_tokens(seeds, args.turns, args.completions, args.new_tokens, report)
    return [], measure_profile(seeds, args.steps, args.rounds, args.samples, ours)


def sample_row(sample: Sample) -> dict[str, Any]:
    """A sample as a flat record; every sample has the same columns."""
    kinds = ("n_envs", "final_return", "reached", "env_steps", "kl_opt", "updates", "evaluation_cpu")
    measures = {name: sample.measures.get(name) for name in kinds}
    named = {name: getattr(sample, name) for name in ("case", "arm", "seed", "turn", "amount")}
    return named | {"cpu_seconds": sample.timing.cpu, "wall_seconds": sample.timing.wall} | measures


def show(
    console: Console, args: Args, samples: Sequence[Sample], profiles: dict[str, list[dict[str, float]]]
) -> None:
    """Print the tables and verdicts, draw the figure and write the files."""
    ratios = make_ratios(samples)
    if "env" in args.parts:
        print_env(console, samples, args.n_envs)
    if {"identical", "threshold", "pool"} & set(args.parts):
        print_agents(console, samples, ratios)
    token_profiles = {name: runs for name, runs in profiles.items() if name in TOKEN_CASES}
    if token_profiles:
        print_tokens(console, samples, ratios)
        print_token_profile(console, token_profiles)
    ppo_profiles = {name: runs for name, runs in profiles.items() if name not in TOKEN_CASES}
    if ppo_profiles:
        print_profile(console, ppo_profiles)
    lines = verdicts(ratios) + overhead_verdicts(token_profiles)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    paths = [speed_figure(samples, ratios, ppo_profiles, token_profiles, args.out / "throughput.png")]
    paths += [args.out / name for name in ("summary.json", "samples.csv", "ratios.csv")]
    write_json(
        paths[1],
        {
            "args": args,
            "versions": versions(),
            "targets": lines,
            "ratios": ratios,
            "profiles": profiles,
            "samples": [sample_row(sample) for sample in samples],
        },
    )
    write_csv(paths[2], [sample_row(sample) for sample in samples])
    write_csv(paths[3], [vars(ratio) for ratio in ratios])
    for path in paths:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def main(args: Args) -> int:
    """Measure, report; the exit status."""
    console = make_console()
    args = apply_quick(args, QUICK)
    try:
        check(args)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    torch.set_num_threads(1)
    samples: list[Sample] = []
    profiles: dict[str, list[dict[str, float]]] = {}
    with console.status("starting") as status:
        if set(args.parts) - {"env", "tokens"}:
            warm_up()
        if "tokens" in args.parts and not has_transformers():
            console.print("tokens: transformers is not installed (extra llm); its arm is left out")
        for part in [part for part in PARTS if part in args.parts]:
            start = now()
            status.update(part)
            found, profile = measure(
                args, part, lambda s: status.update(f"{s.case}, {s.arm}, seed {s.seed} done")
            )
            samples += found
            profiles |= profile
            spent = now() - start
            console.print(f"{part}: {spent.wall:.0f} s, of CPU time {spent.cpu:.0f} s", highlight=False)
    show(console, args, samples, profiles)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
