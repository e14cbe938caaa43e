"""Bytes of weights, gradients and optimiser state that post-training a language model needs.

One rule: a trained parameter costs its weight, its gradient, a float32 master copy where the weight is in
less than that, and the moments of its optimiser; a frozen one costs its weight. With bf16 weights and
gradients, fp32 master weights and Adam's two fp32 moments that is 2 + 2 + 4 + 4 + 4 = 16 bytes a trained
parameter (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
section 3.1) and 2 a frozen one.

What is *not* counted: activations, temporary buffers, the KV cache of rollouts (see `kv_cache_bytes`),
fragmentation, and copies for sharding or an inference engine.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0, "int4": 0.5}
"""A number in each format; of the quantised ones without their scales."""

MOMENTS = {"adamw": 2, "lion": 1, "momentum": 1, "sgd": 0}
"""Numbers of optimiser state per trained parameter; "momentum" is SGD with it."""

KINDS = ("weights", "gradients", "master", "moments")
ROLES = ("policy", "value", "reward", "reference")

METHODS: dict[str, dict[str, bool]] = {
    "SFT": {"policy": True},
    "DPO": {"policy": True, "reference": False},
    "GRPO, verifier": {"policy": True, "reference": False},
    "GRPO, reward model": {"policy": True, "reward": False, "reference": False},
    "PPO": {"policy": True, "value": True, "reward": False, "reference": False},
}
"""The models each method holds at once, and whether they are trained. GRPO's reference is there for its KL:
with beta 0 there is none, which makes it the memory of SFT (and that of a reward model)."""


@dataclass(frozen=True)
class Model:
    """A decoder: number of parameters, layers, hidden size, and key/value heads over all heads."""

    params: float
    layers: int
    hidden: int
    kv_share: float = 1.0

    @classmethod
    def of_size(cls, params: float, kv_share: float = 1.0) -> Model:
        """A usual shape for that many parameters: ``12 layers hidden^2`` with ``hidden = 128 layers``.

        Rounded down, because embeddings are not in that count. 7B gives 32 layers of 4096, 13B 40 of 5120.
        """
        layers = max(1, int((params / (12 * 128**2)) ** (1 / 3)))
        return cls(params, layers, 128 * layers, kv_share)

    def lora_params(self, rank: int) -> float:
        """Parameters of LoRA adapters on every layer's query and value projections.

        Each adapter of a matrix [out, in] has ``rank * (in + out)``. (GPT-2's one matrix for query, key and
        value has as many as the two.) Source: Hu et al., "LoRA" (2021), section 4.2.
        """
        query, value = 2 * self.hidden, self.hidden * (1 + self.kv_share)
        return self.layers * rank * (query + value)


@dataclass(frozen=True)
class Precision:
    """Formats of numbers, and the optimiser.

    ==========  ==================================================================================
    weights     of trained models, as they are used in the forward pass
    gradients   of these
    master      a float32 copy of trained weights that are in less; False: the optimiser works on these
    moments     of the optimiser's state
    frozen      of models that are not trained, and of what lies beneath LoRA adapters
    optimizer   a key of `MOMENTS`
    ==========  ==================================================================================
    """

    weights: str = "bf16"
    gradients: str = "bf16"
    master: bool = True
    moments: str = "fp32"
    frozen: str = "bf16"
    optimizer: str = "adamw"


@dataclass(frozen=True)
class Part:
    """Bytes of one model in its role."""

    role: str
    weights: float
    gradients: float
    master: float
    moments: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master + self.moments


def trained(role: str, params: float, precision: Precision) -> Part:
    """A model of which every parameter is trained."""
    return Part(
        role,
        weights=params * BYTES[precision.weights],
        gradients=params * BYTES[precision.gradients],
        master=params * BYTES["fp32"] if precision.master and precision.weights != "fp32" else 0.0,
        moments=params * BYTES[precision.moments] * MOMENTS[precision.optimizer],
    )


def adapted(role: str, params: float, adapters: float, precision: Precision) -> Part:
    """A frozen model under trained adapters. These are in float32, as peft keeps them: no master copy."""
    return Part(
        role,
        weights=params * BYTES[precision.frozen] + adapters * BYTES["fp32"],
        gradients=adapters * BYTES["fp32"],
        master=0.0,
        moments=adapters * BYTES[precision.moments] * MOMENTS[precision.optimizer],
    )


def budget(method: str, model: Model, precision: Precision, lora_rank: int | None = None) -> list[Part]:
    """The models of a method, each of the size of `model`.

    Args:
        method: a key of `METHODS`.
        lora_rank: trained models are frozen under adapters of that rank, and the reference is the policy
            with its adapters switched off, so it costs nothing; None: every parameter is trained.
    """
    parts = []
    for role, is_trained in METHODS[method].items():
        if is_trained and lora_rank is not None:
            parts.append(adapted(role, model.params, model.lora_params(lora_rank), precision))
        elif is_trained:
            parts.append(trained(role, model.params, precision))
        elif role == "reference" and lora_rank is not None:
            parts.append(Part(role, 0.0, 0.0, 0.0, 0.0))
        else:
            parts.append(Part(role, model.params * BYTES[precision.frozen], 0.0, 0.0, 0.0))
    return parts


def total(parts: list[Part]) -> float:
    """Bytes of all models."""
    return sum(part.total for part in parts)


def kv_cache_bytes(model: Model, sequences: int, tokens: int, number_format: str) -> float:
    """Keys and values of every layer for that many tokens of that many sequences: an upper estimate.

    ``2 * layers * hidden * kv_share`` numbers a token; a cache in pages holds less while sequences are
    shorter than `tokens`.
    """
    numbers = 2 * model.layers * model.hidden * model.kv_share
    return numbers * BYTES[number_format] * sequences * tokens
