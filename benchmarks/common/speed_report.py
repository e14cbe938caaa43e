"""Tables and verdicts of the throughput benchmark, from its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from common.speed_env import ARMS, NATIVE, SYNC, case_name, env_cases
from common.speed_ppo import BARE, OURS, SB3, SB3_OURS, SB3_PUBLISHED
from common.speed_profile import PIECES, shares
from common.speed_tokens import CACHED, EARLY, FIXED, GENERATE, UNCACHED
from common.stats import Estimate
from common.tables import interval, number, print_table
from common.timing import CLOCKS, Sample, rates, speed_ratios, spread

IDENTICAL, THRESHOLD, POOL = "CartPole, Zoo settings", "CartPole to 475", "answer pool"
# What is compared beyond the environments: case, faster arm, slower arm, the ratio to reach.
COMPARISONS: tuple[tuple[str, str, str, float | None], ...] = (
    (IDENTICAL, OURS, SB3, 1.8),
    (THRESHOLD, OURS, SB3, 4.0),
    (THRESHOLD, OURS, SB3_OURS, None),
    (THRESHOLD, OURS, SB3_PUBLISHED, None),
    (POOL, OURS, SB3, 6.0),
    (POOL, BARE, SB3, None),
    (POOL, BARE, OURS, None),
    (FIXED, CACHED, GENERATE, 2.0),
    (FIXED, CACHED, UNCACHED, None),
    (EARLY, CACHED, GENERATE, 3.0),
    (EARLY, CACHED, UNCACHED, None),
)
SPREAD = "median [smallest, largest]"
CLOCK_NOTE = (
    "CPU: seconds of this process's own work, what the targets are judged by; wall: seconds that passed, "
    "other programs' work on these cores included"
)


@dataclass(frozen=True)
class Ratio:
    """How many times the speed of `slow` arm `fast` has, pair by pair; low and high are the extremes.

    `unfinished` counts the pairs in which a run did not get to the score and counts as its budget, and
    `undecided` those of them in which neither did: their ratio says nothing.
    """

    case: str
    fast: str
    slow: str
    target: float | None
    cpu: Estimate
    wall: Estimate
    unfinished: int = 0
    undecided: int = 0


def make_ratios(samples: Sequence[Sample]) -> list[Ratio]:
    """The ratio of every comparison that was measured: environments first, then the agents."""
    cases = list(dict.fromkeys(sample.case for sample in samples))
    arms = {(sample.case, sample.arm) for sample in samples}
    known = {case for case, *_ in COMPARISONS}
    wanted = [(case, NATIVE, SYNC, None) for case in cases if case not in known] + list(COMPARISONS)
    ratios = []
    for case, fast, slow, target in wanted:
        if {(case, fast), (case, slow)} <= arms:
            cpu, wall = (spread(speed_ratios(samples, case, fast, slow, clock)) for clock in CLOCKS)
            unfinished = unfinished_pairs(samples, case, fast, slow)
            ratios.append(Ratio(case, fast, slow, target, cpu, wall, *unfinished))
    return ratios


def unfinished_pairs(samples: Sequence[Sample], case: str, fast: str, slow: str) -> tuple[int, int]:
    """Pairs in which at least one run failed to reach the score, and those in which both did."""
    failures: dict[tuple[int, int], int] = {}
    for sample in samples:
        if sample.case == case and sample.arm in (fast, slow):
            key = (sample.seed, sample.turn)
            failures[key] = failures.get(key, 0) + (not sample.measures.get("reached", True))
    return sum(n > 0 for n in failures.values()), sum(n == 2 for n in failures.values())


def verdicts(ratios: Sequence[Ratio]) -> list[str]:
    """A line for each target, judged by the median over the pairs on the CPU clock, and for the seconds
    to a score one for every comparison."""
    lines = []
    for ratio in ratios:
        if ratio.cpu.value is None or (ratio.target is None and ratio.case != THRESHOLD):
            continue
        measured = f"measured {interval(ratio.cpu, 2)} by CPU time, {interval(ratio.wall, 2)} by wall clock"
        if ratio.unfinished:
            measured += (
                f"; in {ratio.unfinished} of {ratio.cpu.n} pairs a run did not get there and counts as "
                "its budget"
            )
        if ratio.undecided:
            verdict = f"NOT JUDGED, in {ratio.undecided} pairs neither got there"
        elif ratio.target is None:
            verdict = "has no target"
        else:
            verdict = "met" if ratio.cpu.value >= ratio.target else "MISSED"
        goal = "speed" if ratio.target is None else f"target {ratio.target:g} times or more"
        lines.append(f"{ratio.case}, {ratio.fast} / {ratio.slow}: {goal} {verdict} ({measured})")
    return lines


def print_env(console: Console, samples: Sequence[Sample], sizes: Sequence[int]) -> None:
    """Environment steps per second by case and number of environments."""
    rows = []
    for case in env_cases():
        for n_envs in sizes:
            name = case_name(case, n_envs)
            if not rates(samples, name, NATIVE, "cpu"):
                continue
            speeds = [
                number(spread(rates(samples, name, arm, clock)).value, 0)
                for clock in CLOCKS
                for arm in ARMS
            ]
            (ratio,) = (r for r in make_ratios([s for s in samples if s.case == name]))
            rows.append([case.name, f"{n_envs:,}", *speeds, interval(ratio.cpu), interval(ratio.wall)])
    print_table(
        console,
        "Environment steps per second (resets are no steps)",
        [
            "environment", "number", "native, CPU", "Sync, CPU", "native, wall", "Sync, wall",
            "native / Sync, CPU", "wall",
        ],
        rows,
        f"speeds: median; ratios: {SPREAD} of pairs. {CLOCK_NOTE}",
    )


def print_agents(console: Console, samples: Sequence[Sample], ratios: Sequence[Ratio]) -> None:
    """Speeds of the agents and of the bare loop, then how they compare."""
    rows = []
    for case, unit in ((IDENTICAL, "steps/s"), (THRESHOLD, "seconds"), (POOL, "answers/s")):
        for arm in dict.fromkeys(s.arm for s in samples if s.case == case):
            own = [s for s in samples if s.case == case and s.arm == arm]
            speeds = [
                [getattr(s.timing, clock) if unit == "seconds" else s.rate(clock) for s in own]
                for clock in CLOCKS
            ]
            shown = [interval(spread(values), 2 if unit == "seconds" else 0) for values in speeds]
            rows.append([case, arm, unit, *shown, outcome(own)])
    print_table(
        console,
        "PPO: speed, and what came of it",
        ["case", "who", "unit", "CPU", "wall", "outcome"],
        rows,
        f"{SPREAD} over runs. {CLOCK_NOTE}",
    )
    print_table(
        console,
        "PPO: how many times as fast",
        ["case", "ratio", "CPU", "wall", "pairs", "target"],
        [
            [
                r.case, f"{r.fast} / {r.slow}", interval(r.cpu, 2), interval(r.wall, 2), str(r.cpu.n),
                "-" if r.target is None else f"{r.target:g} or more",
            ]
            for r in ratios
            if r.case in (IDENTICAL, THRESHOLD, POOL)
        ],
        f"{SPREAD} of pairs, measured in turns",
    )


def outcome(samples: Sequence[Sample]) -> str:
    """What the runs of an arm achieved, in words; equal seeds give equal runs, counted once."""
    runs = list({sample.seed: sample.measures for sample in samples}.values())
    if "final_return" in runs[0]:
        known = [run["final_return"] for run in runs if run["final_return"] is not None]
        return f"last 100 episodes: {interval(spread(known), 0)}"
    if "reached" in runs[0]:
        reached = sum(sample.measures["reached"] for sample in samples)
        steps = interval(spread([sample.measures["env_steps"] for sample in samples]), 0)
        return f"{reached} of {len(samples)} reached it; steps {steps}"
    updates = {run["updates"] for run in runs}
    kl = interval(spread([run["kl_opt"] for run in runs]), 4)
    return f"KL to optimum {kl}; updates {', '.join(map(str, sorted(updates)))}"


def print_profile(console: Console, profiles: dict[str, list[dict[str, float]]]) -> None:
    """Shares of CPU time by piece."""
    names = [name for name, runs in profiles.items() if runs]
    by_name = {name: [shares(run) for run in profiles[name]] for name in names}
    rows = [
        [piece, *(interval(spread([100 * run[piece] for run in by_name[name]])) for name in names)]
        for piece in PIECES
    ]
    for phase in ("collect", "update"):
        totals = [
            spread([100 * sum(v for k, v in run.items() if k.startswith(phase)) for run in by_name[name]])
            for name in names
        ]
        rows.append([f"{phase}: all", *map(interval, totals)])
    console.print()
    print_table(
        console,
        "Where our PPO's time goes, % of the CPU time of learn",
        ["piece", *names],
        rows,
        f"{SPREAD} over seeds, each piece without those within it",
    )
