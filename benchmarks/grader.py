"""Can the grader of mathematics be fooled, hung or slowed, and how fast is it, beside math-verify?

    python benchmarks/grader.py
    python benchmarks/grader.py --labels labelled_solutions.jsonl
    python benchmarks/grader.py --quick

Three questions. Accuracy: the answer cases of tests/llmgym/data/answers.jsonl (formats, odd numbers, denial
of service, code) and the labels of GSM8K solutions by four models (github.com/openai/grade-school-math,
example_model_solutions.jsonl, one solution and its label per line; found by --labels or GSM8K_LABELS).
Where a case is a matter of convention (doubtful), both graders are counted apart. Speed: responses per
second of processor time on those solutions, both graders in turns on the same slices in one process;
nothing is cached between rows. Hostile answers: 1,000 of them among clean ones, against twice the clean
time plus the time limits of those rows that ran into one.

math-verify runs with its defaults, in a process that is killed after 10 seconds of one row where rows are
hostile (its time limits are signals, which long integer arithmetic does not notice); it needs the extra
`llm`. Without labelled solutions the speed is measured on made-up ones, and the output says so. Under
--out: `summary.json` and `grader.png`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console

from common.files import write_json
from common.grader_measure import (
    Agreement,
    Hostile,
    Speed,
    agreement,
    grade_math_verify_timed,
    grade_ours_timed,
    measure_hostile,
    measure_speed,
)
from common.grader_rows import CASES, Row, hostile_rows, labels_path, made_up_rows, read_cases, read_labels
from common.plots import PALETTE, new_figure, save_figure
from common.quick import apply_quick
from common.runner import versions
from common.tables import interval, make_console, number, print_table
from llmgym.verifiers.pool import missing

SPEED_TARGET = 100.0


@dataclass(frozen=True)
class Args:
    """Accuracy, speed and robustness of the grader of mathematics."""

    cases: Path = CASES
    """Answer cases, JSON lines."""
    labels: Path | None = None
    """Labelled GSM8K solutions, JSON lines; by default GSM8K_LABELS, else a data folder, else none."""
    label_rows: int = 2640
    """How many labelled solutions math-verify grades for the table (ours grades all)."""
    rounds: int = 8
    """Rounds of the speed measurement, each with both graders."""
    per_round: int = 300
    """Responses in a round."""
    clean: int = 50_000
    """Clean responses, the solutions repeated, that hostile ones are mixed into."""
    hostile: int = 1_000
    """Hostile answers."""
    hanging: int = 8
    """How many of these are expressions that sympy does not finish."""
    time_limit: float = 0.5
    """Seconds for one expression."""
    seed: int = 0
    """Seed of the hostile answers and of made-up solutions."""
    out: Path = Path("results/grader")
    """Folder for summary.json and the figure."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Fewer rows and rounds, in results/grader_quick."""


QUICK: dict[str, Any] = {
    "label_rows": 200, "rounds": 2, "per_round": 100, "clean": 10_000, "hostile": 200, "hanging": 2,
    "out": Path("results/grader_quick"),
}  # fmt: skip


