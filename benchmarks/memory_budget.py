"""How much memory the models of post-training need, by role and by kind, and whether that is so.

    python benchmarks/memory_budget.py
    python benchmarks/memory_budget.py --params 70e9 --layers 80 --hidden 8192 --kv-share 0.125
    python benchmarks/memory_budget.py --weights fp32 --gradients fp32 --optimizer momentum
    python benchmarks/memory_budget.py --frozen int4 --lora-rank 64
    python benchmarks/memory_budget.py --measure

A trained parameter costs its weight, its gradient, a float32 master copy and the moments of its optimiser
(by default 2 + 2 + 4 + 4 + 4 = 16 bytes), a frozen one its weight. PPO trains a policy and a value model
and holds a reward model and a reference: 252 GB at 7 billion parameters each; DPO trains a policy beside a
reference: 126 GB. GB are 1e9 bytes, GiB 2**30. **Activations, temporary buffers and the KV cache are not in
the budget**; of the cache there is an estimate beside it.

With --measure every method is built from real GPT-2 models on the CPU (no download; `transformers` and
`peft` are needed, which the extra `llm` brings) and trained for two steps: what their tensors take, and how
far the process grew, beside what was predicted, within 10%. Under --out it leaves `summary.json` and
`memory_budget.png`.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.console import Console

from common.files import write_json
from common.memory_figure import draw
from common.memory_measure import MEASURED_METHODS, Case, Measured, Size, measure_all, unmeasurable
from common.memory_model import KINDS, METHODS, ROLES, Model, Part, Precision, budget, kv_cache_bytes, total
from common.quick import apply_quick
from common.tables import make_console, number, print_table

GB, GIB, MB = 1e9, 2.0**30, 1e6
TOLERANCE = 0.10

Format = Literal["fp32", "bf16", "fp16"]
FrozenFormat = Literal["fp32", "bf16", "fp16", "int8", "int4"]


@dataclass(frozen=True)
class Args:
    """Memory of the models of PPO, GRPO, DPO and SFT, in full and with LoRA."""

    params: float = 7e9
    """Parameters of each model."""
    weights: Format = "bf16"
    """Format of trained weights."""
    gradients: Format = "bf16"
    """Format of gradients."""
    master: bool = True
    """Keep a float32 copy of trained weights that are in less."""
    moments: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format of the optimiser's moments; int8 as in 8-bit optimisers."""
    optimizer: Literal["adamw", "lion", "momentum", "sgd"] = "adamw"
    """AdamW has two moments, Lion and SGD with momentum one, SGD none."""
    frozen: FrozenFormat | None = None
    """Format of models that are not trained, and of those under LoRA adapters; by default that of weights."""
    lora_rank: int = 16
    """Rank of the adapters, on the query and value projections of every layer."""
    layers: int | None = None
    """Layers, for adapters and KV cache; by default those that are usual for so many parameters."""
    hidden: int | None = None
    """Hidden size, likewise."""
    kv_share: float = 1.0
    """Key/value heads over query heads: below 1 with grouped queries."""
    sequences: int = 64
    """Rollouts at a time, for the estimate of the KV cache."""
    tokens: int = 2048
    """Tokens of each, prompt and answer."""
    measure: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Build small real models and compare."""
    measure_layers: int = 12
    """Layers of these; by default they have the size of the smallest GPT-2, and PPO's take 4.5 GB."""
    measure_hidden: int = 768
    """Hidden size of these, a multiple of 64."""
    out: Path = Path("results/memory_budget")
    """Folder for summary.json and the figure."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Measure models of four layers, in results/memory_budget_quick."""


QUICK: dict[str, Any] = {"measure_layers": 4, "out": Path("results/memory_budget_quick")}


@dataclass(frozen=True)
class Row:
    """The budget of one method; lora_rank None: every parameter of trained models is trained."""

    method: str
    lora_rank: int | None
    parts: list[Part]
    total_bytes: float
    total_gb: float
    total_gib: float


