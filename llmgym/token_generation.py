"""The environments of `TokenGeneration-v0`, scalar and vector, over one batched transition."""

from typing import Any

import numpy as np
from gymnasium.error import ResetNeeded

from llmgym.checks import check_count
from llmgym.scalar import BatchOfOneEnv
from llmgym.token_tasks import TokenTask
from llmgym.token_transition import Mask, TokenGenerationTransition
from llmgym.vector import AutoresetMode, BatchVectorEnv

RENDER_MODES = ["ansi"]
RENDER_FPS = 10


def _check_render_mode(render_mode: str | None) -> str | None:
    # A TypeError, because SB3's make_vec_env asks for "rgb_array" and goes without if it gets one.
    if render_mode is not None and render_mode not in RENDER_MODES:
        raise TypeError(f"render_mode: got {render_mode!r}; allowed: 'ansi' or None")
    return render_mode


class TokenGenerationEnv(BatchOfOneEnv):
    """Answer a prompt token by token: a language model's view, with a known optimum.

    The token-level view of language-model post-training: a response is an episode, a token an
    action. The default task (`llmgym.syllable_task.syllable_task`) has an n-gram model as its
    reference and a finite automaton as its reward, so that the policy which maximises reward less
    ``beta * KL(policy || reference)`` is known exactly (`llmgym.token_solution`). Any other prompts
    and reward function make a `TokenTask` too.

    ## Observation space
    ``Box(0, V, (L,), int64)``: the prompt, the response so far, and the padding id V behind them.
    V is the size of the vocabulary and L the longest prompt with its longest response; the filled
    length is ``(observation != V).sum()``. The default task has V = 20 and L = 25. The final
    observation holds the last action too. The length of the prompt is known to who knows the
    prompts; where none begins another, the observation tells the time that is left.

    ## Action space
    ``Discrete(V)``: the next token, among them end-of-sequence. Every token is allowed at all
    times; ``action_masks()`` and the info say so to those that ask.

    ## Rewards
    The total of the task's reward function, paid with the last token; or, where the task has
    ``reward_at="token"``, with each token what it adds to the total. No KL penalty is included;
    that belongs to the agent, which finds the reference in ``ref_logp``.

    ## Starting state
    A prompt drawn uniformly, or the one given by ``reset(options={"task_id": k})``, k from 0 to
    P - 1. A choice of task holds for that episode only.

    ## Episode end
    The episode terminates with end-of-sequence, or with the last token that the task allows
    (``max_new_tokens``, or less where its ``context_length`` leaves less). An end-of-sequence at
    the last allowed place counts as end-of-sequence. The episode never truncates: the limit is
    part of the task, and nothing is to be expected beyond it.

    ## Information
    | key | from | type | meaning |
    |---|---|---|---|
    | ``task_id`` | reset, step | int | number of the prompt |
    | ``action_mask`` | reset, step | int8 [V] | 1 for each allowed token, which all are; read-only |
    | ``ref_logp`` | step | float | log-probability of the action under the task's reference, in nats; absent where it has none |
    | ``stop_reason`` | last step | str | "eos" or "length" |
    | ``response_length`` | last step | int | tokens of the response, end-of-sequence included |
    | ``status`` | last step | str | "scored", "unparsed", "timed_out" or "error", as the reward function says |
    | ``reward/NAME`` | last step | float | each component of the reward |

    ## Attributes
    ``task``, the `TokenTask`.

    ## Arguments
    | argument | default | meaning |
    |---|---|---|
    | ``task`` | None | a `TokenTask`; None is `llmgym.syllable_task.syllable_task()` |
    | ``render_mode`` | None | "ansi": ``render()`` returns prompt and response as text |

    The vector environment takes ``autoreset_mode`` as well, see `TokenGenerationVectorEnv`.

    ## Errors
    A reward function that raises, or returns a number that is not finite or an array of another
    length, is a `llmgym.token_rewards.RewardError` of ``step`` which names row, task and response;
    it is never a reward of zero. The tokens of that step are taken back.

    ## Example
    ```python
    import gymnasium as gym

    env = gym.make("llmgym:TokenGeneration-v0", render_mode="ansi")
    observation, info = env.reset(seed=0)
    terminated = False
    while not terminated:
        observation, reward, terminated, _, info = env.step(env.action_space.sample())
    print(env.render(), reward, info["stop_reason"])
    ```

    A task of one's own, which pays for even digits and says so if there is none to judge:
    ```python
    import gymnasium as gym
    import numpy as np
    from llmgym.token_rewards import Responses, Scores
    from llmgym.token_tasks import Alphabet, TokenTask

    digits = Alphabet("0123456789.")

    def even_digits(responses: Responses) -> Scores:
        is_digit = responses.tokens < 10
        even = (is_digit & (responses.tokens % 2 == 0)).sum(axis=1)
        status = np.where(is_digit.any(axis=1), "scored", "unparsed")
        return Scores(even, {"even": even, "digits": is_digit.sum(axis=1)}, status)

    task = TokenTask(
        prompts=[digits.encode("12"), digits.encode("345")],
        vocab_size=11, eos_id=10, max_new_tokens=8, reward=even_digits, decode=digits,
    )
    envs = gym.make_vec("llmgym:TokenGeneration-v0", num_envs=4, task=task)
    ```

    ## Version history
    * v0: initial version.
    """  # noqa: E501 (a table row cannot be wrapped)

    metadata = {"render_modes": RENDER_MODES, "render_fps": RENDER_FPS}

    def __init__(self, task: TokenTask | None = None, render_mode: str | None = None) -> None:
        self._tokens = TokenGenerationTransition(1, task)
        super().__init__(self._tokens)
        self.task = self._tokens.task
        self.render_mode = _check_render_mode(render_mode)

    def action_masks(self) -> Mask:
        """The allowed actions, int8 [V], all 1 and read-only; the name is sb3-contrib's."""
        return np.asarray(self._tokens.action_masks(1)[0])

    def render(self) -> Any:
        """Prompt and response so far as text; None without a render mode."""
        if self.render_mode is None:
            return None
        if self._needs_reset.startswith("step() before"):
            raise ResetNeeded("render() before reset(): call reset() first")
        return self._tokens.render_row(0)


