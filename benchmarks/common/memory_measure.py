"""What real models on this machine allocate: GPT-2 from its configuration, trained for a step on the CPU.

Each case runs in a process of its own, so that its resident memory is nobody else's. It builds the models
of a method, makes two training steps, and then counts the storage of every parameter, gradient, master
copy and optimiser state, and how far the process has grown.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import sys
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.memory_model import METHODS, Model, Part, Precision, budget, total

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd": (torch.optim.SGD, {}),
}
# GRPO with a verifier holds the same models as DPO.
MEASURED_METHODS = ("SFT", "DPO", "GRPO, reward model", "PPO")
BATCH = (2, 32)  # sequences, tokens: enough for every parameter to have a gradient
POSITIONS = 64
# What a process would import first; the last four, because it imports the script and what that needs.
PRELOADED = [
    "transformers.models.gpt2.modeling_gpt2", "peft", "agents.files", "matplotlib.pyplot", "scipy.stats",
    "tyro",
]  # fmt: skip


@dataclass(frozen=True)
class Size:
    """A GPT-2; the defaults are those of the smallest published one, but for the length of its context."""

    layers: int = 12
    hidden: int = 768
    vocabulary: int = 50_257

    def model(self) -> Model:
        """Its number of parameters, counted by hand: the output layer is the embedding.

        A layer has ``4 h^2 + 4 h`` in attention, ``8 h^2 + 5 h`` in the feed-forward part and ``4 h`` in two
        norms; round it are the embeddings of tokens and positions and a last norm.
        """
        h = self.hidden
        params = (self.vocabulary + POSITIONS) * h + self.layers * (12 * h**2 + 13 * h) + 2 * h
        return Model(params, self.layers, h)


@dataclass(frozen=True)
class Case:
    """One method on a small model; `lora_rank` as in `common.memory_model.budget`."""

    method: str
    size: Size
    precision: Precision
    lora_rank: int | None = None


@dataclass(frozen=True)
class Measured:
    """Bytes that were allocated, by role and kind, beside what was predicted.

    ==============  ==============================================================================
    parts           storage of tensors that exist after a step
    resident        growth of the process from before the models to after a step; None off Linux
    peak            growth to the most it ever was, with activations and temporary buffers
    ==============  ==============================================================================
    """

    method: str
    lora_rank: int | None
    predicted: list[Part]
    parts: list[Part]
    predicted_total: float
    measured_total: float
    resident: float | None
    peak: float | None

    @property
    def error(self) -> float:
        """``predicted / measured - 1``, of the tensors."""
        return self.predicted_total / self.measured_total - 1

    @property
    def resident_error(self) -> float | None:
        """The same of the growth of the process."""
        return None if self.resident is None else self.predicted_total / self.resident - 1


def unmeasurable(precision: Precision) -> str | None:
    """Why these formats have no real counterpart here; None where they have."""
    for name in ("weights", "gradients", "moments", "frozen"):
        if getattr(precision, name) not in DTYPES:
            return f"--{name} {getattr(precision, name)}: measured are {', '.join(DTYPES)}"
    if precision.optimizer not in OPTIMIZERS:
        return f"--optimizer {precision.optimizer}: measured are {', '.join(OPTIMIZERS)}"
    if precision.gradients != precision.weights:
        return "--gradients other than --weights: torch's gradients have the type of their weights"
    state = "fp32" if precision.master else precision.weights
    if precision.moments != state:
        return f"--moments {precision.moments}: torch's have the type of the weights they update, {state}"
    return None


class Optimizer:
    """A torch optimiser on float32 masters of weights that are in less, or on the weights themselves."""

    def __init__(self, parameters: Sequence[nn.Parameter], name: str, master: bool) -> None:
        kind, settings = OPTIMIZERS[name]
        self.parameters = list(parameters)
        self.masters = [
            p.detach().float().requires_grad_() if master and p.dtype != torch.float32 else p
            for p in self.parameters
        ]
        # One for each tensor, so that only one float32 gradient exists at a time.
        self.optimizers = [kind([m], lr=1e-4, **settings) for m in self.masters]

    def step(self) -> None:
        for parameter, master, optimizer in zip(self.parameters, self.masters, self.optimizers, strict=True):
            if master is parameter:
                optimizer.step()
                continue
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            optimizer.step()
            master.grad = None
            with torch.no_grad():
                parameter.copy_(master)

    def state(self) -> list[Tensor]:
        """Moments and counters."""
        values = [v for o in self.optimizers for state in o.state.values() for v in state.values()]
        return [value for value in values if isinstance(value, Tensor)]


def storage_bytes(tensors: Iterable[Tensor]) -> float:
    """Bytes of the storages of these tensors; what several share counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return float(sum(storages.values()))


