"""Tables and verdicts of the throughput benchmark's part tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console

from common.speed_profile import shares
from common.speed_report import CLOCK_NOTE, SPREAD, Ratio
from common.speed_tokens import CACHED, EVALUATION, GENERATE, NETWORK, TOKEN_CASES, TOKEN_PIECES
from common.tables import interval, print_table
from common.timing import CLOCKS, Sample, rates, spread

OVERHEAD_TARGET = 0.15  # environment, sampling and bookkeeping, of the loop's time
OVERHEAD = [piece for piece in TOKEN_PIECES if not piece.startswith(NETWORK)]
Profiles = dict[str, list[dict[str, float]]]


def loop_only(run: dict[str, float]) -> dict[str, float]:
    """A profile without the evaluation, which is no part of the loop."""
    return {piece: run[piece] for piece in TOKEN_PIECES}


def overhead(run: dict[str, float]) -> float:
    """Share, from 0 to 1, of environment, sampling and bookkeeping in the loop's time."""
    return sum(shares(loop_only(run))[piece] for piece in OVERHEAD)


def overhead_verdicts(profiles: Profiles) -> list[str]:
    """A line for each case: whether the median over seeds is below the target."""
    lines = []
    for case, runs in profiles.items():
        found = [overhead(run) for run in runs]
        verdict = "met" if np.median(found) < OVERHEAD_TARGET else "MISSED"
        percent = interval(spread([100 * share for share in found]), 1)
        lines.append(
            f"{case}, environment, sampling and bookkeeping: target below {OVERHEAD_TARGET:.0%} of the loop "
            f"{verdict} (measured {percent} %)"
        )
    return lines


def print_tokens(console: Console, samples: Sequence[Sample], ratios: Sequence[Ratio]) -> None:
    """Tokens per second of every arm, then how they compare."""
    rows = []
    for case in TOKEN_CASES:
        for arm in dict.fromkeys(s.arm for s in samples if s.case == case):
            own = [s for s in samples if s.case == case and s.arm == arm]
            speeds = [interval(spread(rates(samples, case, arm, clock)), 0) for clock in CLOCKS]
            # As much as a rollout takes that is trained on.
            evaluated = [s.amount / (s.timing.cpu + s.measures.get("evaluation_cpu", 0.0)) for s in own]
            with_evaluation = "-" if arm == GENERATE else interval(spread(evaluated), 0)
            tokens = interval(spread([s.amount for s in own]), 0)
            rows.append([case, arm, *speeds, with_evaluation, tokens])
    print_table(
        console,
        "Tokens per second",
        ["case", "who", "CPU", "wall", "evaluation included, CPU", "tokens a run"],
        rows,
        f"{SPREAD} over runs. Evaluation: log-probs and values of the finished completions. {CLOCK_NOTE}",
    )
    print_table(
        console,
        "Tokens: how many times as fast",
        ["case", "ratio", "CPU", "wall", "pairs", "target"],
        [
            [
                r.case, f"{r.fast} / {r.slow}", interval(r.cpu, 2), interval(r.wall, 2), str(r.cpu.n),
                "-" if r.target is None else f"{r.target:g} or more",
            ]
            for r in ratios
            if r.case in TOKEN_CASES
        ],
        f"{SPREAD} of pairs, measured in turns",
    )


def print_token_profile(console: Console, profiles: Profiles) -> None:
    """Shares of the loop's CPU time by piece, and the evaluation beside it."""
    by_case = {case: [shares(loop_only(run)) for run in runs] for case, runs in profiles.items()}
    rows = [
        [piece, *(interval(spread([100 * run[piece] for run in runs])) for runs in by_case.values())]
        for piece in TOKEN_PIECES
    ]
    totals = [spread([100 * overhead(run) for run in runs]) for runs in profiles.values()]
    rows.append(["environment, sampling, bookkeeping", *map(interval, totals)])
    evaluation = [
        spread([100 * run[EVALUATION] / sum(loop_only(run).values()) for run in runs])
        for runs in profiles.values()
    ]
    rows.append(["evaluation, beside the loop", *map(interval, evaluation)])
    print_table(
        console,
        f"Where the time of the {CACHED} goes, % of its CPU time",
        ["piece", *profiles],
        rows,
        f"{SPREAD} over seeds, each piece without those within it",
    )
