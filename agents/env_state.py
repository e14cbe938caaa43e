"""The whole state of an environment as bytes, put back into a fresh environment of the same kind.

An environment is a chain of layers: wrappers, the environment itself, and below a ``SyncVectorEnv``
one such chain per row. Its state is what the layers hold: random generators, ``TimeLimit``'s counter,
autoreset flags, positions and velocities. All layers go into one pickle, so objects that two layers
share are shared again afterwards; the layers themselves are not in it but are those of the fresh
environment.

Three kinds of attribute stay with the fresh environment: how it was made (``spec``, ``env_fns``), what
it draws with (windows and renderers), and functions. State hidden in the closure of a function is
therefore not saved. MuJoCo's ``MjData`` is copied in place, for the renderer shares it.

A pickle can run code when it is read: only read one from a run folder that this project wrote.
"""

from __future__ import annotations

import io
import pickle
import sys
from types import FunctionType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv

KEPT = frozenset({
    "spec", "_cached_spec", "env_fns", "mujoco_renderer", "viewer", "window", "screen", "screens",
    "surf", "clock", "isopen", "model", "data",
})  # fmt: skip


class UnsavableEnvironment(Exception):
    """The state of an environment cannot be saved or put back; the message says which part and why."""


def dump_environment(env: gym.Env | VectorEnv, beside: Any = None) -> bytes:
    """The state of ``env``, and of ``beside`` (anything that may share objects with it).

    Raises:
        UnsavableEnvironment: something in it cannot be pickled, such as another process
            (``AsyncVectorEnv``), an open file or an object of a C library.
    """
    layers = _layers(env)
    kinds = [_kind(layer) for layer in layers]
    states = [{k: v for k, v in vars(layer).items() if not _kept(layer, k, v)} for layer in layers]
    simulations = {i: pickle.dumps(layer.data) for i, layer in enumerate(layers) if _is_mujoco(layer)}
    try:
        return _dumps((kinds, states, simulations, beside), layers)
    except Exception as error:
        raise UnsavableEnvironment(_first_unsavable(kinds, states, layers, error)) from error


def load_environment(env: gym.Env | VectorEnv, saved: bytes) -> Any:
    """Put `dump_environment`'s state into ``env``, freshly made like the saved one; returns ``beside``.

    Nothing has changed if it raises.

    Raises:
        ValueError: the layers of ``env`` are others than those of the saved environment.
        UnsavableEnvironment: its MuJoCo model is another than that of a fresh environment.
    """
    layers = _layers(env)
    kinds, states, simulations, beside = _Unpickler(io.BytesIO(saved), layers).load()
    if kinds != [_kind(layer) for layer in layers]:
        raise ValueError(
            f"the saved state is that of an environment with the layers {kinds}; this one has "
            f"{[_kind(layer) for layer in layers]}. Make it with the same id, arguments and n_envs"
        )
    simulations = {i: _simulation(layers[i], data) for i, data in simulations.items()}
    for layer, state in zip(layers, states, strict=True):
        kept = {k: v for k, v in vars(layer).items() if _kept(layer, k, v)}
        vars(layer).clear()
        vars(layer).update(kept | state)
    for i, data in simulations.items():
        import mujoco

        mujoco.mj_copyData(layers[i].data, layers[i].model, data)
    return beside


def _layers(env: Any) -> list[Any]:
    """The environment, what it wraps, and so on down to every row; each object once."""
    found: list[Any] = []
    waiting = [env]
    while waiting:
        layer = waiting.pop()
        if any(layer is known for known in found):
            continue
        found.append(layer)
        for value in vars(layer).values():
            inner = value if isinstance(value, list | tuple) else [value]
            waiting.extend(x for x in inner if isinstance(x, gym.Env | VectorEnv))
    return found


def _kind(layer: Any) -> str:
    rows = f"[{layer.num_envs}]" if isinstance(layer, VectorEnv) else ""
    return f"{type(layer).__module__}.{type(layer).__qualname__}{rows}"


def _is_mujoco(layer: Any) -> bool:
    mujoco = sys.modules.get("mujoco")
    return mujoco is not None and isinstance(vars(layer).get("data"), mujoco.MjData)


def _simulation(layer: Any, saved: bytes) -> Any:
    """The saved ``MjData``, for a layer that has the same MuJoCo model."""
    import mujoco

    data = pickle.loads(saved)
    saved_model, model = (np.empty(mujoco.mj_sizeModel(m), np.uint8) for m in (data.model, layer.model))
    mujoco.mj_saveModel(data.model, None, saved_model)
    mujoco.mj_saveModel(layer.model, None, model)
    if not np.array_equal(saved_model, model):
        raise UnsavableEnvironment(
            f"the MuJoCo model of {_kind(layer)} was changed while it ran, or its file since then; "
            "a fresh environment cannot continue it"
        )
    return data


def _kept(layer: Any, name: str, value: Any) -> bool:
    """Whether an attribute stays with the fresh environment."""
    if name in ("model", "data"):
        return _is_mujoco(layer)
    return name in KEPT or isinstance(value, FunctionType)


def _dumps(value: Any, layers: list[Any]) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, layers).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Writes a layer as its number, and what a layer keeps as (number, attribute)."""

    def __init__(self, file: io.BytesIO, layers: list[Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._names: dict[int, Any] = {id(layer): number for number, layer in enumerate(layers)}
        for number, layer in enumerate(layers):
            for name, value in vars(layer).items():
                if _kept(layer, name, value) and not isinstance(value, int | str | type(None)):
                    self._names.setdefault(id(value), (number, name))

    def persistent_id(self, value: Any) -> Any:
        return self._names.get(id(value))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, layers: list[Any]) -> None:
        super().__init__(file)
        self._layers = layers

    def persistent_load(self, name: Any) -> Any:
        if isinstance(name, tuple):
            number, attribute = name
            return vars(self._layers[number])[attribute]
        return self._layers[name]


def _first_unsavable(
    kinds: list[str], states: list[dict[str, Any]], layers: list[Any], error: Exception
) -> str:
    for kind, state in zip(kinds, states, strict=True):
        for name, value in state.items():
            try:
                _dumps(value, layers)
            except Exception as reason:
                return f"{kind}.{name} ({type(value).__name__}) cannot be saved: {reason}"
    return f"the environment cannot be saved: {error}"
