"""Files of offline agents: tensors and plain data, read without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from agents.files import replace_file

FORMAT = "llmgym offline agent 1"


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write `OfflineAgent.state_dict` atomically."""
    with replace_file(path, "wb") as file:
        torch.save(state, file)


def read_state(path: str | Path) -> dict[str, Any]:
    """Read what `write_state` wrote; nothing in the file is executed.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no such file.
    """
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(
            f"{path} is not a saved offline agent: {error}; a file of d3rlpy's own is read by load_d3rlpy"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a saved offline agent ({FORMAT!r})")
    return state
