"""The memory benchmark: its arithmetic by hand, and real models beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import memory_budget as script
from common import memory_measure
from common.memory_measure import Case, Measured, Size
from common.memory_model import KINDS, METHODS, Model, Part, Precision, budget, kv_cache_bytes, total

SEVEN = Model(7e9, layers=32, hidden=4096)
SMALL = Size(layers=2, hidden=128, vocabulary=2_000)


def gigabytes(method: str, precision: Precision | None = None, lora_rank: int | None = None) -> float:
    return total(budget(method, SEVEN, precision or Precision(), lora_rank)) / 1e9


# --------------------------------------------------------------------------- the arithmetic


# 16 bytes a trained parameter, 2 a frozen one: 112 and 14 GB a model.
@pytest.mark.parametrize(
    ("method", "expected"),
    [("SFT", 112), ("DPO", 126), ("GRPO, verifier", 126), ("GRPO, reward model", 140), ("PPO", 252)],
)
def test_seven_billion_parameters(method: str, expected: float) -> None:
    assert gigabytes(method) == pytest.approx(expected)


def test_kinds_and_roles_of_ppo() -> None:
    parts = {part.role: part for part in budget("PPO", SEVEN, Precision())}
    assert list(parts) == ["policy", "value", "reward", "reference"]
    for role in ("policy", "value"):
        assert [getattr(parts[role], kind) / 1e9 for kind in KINDS] == pytest.approx([14, 14, 28, 56])
    for role in ("reward", "reference"):
        assert [getattr(parts[role], kind) / 1e9 for kind in KINDS] == pytest.approx([14, 0, 0, 0])


@pytest.mark.parametrize(
    ("precision", "bytes_a_parameter"),
    [
        (Precision(), 16),
        (Precision("fp32", "fp32"), 4 + 4 + 8),  # nothing to keep a float32 copy of
        (Precision(master=False, moments="bf16"), 2 + 2 + 4),
        (Precision(gradients="fp32"), 2 + 4 + 4 + 8),
        (Precision(moments="int8"), 2 + 2 + 4 + 2),
        (Precision(optimizer="lion"), 2 + 2 + 4 + 4),
        (Precision(optimizer="momentum"), 2 + 2 + 4 + 4),
        (Precision(optimizer="sgd"), 2 + 2 + 4),
    ],
)
def test_bytes_of_a_trained_parameter(precision: Precision, bytes_a_parameter: float) -> None:
    assert gigabytes("SFT", precision) == pytest.approx(7 * bytes_a_parameter)


@pytest.mark.parametrize(
    ("frozen", "reference"), [("fp32", 28), ("bf16", 14), ("fp16", 14), ("int8", 7), ("int4", 3.5)]
)
def test_frozen_models_in_their_own_format(frozen: str, reference: float) -> None:
    assert gigabytes("DPO", Precision(frozen=frozen)) == pytest.approx(112 + reference)


def test_lora_by_hand() -> None:
    # Rank 16 on query and value, each 4096 x 4096, in 32 layers: 32 * 2 * 16 * 8192 = 8388608.
    assert SEVEN.lora_params(16) == 8_388_608
    adapters = 16 * 8_388_608 / 1e9  # float32 weight, gradient and two moments
    expected = {
        "SFT": 14 + adapters, "DPO": 14 + adapters, "GRPO, verifier": 14 + adapters,
        "GRPO, reward model": 28 + adapters, "PPO": 42 + 2 * adapters,
    }  # fmt: skip
    assert {method: gigabytes(method, lora_rank=16) for method in METHODS} == pytest.approx(expected)
    assert gigabytes("SFT", Precision(frozen="int4"), 16) == pytest.approx(3.5 + adapters)


def test_grouped_queries_have_smaller_adapters_and_caches() -> None:
    grouped = replace(SEVEN, kv_share=0.25)  # the value projection is 4096 -> 1024
    assert grouped.lora_params(16) == 32 * 16 * ((4096 + 4096) + (4096 + 1024))
    full = kv_cache_bytes(SEVEN, 64, 2048, "bf16")
    assert full == 2 * 32 * 4096 * 2 * 64 * 2048  # 512 KiB a token
    assert kv_cache_bytes(grouped, 64, 2048, "bf16") == full / 4


# As published: Llama 2 7B and 13B.
@pytest.mark.parametrize(("params", "shape"), [(7e9, (32, 4096)), (13e9, (40, 5120)), (1e5, (1, 128))])
def test_usual_shapes(params: float, shape: tuple[int, int]) -> None:
    model = Model.of_size(params)
    assert (model.layers, model.hidden) == shape and model.params == params


# --------------------------------------------------------------------------- real models


@pytest.fixture
def transformers():
    pytest.importorskip("peft", reason="LoRA is measured with peft, in the extra llm")
    return pytest.importorskip("transformers", reason="real models are built with transformers, extra llm")


def as_bytes(parts: list[Part]) -> dict[tuple[str, str], float]:
    return {(part.role, kind): getattr(part, kind) for part in parts for kind in KINDS}


@pytest.mark.parametrize(
    "precision",
    [Precision(), Precision("fp32", "fp32", frozen="fp32"), Precision(master=False, moments="bf16"),
     Precision(optimizer="momentum"), Precision(optimizer="sgd")],
    ids=["mixed", "fp32", "pure-bf16", "momentum", "sgd"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["SFT", "PPO"])
def test_real_tensors_take_what_is_predicted(transformers, method: str, precision: Precision) -> None:
    found = memory_measure.measure(Case(method, SMALL, precision))
    predicted, measured = as_bytes(found.predicted), as_bytes(found.parts)
    assert predicted.keys() == measured.keys()
    for key, size in predicted.items():
        # The heads and Adam's counters are not in the prediction.
        assert measured[key] == pytest.approx(size, rel=0.01), key
    assert abs(found.error) < 0.01


@pytest.mark.parametrize("method", ["DPO", "GRPO, reward model", "PPO"])
def test_real_adapters_take_what_is_predicted(transformers, method: str) -> None:
    found = memory_measure.measure(Case(method, SMALL, Precision(), lora_rank=8))
    predicted, measured = as_bytes(found.predicted), as_bytes(found.parts)
    for key, size in predicted.items():
        # A value head is trained beside the adapters: 129 parameters, 16 bytes each.
        head = 16 * 129 if key[0] == "value" else 0
        assert measured[key] == pytest.approx(size, rel=0.01, abs=head), key
    assert measured["reference", "weights"] == 0
    assert measured["policy", "gradients"] == 4 * SMALL.model().lora_params(8)


def test_a_forgotten_copy_would_show(transformers) -> None:
    """The measurement counts what is there: without masters it is a quarter less."""
    parameters = [torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16)) for _ in range(3)]
    sizes = {}
    for master in (True, False):
        optimizer = memory_measure.Optimizer(parameters, "adamw", master)
        model = torch.nn.ParameterList(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        sizes[master] = memory_measure.count("policy", model, optimizer)
    assert (sizes[True].master, sizes[True].moments) == (12_000, pytest.approx(24_000, abs=100))
    assert (sizes[False].master, sizes[False].moments) == (0, pytest.approx(12_000, abs=100))


def test_shared_storage_counts_once() -> None:
    base = torch.zeros(100)
    assert memory_measure.storage_bytes([base, base[:50], base.view(10, 10), torch.zeros(3)]) == 412


def test_masters_keep_steps_that_bf16_loses() -> None:
    """Thirty steps of 1e-4 down from 1: bf16 has nothing between 1 and 0.996, the masters add them up."""
    values = {}
    for master in (True, False):
        parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = memory_measure.Optimizer([parameter], "adamw", master)
        for _ in range(30):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        values[master] = parameter.detach().float()
    assert (values[False] == 1).all() and (values[True] < 1).all()


def test_real_kv_cache_takes_what_is_estimated(transformers) -> None:
    policy = memory_measure.build_model("policy", SMALL, torch.bfloat16)
    with torch.no_grad():
        cache = policy(torch.ones(3, 20, dtype=torch.long), use_cache=True).past_key_values
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    assert sum(t.numel() * t.element_size() for t in tensors) == kv_cache_bytes(SMALL.model(), 3, 20, "bf16")


# --------------------------------------------------------------------------- the script


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": 0.0}, "--params is 0.0"),
        ({"params": float("inf")}, "--params"),
        ({"lora_rank": 0}, "--lora-rank is 0"),
        ({"kv_share": 1.5}, "--kv-share is 1.5"),
        ({"layers": 12}, "--layers and --hidden go together"),
        ({"layers": 0, "hidden": 8}, "--layers is 0"),
        ({"measure_hidden": 100}, "--measure-hidden is 100"),
        ({"measure": True, "optimizer": "lion"}, "--optimizer lion"),
        ({"measure": True, "frozen": "int4"}, "--frozen int4"),
        ({"measure": True, "gradients": "fp32"}, "--gradients other than --weights"),
        ({"measure": True, "master": False}, "--moments fp32"),
    ],
)
def test_bad_options_are_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        script.check(script.Args(**change))


def test_defaults_can_be_measured(transformers) -> None:
    script.check(script.Args(measure=True))
    script.check(script.Args(measure=True, master=False, moments="bf16"))


def measured(predicted: float, tensors: float, resident: float | None) -> Measured:
    return Measured("SFT", None, [], [], predicted, tensors, resident, None)


@pytest.mark.parametrize(
    ("found", "endings"),
    [
        ([measured(100, 100, 100), measured(100, 91, 92)], ["met", "met"]),
        ([measured(100, 100, 100), measured(100, 100, 120)], ["met", "MISSED"]),
        ([measured(100, 90, None)], ["MISSED"]),
        ([], []),
    ],
)
def test_verdicts(found: list[Measured], endings: list[str]) -> None:
    assert [line.split()[-1] for line in script.verdicts(found)] == endings


def test_the_script_end_to_end(tmp_path: Path, transformers, monkeypatch, capsys) -> None:
    monkeypatch.setattr(script, "MEASURED_METHODS", ("SFT",))
    args = script.Args(measure=True, measure_layers=4, measure_hidden=512, out=tmp_path)
    assert script.main(args) == 0
    printed = capsys.readouterr().out
    assert "2 weights + 2 gradients + 4 master + 8 moments = 16 bytes" in printed
    assert "measured tensors: largest difference 0.0%, target 10% or less: met" in printed
    summary = json.loads((tmp_path / "summary.json").read_text())
    totals = {(row["method"], row["lora_rank"]): row for row in summary["rows"]}
    assert len(totals) == 10
    assert totals["PPO", None]["total_gb"] == pytest.approx(252)
    assert totals["PPO", None]["total_gib"] == pytest.approx(252e9 / 2**30)
    assert totals["DPO", None]["total_gb"] == pytest.approx(126)
    full, lora = summary["measured"]
    assert (full["lora_rank"], lora["lora_rank"]) == (None, 16)
    for row in (full, lora):
        assert row["predicted_total"] == pytest.approx(row["measured_total"], rel=0.1)
    if full["resident"] is not None:  # a process of 600 MB: what libraries keep for themselves is small
        assert full["predicted_total"] == pytest.approx(full["resident"], rel=0.1)
        assert full["peak"] > full["resident"]
    assert (tmp_path / "memory_budget.png").stat().st_size > 30_000


def test_bad_options_are_one_line(tmp_path: Path, capsys) -> None:
    assert script.main(script.Args(params=0.0, out=tmp_path)) == 2
    assert capsys.readouterr().out.startswith("error: --params is 0.0") and not list(tmp_path.iterdir())


def test_without_measuring_nothing_optional_is_needed(tmp_path: Path) -> None:
    """As where the extra is not installed: the script never asks for it."""
    code = (
        "import sys; sys.modules['transformers'] = sys.modules['peft'] = None; import memory_budget as m; "
        f"from pathlib import Path; sys.exit(m.main(m.Args(out=Path({str(tmp_path)!r}))))"
    )
    folder = Path(script.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "memory_budget.png").exists()
