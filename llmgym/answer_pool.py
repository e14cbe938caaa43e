"""A pool of answers with two rewards and a reference policy: RLHF small enough to solve exactly."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llmgym.checks import check_beta, check_count, check_name

FloatArray = NDArray[np.float64]

REWARDS = ("proxy", "gold")

# Rows of probabilities sum to 1 within this; a policy may have been a float32 softmax.
REFERENCE_TOLERANCE = 1e-6
POLICY_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Frontier:
    """The optimal policy over a range of betas; every field has shape [len(betas)].

    | field | meaning |
    |---|---|
    | `beta` | weight of the KL penalty |
    | `kl` | KL(pi* || reference) in nats |
    | `proxy`, `gold` | the optimal policy's expected rewards |
    """

    beta: FloatArray
    kl: FloatArray
    proxy: FloatArray
    gold: FloatArray


@dataclass(frozen=True, eq=False)
class AnswerPool:
    """P prompts with A candidate answers each, a reference policy over them, and two rewards.

    Reinforcement learning from human feedback, reduced to what can be solved in closed form. A
    language model's choice among all texts becomes a choice among the A answers of a prompt; the
    learned reward model becomes a table, `proxy`; what people really want, and what is only
    measured and never trained on, is another table, `gold`; the model before training is
    `ref_probs`. Prompts are drawn uniformly.

    **Objective.** For a policy pi(a | x) and a weight beta >= 0,

        J(pi) = E_x [ sum_a pi(a | x) proxy(x, a)  -  beta KL(pi(. | x) || ref(. | x)) ]

    which is the KL-regularised reward of Ziegler et al. (2019), equation 2. KL is in nats.

    **Optimum.** J is concave in pi, with the unique maximum for beta > 0

        pi*(a | x) = ref(a | x) exp(proxy(x, a) / beta) / Z(x)

    where Z(x) sums the numerator over a (Rafailov et al. 2023, equation 4), and
    J(pi*) = beta E_x[log Z(x)]. For beta = 0 it is the answer with the highest proxy. So a trained
    policy is judged by its distance from pi*, KL(pi || pi*): J(pi*) - J(pi) = beta KL(pi || pi*).

    **Over-optimisation.** The proxy is gold plus an error. As beta falls the optimal policy moves
    from the reference to the answers with the highest proxy, and these are chosen for their error
    as well as for their worth: gold first rises with the distance from the reference, then falls
    (Gao et al. 2023). `frontier` traces that curve; `default()` shows it.

    | field | shape | meaning |
    |---|---|---|
    | `proxy` | [P, A] | reward that is optimised |
    | `gold` | [P, A] | reward that is meant |
    | `ref_probs` | [P, A] | reference policy: positive, each row sums to 1 |

    The fields are float64 copies of what is given, and read-only. Policies and logits given to the
    methods have shape [P, A] too.

    Raises:
        ValueError: a field of another shape, with a value that is not finite, or with a
            probability that is not positive, or whose row does not sum to 1 within 1e-6.

    Sources:
        Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences".
        Rafailov et al. 2023, "Direct Preference Optimization: Your Language Model is Secretly a
        Reward Model".
        Gao, Schulman, Hilton 2023, "Scaling Laws for Reward Model Overoptimization".
    """

    proxy: FloatArray
    gold: FloatArray
    ref_probs: FloatArray

    def __post_init__(self) -> None:
        shape = np.shape(self.proxy)
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"proxy: got shape {shape}; allowed: [P, A] with P, A >= 1")
        for field in ("proxy", "gold", "ref_probs"):
            values = _as_table(field, getattr(self, field), shape)
            if field == "ref_probs":
                _check_probabilities(field, values, REFERENCE_TOLERANCE, positive=True)
            values.flags.writeable = False
            object.__setattr__(self, field, values)

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor, because copied and unpickled arrays would be writeable.
        return AnswerPool, (self.proxy, self.gold, self.ref_probs)

    @classmethod
    def default(cls) -> "AnswerPool":
        """One prompt, 200 answers, a near-uniform reference, and a proxy that misleads at the top.

        Under the reference E[proxy] = -0.12 and E[gold] = -0.35; the answer with the highest
        proxy has gold 0.66. The optimal policy's E[gold] is 0.95 at beta 0.3, its peak, and falls
        to 0.66 at beta 0. The proxy has standard deviation 1.0 and its maximum is 0.27 above the
        second best, so that beta 0 has one definite answer.
        """
        # Of the seeds tried this one has a worst-case error at the top: the best proxy's gold is
        # far below that of its neighbours.
        rng = np.random.Generator(np.random.PCG64(1003))
        ref_probs = _softmax(0.2 * rng.standard_normal(200))
        worth = rng.standard_normal(200)
        # A reward model errs more on good answers: it has seen fewer of them.
        proxy = worth + (0.35 + 0.35 * np.maximum(worth, 0.0)) * rng.standard_normal(200)
        proxy += -0.12 - ref_probs @ proxy
        worth -= ref_probs @ worth
        gold = -0.35 + worth * (0.66 + 0.35) / worth[proxy.argmax()]
        return cls(proxy[None], gold[None], ref_probs[None])

    @classmethod
    def random(
        cls,
        n_prompts: int,
        n_answers: int,
        seed: int,
        *,
        correlation: float = 0.8,
        ref_spread: float = 0.5,
    ) -> "AnswerPool":
        """A contextual pool with standard normal rewards.

        Args:
            n_prompts: P.
            n_answers: A.
            seed: the same seed gives the same pool.
            correlation: of proxy and gold, from -1 to 1.
            ref_spread: standard deviation of the reference's logits; 0 is a uniform reference.
        """
        shape = (check_count("n_prompts", n_prompts), check_count("n_answers", n_answers))
        if not -1.0 <= correlation <= 1.0:
            raise ValueError(f"correlation: got {correlation!r}; allowed: -1 to 1")
        if not (np.isfinite(ref_spread) and ref_spread >= 0.0):
            raise ValueError(f"ref_spread: got {ref_spread!r}; allowed: a finite number >= 0")
        rng = np.random.Generator(np.random.PCG64(seed))
        proxy = rng.standard_normal(shape)
        gold = correlation * proxy + np.sqrt(1.0 - correlation**2) * rng.standard_normal(shape)
        return cls(proxy, gold, _softmax(ref_spread * rng.standard_normal(shape)))

    @property
    def n_prompts(self) -> int:
        """P."""
        return int(self.proxy.shape[0])

    @property
    def n_answers(self) -> int:
        """A."""
        return int(self.proxy.shape[1])

    def optimal_policy(self, beta: float) -> FloatArray:
        """The policy [P, A] that maximises `objective`.

        For beta = 0 all probability is on the highest proxy, in equal shares where several are
        highest; any sharing is optimal then. (As beta falls to 0, pi* shares as the reference.)

        Raises:
            ValueError: beta is negative or not finite.
        """
        check_beta(beta)
        below_best = self.proxy - self.proxy.max(axis=1, keepdims=True)
        if beta == 0.0:
            best = (below_best == 0.0).astype(np.float64)
            return np.asarray(best / best.sum(axis=1, keepdims=True))
        with np.errstate(over="ignore"):  # a tiny beta gives -inf: probability 0
            return _softmax(np.log(self.ref_probs) + below_best / beta)

    def objective(self, policy: ArrayLike, beta: float) -> float:
        """J(policy), the regularised reward of the class docstring."""
        check_beta(beta)
        return self.expected(policy, "proxy") - beta * self.kl(policy, self.ref_probs)

    def kl(self, p: ArrayLike, q: ArrayLike) -> float:
        """KL(p || q) in nats, averaged over prompts; inf where q is 0 and p is not."""
        p, q = self._policy("p", p), self._policy("q", q)
        terms = np.zeros_like(p)
        with np.errstate(divide="ignore"):
            np.subtract(np.log(p), np.log(q), out=terms, where=p > 0.0)  # 0 log 0 = 0
        return float((p * terms).sum(axis=1).mean())

    def expected(self, policy: ArrayLike, reward: str) -> float:
        """The policy's mean "proxy" or "gold" reward over prompts and answers."""
        table = getattr(self, check_name("reward", reward, REWARDS))
        return float((self._policy("policy", policy) * table).sum(axis=1).mean())

    def policy_gradient(self, logits: ArrayLike, beta: float) -> FloatArray:
        """Exact gradient [P, A] of `objective` of softmax(logits) with respect to the logits.

        With f(x, a) = proxy(x, a) - beta log(pi(a | x) / ref(a | x)),

            dJ / dlogits(x, a) = pi(a | x) (f(x, a) - sum_b pi(b | x) f(x, b)) / P

        1/P because J averages over prompts; the derivative of log pi inside f has mean zero
        under pi and drops out. This is what a policy-gradient estimate with the KL in the reward
        must equal on average.
        """
        check_beta(beta)
        logits = _as_table("logits", logits, self.proxy.shape)
        policy = _softmax(logits)
        log_policy = logits - logits.max(axis=1, keepdims=True)
        log_policy -= np.log(np.exp(log_policy).sum(axis=1, keepdims=True))
        f = self.proxy - beta * (log_policy - np.log(self.ref_probs))
        advantage = f - (policy * f).sum(axis=1, keepdims=True)
        return np.asarray(policy * advantage / self.n_prompts)

    def frontier(self, betas: Sequence[float] | FloatArray) -> Frontier:
        """KL to the reference and expected rewards of the optimal policy at each beta."""
        policies = [self.optimal_policy(beta) for beta in betas]
        return Frontier(
            beta=np.array(betas, dtype=np.float64),
            kl=np.array([self.kl(policy, self.ref_probs) for policy in policies]),
            proxy=np.array([self.expected(policy, "proxy") for policy in policies]),
            gold=np.array([self.expected(policy, "gold") for policy in policies]),
        )

    def _policy(self, field: str, policy: ArrayLike) -> FloatArray:
        values = _as_table(field, policy, self.proxy.shape)
        _check_probabilities(field, values, POLICY_TOLERANCE)
        return values


