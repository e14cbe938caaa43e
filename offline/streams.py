"""Random states that belong to one agent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Stream:
    """A state of torch's global generators that belongs to one agent.

    d3rlpy draws from the global generators. While `active`, they are in this state; before and after it
    they are everybody else's.
    """

    def __init__(self, seed: int, device: str) -> None:
        self._cuda = device if device.startswith("cuda") else None
        self.states = [torch.Generator().manual_seed(seed).get_state()]
        if self._cuda:
            self.states.append(torch.Generator(self._cuda).manual_seed(seed).get_state())

    @contextmanager
    def active(self) -> Iterator[None]:
        before = self._get()
        self._set(self.states)
        try:
            yield
        finally:
            self.states = self._get()
            self._set(before)

    def load(self, states: list[Tensor]) -> None:
        """Take saved states; a GPU's are kept as they are where none were saved, and left out on a CPU."""
        self.states = [*states, *self.states[len(states) :]][: len(self.states)]

    def _get(self) -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(self._cuda)] if self._cuda else [])]

    def _set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._cuda:
            torch.cuda.set_rng_state(states[1], self._cuda)