def check(args: Args) -> None:
    """Raise ValueError, naming the option, for sizes that make no measurement and files that are not
    there."""
    for name in ("label_rows", "rounds", "per_round", "clean", "hostile"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be at least 1")
    if not 0 <= args.hanging <= args.hostile <= args.clean:
        raise ValueError("--hanging, --hostile and --clean must not decrease in this order")
    if not args.time_limit > 0:
        raise ValueError(f"--time-limit is {args.time_limit}, must be above 0")
    labels = labels_path(args.labels)
    for option, path in (("cases", args.cases), ("labels", labels)):
        if path is not None and not path.is_file():
            raise ValueError(f"--{option} is {path}, which is no file")


def measure_accuracy(args: Args, cases: list[Row], labels: list[Row], theirs: bool) -> list[Agreement]:
    """Both graders on every set of rows; math-verify only where it is installed."""
    sets = {
        "format cases": [r for r in cases if r.tag == "fmt" and not r.doubtful],
        "hostile cases": [r for r in cases if r.tag != "fmt" and not r.doubtful],
        "doubtful cases": [r for r in cases if r.doubtful],
    }
    table = []
    for name, rows in sets.items():
        table.append(agreement(name, "llmgym", rows, grade_ours_timed(rows, 1.0)))
        if theirs:
            table.append(agreement(name, "math-verify", rows, grade_math_verify_timed(rows)))
    if labels:
        table.append(agreement("GSM8K labels", "llmgym", labels, grade_ours_timed(labels, 1.0)))
        if theirs:
            some = labels[: args.label_rows]
            table.append(agreement("GSM8K labels", "math-verify", some, grade_math_verify_timed(some)))
    return table


def print_accuracy(console: Console, table: list[Agreement]) -> None:
    print_table(
        console,
        "Accuracy",
        ["rows", "grader", "n", "agree", "wrong accepted", "right refused", "over 2 s", "killed"],
        [
            [x.rows, x.grader, str(x.n), f"{x.agree} ({100 * x.agree / x.n:.1f}%)", str(x.false_accepts),
             str(x.false_rejects), str(x.slow), str(x.killed)]
            for x in table
        ],
        caption="over 2 s: rows that took longer (math-verify's own limit is 5 s). killed: it hung, or its "
        "process ended, without a grade. Doubtful: matters of convention",
    )  # fmt: skip


def print_speed(console: Console, speed: Speed, source: str) -> None:
    rows = [["llmgym", interval(speed.ours, 0)]]
    if speed.math_verify is not None and speed.ratio is not None:
        rows += [["math-verify", interval(speed.math_verify, 0)], ["ratio", interval(speed.ratio, 0)]]
    print_table(
        console,
        f"Speed on {source}",
        ["grader", "responses per second of processor time"],
        rows,
        caption="mean over rounds with its 95% bootstrap interval; both graders take turns in one process",
    )


def print_hostile(console: Console, hostile: Hostile, time_limit: float) -> None:
    print_table(
        console,
        f"{hostile.n_hostile:,} hostile answers among {hostile.n_clean:,} clean ones",
        ["", "seconds"],
        [
            ["clean rows alone", number(hostile.clean, 3)],
            ["clean and hostile rows", number(hostile.mixed, 3)],
            [f"twice the first, plus {hostile.n_timed_out} x {time_limit} s", number(hostile.bound, 3)],
        ],
        caption=f"hostile rows ended as {hostile.statuses}, {hostile.wrong_scores} with a score; grades of "
        f"the clean rows {'unchanged' if hostile.neighbours_unchanged else 'CHANGED'}",
    )


def verdicts(table: list[Agreement], speed: Speed, hostile: Hostile) -> list[str]:
    """A line for each target."""
    lines = []
    for x in table:
        if x.grader == "llmgym" and x.rows != "doubtful cases":
            met = "met" if x.agree == x.n else f"MISSED ({', '.join(x.disagreements)})"
            lines.append(f"{x.rows}: {x.agree} of {x.n}, target all: {met}")
    if speed.ratio is not None and speed.ratio.value is not None:
        met = "met" if speed.ratio.value >= SPEED_TARGET else "MISSED"
        lines.append(f"speed against math-verify: {speed.ratio.value:.0f}, target {SPEED_TARGET:.0f}: {met}")
    fine = hostile.mixed < hostile.bound and not hostile.wrong_scores and hostile.neighbours_unchanged
    lines.append(
        f"hostile answers: {hostile.mixed:.3f} s, target below {hostile.bound:.3f} s with no score and no "
        f"clean grade changed: {'met' if fine else 'MISSED'}"
    )
    return lines


def draw(table: list[Agreement], speed: Speed, hostile: Hostile, path: Path) -> Path:
    """Disagreements per set, speed on a logarithmic axis, and the cost of hostile answers."""
    figure, axes = new_figure(1, 3, width=4.2, height=3.4)
    graders = list(dict.fromkeys(x.grader for x in table))
    names = list(dict.fromkeys(x.rows for x in table))
    height = 0.8 / len(graders)
    for index, grader in enumerate(graders):
        own = {x.rows: x for x in table if x.grader == grader}
        shares = [100 * (1 - own[name].agree / own[name].n) for name in names]
        places = np.arange(len(names)) + index * height
        bars = axes[0, 0].barh(places, shares, height=height * 0.9, color=PALETTE[index], label=grader)
        texts = [f"{own[name].n - own[name].agree} of {own[name].n}" for name in names]
        axes[0, 0].bar_label(bars, texts, padding=3, fontsize=8)
    axes[0, 0].set_yticks(np.arange(len(names)) + height * (len(graders) - 1) / 2, names)
    axes[0, 0].invert_yaxis()
    axes[0, 0].margins(x=0.3)
    axes[0, 0].set_xlabel("rows graded otherwise than labelled (%)")
    axes[0, 0].set_title("Accuracy")
    axes[0, 0].legend(loc="lower right")
    arms = [("llmgym", speed.ours), ("math-verify", speed.math_verify)]
    for index, (name, value) in enumerate(arms):
        if value is not None and value.value is not None:
            bar = axes[0, 1].bar([name], [value.value], color=PALETTE[index], width=0.6)
            axes[0, 1].bar_label(bar, [f"{value.value:,.0f}"], padding=2)
    axes[0, 1].set_yscale("log")
    axes[0, 1].margins(y=0.15)
    axes[0, 1].set_ylabel("responses per second")
    ratio = "" if speed.ratio is None else f" ({speed.ratio.value:,.0f} times)"
    axes[0, 1].set_title(f"Speed{ratio}")
    bars = axes[0, 2].bar(
        ["clean", "with\nhostile", "bound"],
        [hostile.clean, hostile.mixed, hostile.bound],
        color=[PALETTE[0], PALETTE[0], "0.6"],
        width=0.6,
    )
    axes[0, 2].bar_label(bars, fmt="%.2f", padding=2)
    axes[0, 2].margins(y=0.15)
    axes[0, 2].set_ylabel("seconds")
    axes[0, 2].set_title(f"{hostile.n_clean:,} clean, {hostile.n_hostile:,} hostile")
    return save_figure(figure, path)


def main(args: Args) -> int:
    """Run the benchmark and report; the exit status is 1 where a target is missed."""
    console = make_console()
    args = apply_quick(args, QUICK)
    try:
        check(args)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    path = labels_path(args.labels)
    cases, labels = read_cases(args.cases), [] if path is None else read_labels(path)
    theirs = not missing()
    if not theirs:
        console.print("without math-verify and sympy (pip install llmgym[llm]): expressions are not graded")
    solutions = labels or made_up_rows(2_640, args.seed)
    source = "labelled GSM8K solutions" if labels else "made-up solutions (no labels found: see --labels)"
    with console.status("grading the cases"):
        table = measure_accuracy(args, cases, labels, theirs)
    print_accuracy(console, table)
    with console.status("measuring the speed"):
        speed = measure_speed(solutions, args.rounds, args.per_round, theirs)
    print_speed(console, speed, source)
    with console.status("mixing in hostile answers"):
        clean = (solutions * (args.clean // len(solutions) + 1))[: args.clean]
        bad = hostile_rows(cases, args.hostile, args.hanging if theirs else 0, args.seed)
        hostile = measure_hostile(clean, bad, args.time_limit, rounds=3)
    print_hostile(console, hostile, args.time_limit)
    lines = verdicts(table, speed, hostile)
    for line in lines:
        console.print(line, markup=False, highlight=False)
    figure = draw(table, speed, hostile, args.out / "grader.png")
    summary = {
        "args": args, "versions": versions(), "source": source, "accuracy": table, "speed": speed,
        "hostile": hostile, "targets": lines, "figure": figure,
    }  # fmt: skip
    write_json(args.out / "summary.json", summary)
    for written in (figure, args.out / "summary.json"):
        console.print(f"wrote {written}", highlight=False, soft_wrap=True)
    return int(any("MISSED" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