def _softmax(logits: FloatArray) -> FloatArray:
    """Softmax over the last axis."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def _as_table(field: str, values: ArrayLike, shape: tuple[int, ...]) -> FloatArray:
    """A finite float64 copy of `values`, which must have that shape [P, A]."""
    table = np.array(values, dtype=np.float64)
    if table.shape != shape:
        raise ValueError(f"{field}: got shape {table.shape}; allowed: [P, A] = {shape}")
    if not np.isfinite(table).all():
        row, column = np.argwhere(~np.isfinite(table))[0]
        raise ValueError(
            f"{field}: row {row}, answer {column} has {table[row, column]}; allowed: finite numbers"
        )
    return table


def _check_probabilities(
    field: str, table: FloatArray, tolerance: float, positive: bool = False
) -> None:
    wrong = table <= 0.0 if positive else table < 0.0
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        allowed = "> 0, so that KL to it is finite" if positive else ">= 0"
        raise ValueError(
            f"{field}: row {row}, answer {column} has {table[row, column]}; "
            f"allowed: probabilities {allowed}"
        )
    sums = table.sum(axis=1)
    off = np.abs(sums - 1.0) > tolerance
    if off.any():
        row = int(off.argmax())
        raise ValueError(f"{field}: row {row} sums to {sums[row]}; allowed: 1 within {tolerance:g}")