def build_model(role: str, size: Size, dtype: torch.dtype) -> nn.Module:
    """A GPT-2 with an output layer for words (policy, reference), a value per token or per text."""
    import transformers  # here, because it is an optional dependency

    config = transformers.GPT2Config(
        n_layer=size.layers, n_embd=size.hidden, n_head=max(1, size.hidden // 64), n_positions=POSITIONS,
        vocab_size=size.vocabulary, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    config.num_labels = 1
    kinds = {
        "policy": transformers.AutoModelForCausalLM,
        "reference": transformers.AutoModelForCausalLM,
        "value": transformers.AutoModelForTokenClassification,
        "reward": transformers.AutoModelForSequenceClassification,
    }
    # In its type from the start: a copy in float32 would be the peak of the process.
    return kinds[role].from_config(config, dtype=dtype)


def add_adapters(model: nn.Module, role: str, rank: int) -> nn.Module:
    """The model frozen under LoRA adapters on its attention's input matrices; a value head is trained."""
    import peft

    config = peft.LoraConfig(
        r=rank, target_modules=["c_attn"], fan_in_fan_out=True,
        modules_to_save=["classifier"] if role == "value" else None,
    )  # fmt: skip
    return peft.get_peft_model(model, config)


def build(case: Case) -> dict[str, nn.Module]:
    """The models of a case by role. With LoRA the reference is the policy, its adapters switched off."""
    models: dict[str, nn.Module] = {}
    for role, is_trained in METHODS[case.method].items():
        lora = case.lora_rank is not None
        if role == "reference" and lora:
            continue
        dtype = DTYPES[case.precision.weights if is_trained and not lora else case.precision.frozen]
        model = build_model(role, case.size, dtype)
        if not is_trained:
            model.requires_grad_(False)
        elif case.lora_rank is not None:
            model = add_adapters(model, role, case.lora_rank)
        models[role] = model
    return models


def make_optimizers(models: dict[str, nn.Module], precision: Precision) -> dict[str, Optimizer]:
    """An optimiser for each model that is trained, by role."""
    parameters = {role: [p for p in m.parameters() if p.requires_grad] for role, m in models.items()}
    return {
        role: Optimizer(trained, precision.optimizer, precision.master)
        for role, trained in parameters.items()
        if trained
    }


def training_step(models: dict[str, nn.Module], optimizers: dict[str, Optimizer], size: Size) -> None:
    """Forward all models, backward the trained ones, and update these.

    What the losses are does not matter to what is counted; that they reach every trained parameter does.
    """
    tokens = torch.randint(1, size.vocabulary, BATCH, generator=torch.Generator().manual_seed(0))
    for role, model in models.items():
        if role not in optimizers:
            with torch.no_grad():
                model(tokens)
            continue
        model.zero_grad()
        if role == "policy":
            logits = model(tokens).logits[:, :-1].float()
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        else:
            model(tokens).logits.float().square().mean().backward()
        optimizers[role].step()


def measure(case: Case) -> Measured:
    """Build, train and count a case in this process."""
    torch.set_num_threads(1)
    # peft asks transformers for something under its old name.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    warm_up(case)
    before = resident_bytes()
    models = build(case)
    optimizers = make_optimizers(models, case.precision)
    for _ in range(2):
        training_step(models, optimizers, case.size)
    after, peak = resident_bytes(), peak_bytes()
    parts = [count(role, models.get(role), optimizers.get(role)) for role in METHODS[case.method]]
    predicted = budget(case.method, case.size.model(), case.precision, case.lora_rank)
    return Measured(
        case.method, case.lora_rank, predicted, parts, total(predicted), total(parts),
        None if before is None or after is None else after - before,
        None if before is None or peak is None else peak - before,
    )  # fmt: skip


def count(role: str, model: nn.Module | None, optimizer: Optimizer | None) -> Part:
    """Bytes that exist now; None: the role has no model, or no optimiser, of its own."""
    if model is None:
        return Part(role, 0.0, 0.0, 0.0, 0.0)
    masters = [] if optimizer is None else [
        m for m, p in zip(optimizer.masters, optimizer.parameters, strict=True) if m is not p
    ]  # fmt: skip
    return Part(
        role,
        weights=storage_bytes([*model.parameters(), *model.buffers()]),
        gradients=storage_bytes(p.grad for p in model.parameters() if p.grad is not None),
        master=storage_bytes(masters),
        moments=storage_bytes([] if optimizer is None else optimizer.state()),
    )


def warm_up(case: Case) -> None:
    """A step of the same case on a tiny model: what libraries load at their first use is no model's."""
    tiny = Size(layers=1, hidden=64, vocabulary=100)
    models = build(Case(case.method, tiny, case.precision, case.lora_rank))
    training_step(models, make_optimizers(models, case.precision), tiny)


def resident_bytes() -> float | None:
    """Physical memory of this process, with all that was freed given back; None off Linux."""
    gc.collect()
    if sys.platform != "linux":
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's only
    if trim is not None:
        trim(0)
    return status_bytes("VmRSS")


def peak_bytes() -> float | None:
    """The most physical memory this process ever had; None off Linux."""
    return status_bytes("VmHWM") if sys.platform == "linux" else None


def status_bytes(field: str) -> float:
    """A size from the kernel's record of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return float(line.split()[1]) * 1024  # the kernel's kB are KiB
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure_all(cases: Sequence[Case]) -> list[Measured]:
    """Every case in a fresh process, one after the other."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return list(pool.map(measure, cases))
