"""What the RLHF benchmark says: rows, exact optima beside them, verdicts, and samples as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from agents.files import replace_file
from common.rlhf_jobs import TASKS
from common.runner import Outcome
from common.stats import Estimate, estimate
from common.tables import interval, number, print_table
from llmgym.token_solution import TokenSolution

MEASURES = ("proxy", "gold", "gold_best", "kl", "kl_opt", "kl_learned", "length", "entropy",
            "clip_fraction", "value_loss")  # fmt: skip
FIRST = ("proxy", "gold", "kl", "kl_opt", "kl_learned", "length", "entropy")
LAST_UPDATES = 20  # over which clip fraction and value loss are averaged
BEHIND = 0.5  # deviations that gold must be below the proxy, and below its own best, to count


@dataclass(frozen=True)
class Arm:
    """What was trained: the size of the task, the reward that PPO was given, and the weight of the KL."""

    size: str
    reward: str
    beta: float

    def __str__(self) -> str:
        return f"{self.size}, {self.reward} reward, beta {self.beta:g}"


@dataclass(frozen=True)
class Row:
    """The runs of an arm: measures of the last policy (`gold_best`: of the best evaluation), means.

    first: the same of the SFT policy that it started from.
    """

    arm: Arm
    runs: int
    first: dict[str, Estimate]
    measures: dict[str, Estimate]


def arm_of(outcome: Outcome) -> Arm:
    """The arm that a run belongs to."""
    config = outcome.job.config
    return Arm(config["size"], config["reward"], config["beta"])


def make_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Means with bootstrap intervals over the runs that succeeded, a row for each arm."""
    groups: dict[Arm, list[dict[str, Any]]] = {}
    for outcome in outcomes:
        if outcome.result is not None:
            groups.setdefault(arm_of(outcome), []).append(outcome.result)
    rows = []
    for arm, results in groups.items():
        first = [result["curve"][0] for result in results]
        last = [_last(result) for result in results]
        rows.append(
            Row(
                arm,
                len(results),
                {name: estimate([run.get(name) for run in first]) for name in FIRST},
                {name: estimate([run.get(name) for run in last]) for name in MEASURES},
            )
        )
    return rows


def _last(result: dict[str, Any]) -> dict[str, Any]:
    """The last evaluation of a run, with the means of its last updates and its best gold reward."""
    updates = result["updates"][-LAST_UPDATES:]
    means = {name: float(np.mean([u[name] for u in updates])) for name in ("clip_fraction", "value_loss")}
    return result["curve"][-1] | means | {"gold_best": max(point["gold"] for point in result["curve"])}


def exact_optima(arms: Sequence[Arm]) -> dict[Arm, dict[str, float | None]]:
    """What the optimum of the gold reward is worth at each arm's beta, and the reference beside it."""
    found = {}
    for arm in arms:
        solution = TokenSolution(TASKS[arm.size]())
        value = solution.evaluate(solution.optimal_policy(arm.beta), arm.beta)
        found[arm] = {
            "gold": value.reward,
            "kl": value.kl_to_reference,
            "objective": value.objective,
            "length": value.response_length,
            "reference_kl_opt": solution.evaluate(solution.reference_policy(), arm.beta).kl_to_optimum,
        }
    return found


def verdicts(rows: Sequence[Row], optima: Mapping[Arm, Mapping[str, float | None]]) -> list[str]:
    """A line for each question that these rows answer."""
    lines = []
    for row in rows:
        if row.arm.reward == "learned":
            lines.append(f"{row.arm}: {_over_optimised(row)}")
        for name, target in (("kl_learned", "learned"), ("kl_opt", "gold")):
            before, after = row.first[name].value, row.measures[name].value
            if before is not None and after is not None and (name == "kl_opt" or row.arm.reward == target):
                lines.append(
                    f"{row.arm}: KL(policy || optimum of the {target} reward) {before:.3g} to {after:.3g}: "
                    f"approaches it: {'yes' if after < before else 'NO'}"
                )
        gold, kl, best = row.measures["gold"].value, row.measures["kl"].value, optima[row.arm]["objective"]
        if row.arm.beta > 0 and gold is not None and kl is not None and best is not None:
            reached = gold - row.arm.beta * kl
            lines.append(f"{row.arm}: gold less beta KL {reached:.2f}; optimum {best:.2f}, reference 0")
    return lines