class TokenGenerationVectorEnv(BatchVectorEnv):
    """`TokenGenerationEnv` for a batch of rows; what ``gym.make_vec("TokenGeneration-v0")`` makes.

    Observations are int64 [N, L], actions integers [N]. ``options["task_id"]`` is one integer for
    all rows or integers [N], which is how a group of responses shares a prompt. Info values are
    arrays [N] with masks ``_key``; ``action_mask`` is [N, V], a read-only view of one row.

    Args:
        num_envs: number of rows N.
        task, render_mode: as for `TokenGenerationEnv`; ``render()`` returns a tuple of N texts.
        autoreset_mode: "next_step" (the default), "same_step", "disabled" or an `AutoresetMode`.
            Disabled is how a batch of responses is collected: a finished row waits for the others.
    """

    def __init__(
        self,
        num_envs: int = 1,
        task: TokenTask | None = None,
        render_mode: str | None = None,
        autoreset_mode: AutoresetMode | str = "next_step",
    ) -> None:
        num_envs = check_count("num_envs", num_envs)
        self._tokens = TokenGenerationTransition(num_envs, task)
        super().__init__(self._tokens, num_envs, autoreset_mode)
        self.metadata |= {"render_modes": RENDER_MODES, "render_fps": RENDER_FPS}
        self.task = self._tokens.task
        self.render_mode = _check_render_mode(render_mode)

    def action_masks(self) -> Mask:
        """The allowed actions, int8 [N, V], all 1 and read-only; the name is sb3-contrib's."""
        return self._tokens.action_masks(self.num_envs)

    def render(self) -> Any:
        """Prompt and response so far of each row, a tuple of texts; None without a render mode."""
        if self.render_mode is None:
            return None
        if not self._started:
            raise ResetNeeded("render() before reset(): call reset() first")
        return tuple(self._tokens.render_row(row) for row in range(self.num_envs))
