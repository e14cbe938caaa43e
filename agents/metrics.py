"""The names of the metrics, what they mean, and where they are written.

`METRICS` is the one page of definitions, the same for every agent. A name that is not on it cannot be
logged, so the page is complete.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agents.files import cut_lines

METRICS: dict[str, str] = {
    "time/total_timesteps": "environment steps executed so far (reset steps do not count)",
    "rollout/ep_rew_mean": "mean undiscounted return of the last 100 episodes, without any KL penalty",
    "rollout/ep_len_mean": "mean length of the last 100 episodes, in steps",
    "train/learning_rate": "learning rate of this update",
    "train/clip_range": "clip range of this update",
    "train/n_updates": "optimiser steps taken so far",
    "train/loss": "total loss, mean over the samples of this update",
    "train/policy_gradient_loss": "policy loss (clipped surrogate or policy gradient), mean over samples",
    "train/value_loss": "squared error of the critic against its target, mean over samples",
    "train/entropy": "entropy of the policy in nats, mean over samples",
    "train/approx_kl": "KL(old policy || current policy), estimator k3, mean over the update's samples",
    "train/clip_fraction": "share of samples whose probability ratio lies outside the clip range "
    "(grouped agents: whose gradient the clip stops)",
    "train/explained_variance": "1 - Var[return - value] / Var[return]; 1 is a perfect critic",
    "train/grad_norm": "norm of the gradient before it is clipped, mean over optimiser steps",
    "train/early_stop": "1 if target_kl ended this update before its last minibatch, else 0",
    "train/kl_ref": "KL(policy || reference) per step, estimator k1 on the sampled actions",
    "train/kl_loss": "the KL term in the loss before its factor beta, mean over samples",
    "train/clip_fraction_low": "share of steps below the clip range whose gradient the clip stops",
    "train/clip_fraction_high": "share of steps above the clip range whose gradient the clip stops",
    "group/reward_mean": "mean return of this rollout's episodes, without any KL penalty",
    "group/reward_std": "population deviation of the returns within a group, mean over groups",
    "group/no_signal": "share of groups whose returns are all equal",
    "group/length_mean": "mean length of this rollout's episodes, in steps",
    "group/cut": "share of this rollout's episodes that a limit ended (length or time)",
    "group/pass_rate": "share of this rollout's episodes that the environment calls correct",
    "group/greedy_reward": "mean return of the greedy episodes (ReMax's baseline)",
    "sft/loss": "cross-entropy of the response tokens in nats, mean over tokens",
    "rm/loss": "Bradley-Terry loss of the reward model, mean over pairs",
    "rm/margin": "score of the chosen answer less that of the rejected one, mean over pairs",
    "rm/accuracy": "share of pairs whose better answer has the higher score; a tie counts half",
    "dpo/loss": "preference loss of the policy, mean over pairs",
    "dpo/chosen_logratio": "log pi - log ref of the chosen answer, summed over tokens, mean over pairs",
    "dpo/rejected_logratio": "log pi - log ref of the rejected answer, summed over tokens, mean over pairs",
    "dpo/margin": "beta times the difference of these log-ratios, mean over pairs",
    "dpo/accuracy": "share of pairs whose better answer has the higher log-ratio; a tie counts half",
}


def describe() -> str:
    """The definitions as a plain-text table, one metric a line."""
    width = max(map(len, METRICS))
    return "\n".join(f"{name:<{width}}  {meaning}" for name, meaning in METRICS.items())


class TrainingLog:
    """Writes metrics as JSON lines and TensorBoard events, and shows a progress bar.

    Used as a context manager. Without a run directory and without a bar it does nothing.

    Args:
        total_timesteps: length of the bar.
        run_dir: folder for ``metrics.jsonl`` and the event file; made if missing. None writes nothing.
        progress_bar: show a bar with the current mean return, or loss where there are no episodes.
        done: of these steps, those that were taken before a resume (where the bar starts).
        resume_at: step in the life of the agent behind which the folder's metrics are dropped: they
            belong to work that a stopped run lost and that is done again. None drops nothing.
    """

    def __init__(
        self,
        total_timesteps: int,
        run_dir: str | Path | None,
        progress_bar: bool,
        done: int = 0,
        resume_at: int | None = None,
    ) -> None:
        self._lines = self._events = None
        if run_dir is not None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import: only when needed

            directory = Path(run_dir)
            directory.mkdir(parents=True, exist_ok=True)
            if resume_at is not None:
                cut_lines(directory / "metrics.jsonl", resume_at)
            self._lines = (directory / "metrics.jsonl").open("a", encoding="utf-8")
            purge_step = None if resume_at is None else resume_at + 1
            self._events = SummaryWriter(str(directory), purge_step=purge_step)
        self._bar = Progress(
            TextColumn("[progress.description]{task.description}"), BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} steps"), TimeElapsedColumn(),
            TimeRemainingColumn(), disable=not progress_bar,
        )
        self._task = self._bar.add_task("training", total=total_timesteps, completed=done)

    def __enter__(self) -> TrainingLog:
        self._bar.start()
        return self

    def write(self, step: int, completed: int, metrics: dict[str, float]) -> None:
        """Record the metrics of one iteration.

        Args:
            step: environment steps in the life of the agent, the horizontal axis.
            completed: of them, those of this call: the position of the bar.
            metrics: values by name; every name must be in `METRICS`.

        Raises:
            KeyError: a name is not in `METRICS`.
        """
        unknown = sorted(set(metrics) - set(METRICS))
        if unknown:
            raise KeyError(f"metrics {unknown} are not described in agents.metrics.METRICS")
        self.write_foreign(step, completed, metrics)

    def write_foreign(self, step: int, completed: int, metrics: dict[str, float]) -> None:
        """`write` for the metrics of another library, which has its own names for them."""
        if self._lines is not None and self._events is not None:
            # JSON has neither NaN (no episode has ended yet) nor infinity (the KL of an unclipped ratio
            # that overflowed): both are null.
            clean = {k: (v if math.isfinite(v) else None) for k, v in metrics.items()}
            self._lines.write(json.dumps({"step": step, **clean}) + "\n")
            self._lines.flush()
            for name, value in metrics.items():
                if math.isfinite(value):
                    self._events.add_scalar(name, value, step)
        shown = {"return": "rollout/ep_rew_mean"} | {name: f"{name}/loss" for name in ("sft", "rm", "dpo")}
        label, mean = next(
            ((label, metrics[key]) for label, key in shown.items() if key in metrics), ("return", math.nan)
        )
        self._bar.update(self._task, completed=completed, description=f"{label} {mean:8.3f}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if self._lines is not None and self._events is not None:
            self._lines.close()
            self._events.close()