def _over_optimised(row: Row) -> str:
    """Whether the gold reward fell from its best, or stayed behind the proxy, while the proxy rose."""
    start, proxy, first, gold, best = (
        number(x.value, 2) for x in (row.first["proxy"], row.measures["proxy"], row.first["gold"],
                                     row.measures["gold"], row.measures["gold_best"])
    )  # fmt: skip
    found = "no"
    if float(gold) < float(proxy) - BEHIND and float(proxy) > float(start):
        found = "yes, gold stays behind"
        if float(gold) < float(best) - BEHIND:
            found = "yes, gold falls"
    return f"proxy {start} to {proxy}, gold {first} to {gold} (best {best}): over-optimised: {found}"


def print_prepared(console: Console, prepared: Sequence[Outcome]) -> None:
    """The table of SFT policies and reward models."""
    table = []
    for outcome in prepared:
        if outcome.result is None:
            continue
        sft, rm = outcome.result["sft"], outcome.result["reward_model"]
        table.append(
            [f"{outcome.job.config['size']}, seed {outcome.job.config['seed']}"]
            + [number(sft[name], 3) for name in ("loss", "floor")]
            + [
                number(rm[name], 3)
                for name in ("accuracy", "gold_accuracy", "correlation", "mean", "deviation")
            ]
        )
    print_table(
        console,
        "Before PPO",
        ["task", "SFT loss", "reference's", "RM accuracy", "gold's", "correlation", "mean", "deviation"],
        table,
        caption="losses in nats a token on held-out samples; accuracy on held-out pairs, beside that of the "
        "gold reward itself; correlation of the scores with the gold reward, and their mean and deviation, "
        "on reference samples",
    )


def print_rows(
    console: Console, rows: Sequence[Row], optima: Mapping[Arm, Mapping[str, float | None]]
) -> None:
    """The table of the trained policies, each beside the exact optimum of the gold reward."""
    table = []
    for row in rows:
        m, best = row.measures, optima[row.arm]
        table.append(
            [f"{row.arm.size} {row.arm.reward} {row.arm.beta:g}"]
            + [interval(m[name], 2) for name in ("proxy", "gold")]
            + [number(m[name].value, 1) for name in ("kl", "length")]
            + [number(m["entropy"].value, 2)]
            + [number(m[name].value, 3) for name in ("kl_opt", "kl_learned")]
        )
        table.append(
            ["  its optimum", "", number(best["gold"], 2), number(best["kl"], 1)]
            + [number(best["length"], 1), "", "0" if row.arm.beta > 0 else "-", ""]
        )
    print_table(
        console,
        f"PPO, {max(row.runs for row in rows)} runs",
        [
            "task, reward, beta",
            "proxy",
            "gold",
            "KL to ref.",
            "length",
            "entropy",
            "to optimum",
            "to learned",
        ],
        table,
        caption="Means of the last policies with 95% bootstrap intervals; rewards in deviations of the "
        "reference, KL in nats a response, to the optimum of the gold reward and to the optimum of "
        "the reward model, by enumeration on the small task, exact there like all but the entropy",
    )


def write_samples(runs: Sequence[Outcome], path: Path) -> Path:
    """Samples of each arm's first run before and after PPO, as text."""
    with replace_file(path) as file:
        seen = set()
        for run in runs:
            arm = arm_of(run)
            if arm in seen or run.result is None:
                continue
            seen.add(arm)
            for title, key in (("SFT policy", "before"), ("after PPO", "after")):
                file.write(f"{arm}, seed {run.job.config['seed']}: {title}\n")
                for s in run.result[key]:
                    ended = "." if s["ended"] == "eos" else ""
                    text = f"{s['prompt']} > {s['response']}{ended}"
                    file.write(f"  {text:<32} proxy {s['proxy']:7.2f}   gold {s['gold']:7.2f}\n")
                file.write("\n")
    return path
