"""One call of ``learn``: how far it is, what it writes, and how a stopped one goes on."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

from agents.checkpoint import checkpoints, restore_checkpoint, write_checkpoint
from agents.metrics import TrainingLog

CLIPPED_TOO_OFTEN = 0.3  # a clip fraction above which much of each rollout teaches nothing
UPDATES_IN_A_ROW = 5


class TrainingRun:
    """Progress, metrics and checkpoints of one ``learn`` call, used as a context manager.

    Args:
        agent: one of ours.
        total_timesteps: environment steps of this call.
        run_dir: folder for ``metrics.jsonl``, TensorBoard events and ``checkpoints/``; None: no files.
        progress_bar: show a bar with the current mean return.
        checkpoint_every: environment steps between two checkpoints; there is one at the start and one
            at the end too. None: none at all.
        resume: first put the newest checkpoint of ``run_dir`` into the agent and its environment, both
            freshly made, and cut the metrics behind it. Without a checkpoint the call starts afresh.

    Raises:
        ValueError: checkpoints without a folder; a folder with later checkpoints, without ``resume``;
            a checkpoint of another call or agent.
    """

    def __init__(
        self,
        agent: Any,
        total_timesteps: int,
        run_dir: str | Path | None = None,
        progress_bar: bool = False,
        checkpoint_every: int | None = None,
        resume: bool = False,
    ) -> None:
        if run_dir is None and (resume or checkpoint_every is not None):
            raise ValueError("resume and checkpoint_every need a folder: pass run_dir=")
        if checkpoint_every is not None and checkpoint_every < 1:
            raise ValueError(f"checkpoint_every={checkpoint_every!r} must be >= 1, or None")
        self.agent, self.total, self.run_dir = agent, total_timesteps, run_dir
        self.checkpoint_every = checkpoint_every
        self.start = agent.num_timesteps
        self.exact = True  # False once a resume could not restore the environment
        self._warned = False
        self._clipped_updates = 0  # in a row, those that clipped too often
        if resume:
            self._restore()
        elif checkpoint_every is not None and run_dir is not None:
            self._refuse_later_checkpoints(run_dir)
        self._saved_at = agent.num_timesteps
        self._log = TrainingLog(
            total_timesteps, run_dir, progress_bar, done=agent.num_timesteps - self.start,
            resume_at=agent.num_timesteps if resume else None,
        )

    @property
    def steps_left(self) -> int:
        return self.total - (self.agent.num_timesteps - self.start)

    @property
    def progress_remaining(self) -> float:
        """1 at the start of the call, 0 at its end: what schedules are functions of."""
        return max(0.0, 1.0 - (self.agent.num_timesteps - self.start) / self.total)

    def __enter__(self) -> TrainingRun:
        if self.checkpoint_every is not None:
            self._checkpoint()  # tells at once, not hours later, whether the environment can be saved
        self._log.__enter__()
        return self

    def record(self, metrics: dict[str, float]) -> None:
        """Write the metrics of one iteration, and a checkpoint when one is due.

        Warns once a call when ``train/clip_fraction`` has stayed above 0.3 for five updates.
        """
        self._watch_clipping(metrics)
        step = self.agent.num_timesteps
        self._log.write(step, step - self.start, metrics)
        if self.checkpoint_every is not None and step - self._saved_at >= self.checkpoint_every:
            self._checkpoint()

    def _watch_clipping(self, metrics: dict[str, float]) -> None:
        fraction = metrics.get("train/clip_fraction", 0.0)
        if self._clipped_updates == UPDATES_IN_A_ROW:
            return  # it has been said
        self._clipped_updates = self._clipped_updates + 1 if fraction > CLIPPED_TOO_OFTEN else 0
        if self._clipped_updates == UPDATES_IN_A_ROW:
            warnings.warn(
                f"train/clip_fraction has been above {CLIPPED_TOO_OFTEN} for {UPDATES_IN_A_ROW} updates in a "
                f"row (now {fraction:.2f}): the policy moves so far in an update that the clip range takes "
                "the gradient from many samples; lower learning_rate, or take fewer steps per rollout "
                "(n_epochs or num_iterations, or a larger batch_size)",
                stacklevel=4,
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An iteration that broke off is in no state to be saved: the last checkpoint stands.
        if kind is None and self.checkpoint_every is not None:
            self._checkpoint()
        self._log.__exit__(kind, error, trace)

    def _checkpoint(self) -> None:
        assert self.run_dir is not None
        call = {"start": self.start, "total": self.total, "exact": self.exact}
        reason = write_checkpoint(self.run_dir, self.agent, call)
        self._saved_at = self.agent.num_timesteps
        if reason is not None and not self._warned:
            self._warned = True
            warnings.warn(f"checkpoints of this run will not resume exactly: {reason}", stacklevel=4)

    def _restore(self) -> None:
        assert self.run_dir is not None
        call = restore_checkpoint(self.run_dir, self.agent)
        if call is None:
            return
        if call["total"] != self.total:
            raise ValueError(
                f"total_timesteps={self.total}, but {self.run_dir} is a call of {call['total']}: its "
                "schedules would change; resume with the same number, then call learn again for more"
            )
        self.start, self.exact = call["start"], call["exact"]

    def _refuse_later_checkpoints(self, run_dir: str | Path) -> None:
        later = [p for p in checkpoints(run_dir) if int(p.stem) > self.agent.num_timesteps]
        if later:
            raise ValueError(
                f"{run_dir} holds a run with checkpoints up to step {int(later[0].stem)}; pass "
                "resume=True to continue it, or another run_dir"
            )