def check(args: Args) -> None:
    """Raise ValueError, naming the option, for values that no model can have."""
    for name in ("lora_rank", "sequences", "tokens", "measure_layers"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be at least 1")
    if not 1 <= args.params < np.inf:
        raise ValueError(f"--params is {args.params}, must be a finite number from 1")
    if not 0 < args.kv_share <= 1:
        raise ValueError(f"--kv-share is {args.kv_share}, must be above 0 and at most 1")
    if args.measure_hidden < 64 or args.measure_hidden % 64:
        raise ValueError(f"--measure-hidden is {args.measure_hidden}, must be a multiple of 64")
    if (args.layers is None) != (args.hidden is None):
        raise ValueError("--layers and --hidden go together: give both or neither")
    for name in ("layers", "hidden"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}, must be at least 1")
    if args.measure:
        reason = unmeasurable(make_precision(args))
        if reason is not None:
            raise ValueError(f"--measure is not possible with {reason}")
        missing = [p for p in ("transformers", "peft") if importlib.util.find_spec(p) is None]
        if missing:
            raise ValueError(f"--measure needs {' and '.join(missing)}: pip install llmgym[llm]")


def make_precision(args: Args) -> Precision:
    """The formats that were asked for."""
    frozen = args.weights if args.frozen is None else args.frozen
    return Precision(args.weights, args.gradients, args.master, args.moments, frozen, args.optimizer)


def make_model(args: Args) -> Model:
    """The model that was asked for, its shape estimated where it was not given."""
    if args.layers is None or args.hidden is None:
        return Model.of_size(args.params, args.kv_share)
    return Model(args.params, args.layers, args.hidden, args.kv_share)


def make_rows(args: Args) -> list[Row]:
    """Every method, in full and with LoRA."""
    model, precision = make_model(args), make_precision(args)
    rows = []
    for lora_rank in (None, args.lora_rank):
        for method in METHODS:
            parts = budget(method, model, precision, lora_rank)
            size = total(parts)
            rows.append(Row(method, lora_rank, parts, size, size / GB, size / GIB))
    return rows


def make_cases(args: Args) -> list[Case]:
    """The methods that differ in their models, on the small one."""
    size, precision = Size(args.measure_layers, args.measure_hidden), make_precision(args)
    return [Case(m, size, precision, rank) for rank in (None, args.lora_rank) for m in MEASURED_METHODS]


def name(method: str, lora_rank: int | None) -> str:
    """ "PPO, full" or "PPO, LoRA"."""
    return f"{method}, {'full' if lora_rank is None else 'LoRA'}"


def print_rows(console: Console, args: Args, rows: list[Row]) -> None:
    """The budget by role and by kind."""
    model, precision = make_model(args), make_precision(args)
    cost = budget("SFT", Model(1, 1, 1), precision)[0]
    terms = " + ".join(f"{getattr(cost, kind):g} {kind}" for kind in KINDS)
    title = f"{args.params / GB:g} billion parameters in each model, GB (1e9 bytes)"
    by_role, by_kind = [], []
    for row in rows:
        sizes = {part.role: part.total for part in row.parts}
        ends = [number(row.total_gb), number(row.total_gib)]
        shown = [number(sizes[role] / GB) if role in sizes else "-" for role in ROLES]
        by_role.append([name(row.method, row.lora_rank), *shown, *ends])
        kinds = [number(sum(getattr(part, kind) for part in row.parts) / GB) for kind in KINDS]
        by_kind.append([name(row.method, row.lora_rank), *kinds, *ends])
    print_table(
        console, title, ["by role", *ROLES, "total GB", "total GiB"], by_role,
        caption=f"a trained parameter: {terms} = {cost.total:g} bytes. LoRA: rank {args.lora_rank}, "
        f"{model.lora_params(args.lora_rank) / MB:.1f} million parameters, {model.layers} layers of "
        f"{model.hidden}; the reference is the policy with its adapters off",
    )  # fmt: skip
    print_table(
        console, title, ["by kind", *KINDS, "total GB", "total GiB"], by_kind,
        caption="not counted: activations, temporary buffers, KV cache, fragmentation. GRPO with beta 0 "
        "needs no reference",
    )  # fmt: skip


def print_measured(console: Console, args: Args, measured: list[Measured]) -> None:
    """What small models really took."""
    model = make_cases(args)[0].size.model()
    print_table(
        console,
        f"Measured: GPT-2 of {model.params / MB:.1f} million parameters on this machine, MB (1e6 bytes)",
        ["method", "predicted", "tensors", "off by", "process grew", "off by", "peak"],
        [
            [
                name(x.method, x.lora_rank), number(x.predicted_total / MB), number(x.measured_total / MB),
                percent(x.error), megabytes(x.resident), percent(x.resident_error), megabytes(x.peak),
            ]
            for x in measured
        ],
        caption="tensors: storage of all parameters, gradients, masters and moments after two steps. Process "
        "grew: its resident memory then, less that before. Peak: its growth at most, with the activations of "
        "a batch of 2 x 32 tokens and temporary buffers, which are not in the budget",
    )  # fmt: skip


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f}%"


def megabytes(value: float | None) -> str:
    return number(None if value is None else value / MB)


def verdicts(measured: list[Measured]) -> list[str]:
    """Whether predictions lie within the tolerance, a line for each way to measure."""
    lines = []
    for label, errors in (
        ("tensors", [x.error for x in measured]),
        ("growth of the process", [x.resident_error for x in measured]),
    ):
        known = [abs(error) for error in errors if error is not None]
        if known:
            met = "met" if max(known) <= TOLERANCE else "MISSED"
            lines.append(
                f"predicted against measured {label}: largest difference {100 * max(known):.1f}%, "
                f"target {100 * TOLERANCE:.0f}% or less: {met}"
            )
    return lines


def main(args: Args) -> int:
    """Run the benchmark and report; the exit status."""
    console = make_console()
    args = apply_quick(args, QUICK)
    try:
        check(args)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    rows = make_rows(args)
    print_rows(console, args, rows)
    model = make_model(args)
    cache = kv_cache_bytes(model, args.sequences, args.tokens, args.weights)
    console.print(
        f"beside the budget: the KV cache of {args.sequences} rollouts of {args.tokens} tokens takes up to "
        f"{cache / GB:.1f} GB ({cache / GIB:.1f} GiB) in {args.weights}",
        highlight=False,
    )
    measured: list[Measured] = []
    if args.measure:
        with console.status("building and training small models"):
            measured = measure_all(make_cases(args))
        print_measured(console, args, measured)
    lines = verdicts(measured)
    for line in lines:
        console.print(line, markup=False, highlight=False)
    figure = draw(args.params, rows, measured, args.out / "memory_budget.png")
    summary = {
        "args": args, "model": model, "precision": make_precision(args), "rows": rows,
        "kv_cache_bytes": cache, "measured": measured, "targets": lines, "figure": figure,
    }  # fmt: skip
    write_json(args.out / "summary.json", summary)
    for path in (figure, args.out / "summary.json"):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
