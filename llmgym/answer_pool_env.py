"""The environments of `AnswerPool-v0`, scalar and vector, over one batched transition."""

import numpy as np
from gymnasium.spaces import Discrete

from llmgym.answer_pool import REWARDS, AnswerPool, FloatArray
from llmgym.checks import check_count, check_name
from llmgym.row_random import IntArray, RowRandom
from llmgym.scalar import BatchOfOneEnv
from llmgym.transition import BoolArray, RowInfo
from llmgym.vector import AutoresetMode, BatchVectorEnv


class AnswerPoolTransition:
    """A `BatchedTransition`: each row shows a prompt, takes an answer, pays, and ends.

    Raises:
        TypeError: `pool` is no AnswerPool.
        ValueError: an unknown reward, or a noise that is negative or not finite.
    """

    def __init__(self, num_rows: int, pool: AnswerPool | None, reward: str, noise: float) -> None:
        pool = AnswerPool.default() if pool is None else pool
        if not isinstance(pool, AnswerPool):
            raise TypeError(f"pool: got {type(pool).__name__}; allowed: AnswerPool or None")
        if not (np.isfinite(noise) and noise >= 0.0):
            raise ValueError(f"noise: got {noise!r}; allowed: a finite number >= 0")
        self.pool = pool
        self.reference_logp = np.log(pool.ref_probs)
        self.reference_logp.flags.writeable = False
        self.observation_space = Discrete(pool.n_prompts)
        self.action_space = Discrete(pool.n_answers)
        self.num_tasks = pool.n_prompts
        self._reward = check_name("reward", reward, REWARDS)
        self._noise = float(noise)
        self._task_ids = np.zeros(num_rows, dtype=np.int64)

    def reset_rows(self, rows: IntArray, random: RowRandom, task_ids: IntArray | None) -> RowInfo:
        if task_ids is None and self.num_tasks == 1:
            task_ids = np.zeros(len(rows), dtype=np.int64)  # one prompt: nothing to draw
        elif task_ids is None:
            task_ids = random.integers(rows, self.num_tasks)
        self._task_ids[rows] = task_ids
        return {"task_id": task_ids}

    def step_rows(
        self, rows: IntArray, random: RowRandom, actions: IntArray
    ) -> tuple[FloatArray, BoolArray, RowInfo]:
        task_ids = self._task_ids[rows]
        info: RowInfo = {
            "task_id": task_ids,
            "proxy": self.pool.proxy[task_ids, actions],
            "gold": self.pool.gold[task_ids, actions],
            "ref_logp": self.reference_logp[task_ids, actions],
        }
        rewards = info[self._reward]
        if self._noise > 0.0:
            rewards = rewards + self._noise * random.normal(rows)
        return rewards, np.ones(len(rows), dtype=np.bool_), info

    def observe(self, rows: IntArray) -> IntArray:
        return self._task_ids[rows]


class AnswerPoolEnv(BatchOfOneEnv):
    """Choose one of the answers to a prompt: a contextual bandit with a known optimum.

    The sequence-level view of language-model post-training: an answer is one action, and the
    policy that maximises reward less ``beta * KL(policy || reference)`` is known in closed form
    (see `AnswerPool`, the environment's attribute ``pool``).

    ## Observation space
    ``Discrete(P)``: the number of the prompt, which is the task id. The default pool has P = 1.

    ## Action space
    ``Discrete(A)``: the number of the answer. The default pool has A = 200.

    ## Rewards
    ``pool.proxy[prompt, answer]`` (``reward="proxy"``) or ``pool.gold[prompt, answer]``
    (``reward="gold"``), plus Gaussian noise of standard deviation `noise`. No KL penalty is
    included; that belongs to the agent, which finds the reference in ``ref_logp``.

    ## Starting state
    A prompt drawn uniformly, or the one given by ``reset(options={"task_id": k})``, k from 0 to
    P - 1. A choice of task holds for that episode only.

    ## Episode end
    The episode terminates after one step. It never truncates.

    ## Information
    | key | from | type | meaning |
    |---|---|---|---|
    | ``task_id`` | reset, step | int | number of the prompt |
    | ``proxy``, ``gold`` | step | float | both rewards of the answer, without noise |
    | ``ref_logp`` | step | float | log-probability of the answer under the reference, in nats |

    ## Attributes
    ``pool``, the `AnswerPool`; ``reference_logp``, float64 [P, A], log-probabilities of the
    reference policy per observation, read-only.

    ## Arguments
    | argument | default | meaning |
    |---|---|---|
    | ``pool`` | None | an `AnswerPool`; None is `AnswerPool.default()` |
    | ``reward`` | "proxy" | the table that pays, "proxy" or "gold" |
    | ``noise`` | 0.0 | standard deviation of the reward noise |

    The vector environment takes ``autoreset_mode`` as well, see `AnswerPoolVectorEnv`.

    ## Example
    ```python
    import gymnasium as gym

    env = gym.make("llmgym:AnswerPool-v0", noise=0.1)
    prompt, info = env.reset(seed=0)
    prompt, reward, terminated, truncated, info = env.step(env.action_space.sample())
    best = env.unwrapped.pool.optimal_policy(beta=0.3)[prompt].argmax()
    ```

    ## Version history
    * v0: initial version.
    """

    def __init__(
        self, pool: AnswerPool | None = None, reward: str = "proxy", noise: float = 0.0
    ) -> None:
        transition = AnswerPoolTransition(1, pool, reward, noise)
        super().__init__(transition)
        self.pool = transition.pool
        self.reference_logp = transition.reference_logp


class AnswerPoolVectorEnv(BatchVectorEnv):
    """`AnswerPoolEnv` for a batch of rows; what ``gym.make_vec("AnswerPool-v0")`` makes.

    Observations and actions are int64 [N]. ``options["task_id"]`` is one integer for all rows or
    integers [N], which is how a group of answers shares a prompt. Info values are arrays [N] with
    masks ``_key``.

    Args:
        num_envs: number of rows N.
        pool, reward, noise: as for `AnswerPoolEnv`.
        autoreset_mode: "same_step", "next_step", "disabled" or an `AutoresetMode`. Same-step by
            default, for in next-step mode every second step of a one-step task does nothing but
            reset. A step's info is then in ``info["final_info"]``.
    """

    def __init__(
        self,
        num_envs: int = 1,
        pool: AnswerPool | None = None,
        reward: str = "proxy",
        noise: float = 0.0,
        autoreset_mode: AutoresetMode | str = "same_step",
    ) -> None:
        num_envs = check_count("num_envs", num_envs)
        transition = AnswerPoolTransition(num_envs, pool, reward, noise)
        super().__init__(transition, num_envs, autoreset_mode)
        self.pool = transition.pool
        self.reference_logp = transition.reference_logp
