"""The exact optimum of a token task whose reference is an n-gram and whose reward an automaton."""

from dataclasses import dataclass

import numpy as np

from llmgym.automaton import AutomatonReward
from llmgym.checks import check_beta
from llmgym.ngram import NGram
from llmgym.row_random import FloatArray, IntArray
from llmgym.token_rewards import Responses
from llmgym.token_tasks import TokenTask
from llmgym.transition import BoolArray

POLICY_TOLERANCE = 1e-5  # a policy may have been a float32 softmax
TIE_TOLERANCE = 1e-9  # sums of the same rewards in another order differ by less


@dataclass(frozen=True)
class PolicyValue:
    """What a policy is worth: exact, averaged over prompts, in the reward's unit or in nats.

    | field | meaning |
    |---|---|
    | `reward` | expected total reward |
    | `kl_to_reference` | KL(policy || reference) of whole responses |
    | `objective` | reward - beta * kl_to_reference |
    | `kl_to_optimum` | KL(policy || pi*) of whole responses; None for beta = 0 |
    | `response_length` | expected number of tokens, end-of-sequence included |
    | `cut` | probability that the limit stops the response |
    """

    reward: float
    kl_to_reference: float
    objective: float
    kl_to_optimum: float | None
    response_length: float
    cut: float


class TokenSolution:
    """Soft value iteration over (state of the automaton, context of the reference, steps left).

    **Objective.** For a policy pi over responses y to prompts x, drawn uniformly, and beta >= 0,

        J(pi) = E_x [ E_{y ~ pi} R(x, y)  -  beta KL(pi(. | x) || ref(. | x)) ]

    R is a sum of payments r(s, a) along the response (s is the automaton's state, a the token) and
    the reference depends on the context c alone, so this is a Markov decision process with a KL
    penalty at each step, and the best policy depends on (s, c) and the number n of tokens that may
    still come.

    **Recursion.** With s' and c' the state and the context after token a,

        Q_n(s, c, a) = r(s, a) + W_{n-1}(s', c')         and Q_n(s, c, eos) = r(s, eos)
        W_n(s, c)    = beta log sum_a ref(a | c) exp(Q_n(s, c, a) / beta)
        W_0(s, c)    = cut(s)
        pi*_n(a | s, c) = ref(a | c) exp((Q_n(s, c, a) - W_n(s, c)) / beta)

    and J(pi*) = E_x W_h(x)(0, c(x)) with the limit h(x) and the context c(x) of the prompt. For
    beta = 0, W_n = max_a Q_n and pi* shares the probability among the best tokens (any sharing is
    optimal then). Whether a reward is paid with each token or at the end makes no difference to J.

    The recursion is that of linearly solvable problems (Todorov 2006; exp(W / beta) is his
    desirability), of maximum-entropy models of control (Ziebart 2010) and of control as inference
    with the reference as its prior (Levine 2018, sections 2 and 3). It is the token-level form of
    pi*(y | x) = ref(y | x) exp(R(x, y) / beta) / Z(x), to which the product of the pi*_n along a
    response is equal. So J(pi*) - J(pi) = beta KL(pi || pi*) here too.

    **Tables.** Only the M pairs (s, c) that can be reached from a prompt are kept, numbered from 0.
    A policy is a table of log-probabilities, float64 [H, M, V]: entry [n - 1, m] is the
    distribution where n tokens may still come, H being the largest limit of a prompt.

    Args:
        task: its `reference` is an `NGram`, its `reward` an `AutomatonReward`.

    Attributes:
        task: as given.
        states: int64 [M, 2], the automaton's state and the context of each pair.
        starts: int64 [P], the pair in which a response to each prompt starts.
        horizon: H.

    Raises:
        TypeError: another kind of reference or reward.

    Sources:
        Todorov 2006, "Linearly-solvable Markov decision problems".
        Ziebart 2010, "Modeling Purposeful Adaptive Behavior with the Principle of Maximum Causal
        Entropy".
        Levine 2018, "Reinforcement Learning and Control as Probabilistic Inference: Tutorial and
        Review".
    """

    def __init__(self, task: TokenTask) -> None:
        if not isinstance(task.reference, NGram):
            raise TypeError(f"reference: got {type(task.reference).__name__}; allowed: NGram")
        if not isinstance(task.reward, AutomatonReward):
            raise TypeError(f"reward: got {type(task.reward).__name__}; allowed: AutomatonReward")
        self.task = task
        self.horizon = int(task.limits.max())
        self._reference, self._reward = task.reference, task.reward
        self._solved: dict[float, tuple[FloatArray, FloatArray]] = {}
        self._ends = np.arange(task.vocab_size) == task.eos_id
        n_contexts = len(self._reference.log_probs)
        # The automaton starts in state 0, so a prompt's key is its context.
        last = np.full((task.num_tasks, int(task.prompt_lengths.max())), task.pad)
        for number, prompt in enumerate(task.prompts):
            last[number, : task.prompt_lengths[number]] = prompt
        starts = self._reference.contexts(last, task.prompt_lengths)
        self._keys = self._reachable(starts)  # sorted: automaton state * C + context
        self.states = np.stack(np.divmod(self._keys, n_contexts), axis=1)
        self.starts = np.searchsorted(self._keys, starts)
        self._next = np.searchsorted(self._keys, self._following(self._keys))
        # The entry is never used, but it must be one: end-of-sequence leads to no pair.
        self._next[:, task.eos_id] = 0
        self._payments = self._reward.automaton.rewards[self.states[:, 0]]
        self._cuts = self._reward.automaton.cut[self.states[:, 0]]
        self._ref = self._reference.log_probs[self.states[:, 1]]

    @property
    def n_states(self) -> int:
        """M."""
        return len(self.states)

    def reference_policy(self) -> FloatArray:
        """The reference as a table, a read-only view."""
        return np.broadcast_to(self._ref, (self.horizon, *self._ref.shape))

    def values(self, beta: float) -> FloatArray:
        """W_n, float64 [H + 1, M]: the best objective from each pair with n tokens still to come.

        Raises:
            ValueError: beta is negative or not finite.
        """
        return self._solve(check_beta(beta))[0]

    def optimal_policy(self, beta: float) -> FloatArray:
        """pi* as a table; for beta = 0 the best tokens (within 1e-9) share the probability.

        Raises:
            ValueError: beta is negative or not finite.
        """
        return self._solve(check_beta(beta))[1]

    def optimal_objective(self, beta: float) -> float:
        """J(pi*); raises as `values`."""
        return float(self.values(beta)[self.task.limits, self.starts].mean())

    def evaluate(self, policy: FloatArray, beta: float) -> PolicyValue:
        """Exact expectations under a policy.

        Raises:
            ValueError: a table of another shape, or whose probabilities do not sum to 1 within
                1e-5, or a beta that is negative or not finite.
        """
        self._check_policy(policy)
        values, optimum = self._solve(check_beta(beta))
        probs = np.exp(policy)
        reward = self._expected(probs, self._payments, self._cuts)
        kl = self._expected(probs, _difference(policy, self._ref))
        kl_to_optimum = None if beta == 0.0 else self._expected(probs, _difference(policy, optimum))
        return PolicyValue(
            reward=reward,
            kl_to_reference=kl,
            objective=reward - beta * kl if beta > 0.0 else reward,
            kl_to_optimum=kl_to_optimum,
            response_length=self._expected(probs, np.ones_like(self._ref)),
            cut=self._expected(probs, np.zeros_like(self._ref), np.ones(self.n_states)),
        )

    def objective(self, policy: FloatArray, beta: float) -> float:
        """J(policy); raises as `evaluate`."""
        return self.evaluate(policy, beta).objective

    def log_probs(self, policy: FloatArray, responses: Responses) -> FloatArray:
        """Log-probability [N, T] of each token of responses under a table; 0 behind their ends.

        With the optimal policy, the mean over samples of an agent of the agent's log-probability
        less the sum of these is an estimate of KL(agent || pi*).

        Raises:
            ValueError: a table as `evaluate` refuses.
        """
        self._check_policy(policy)
        steps_left, pairs, real = self._locate(responses)
        tokens = np.where(real, responses.tokens, 0)
        return np.where(real, policy[steps_left - 1, pairs, tokens], 0.0)

    def advantages(self, beta: float, responses: Responses) -> FloatArray:
        """Soft advantages Q_n - W_n [N, T] of the tokens of responses, 0 behind their ends.

        beta log(pi* / ref) where beta > 0: the true credit of each token.

        Raises:
            ValueError: beta is negative or not finite.
        """
        values = self.values(beta)
        steps_left, pairs, real = self._locate(responses)
        tokens = np.where(real, responses.tokens, 0)
        after = np.where(self._ends[tokens], 0.0, values[steps_left - 1, self._next[pairs, tokens]])
        q = self._payments[pairs, tokens] + after
        return np.where(real, q - values[steps_left, pairs], 0.0)

    def sample(
        self, policy: FloatArray, task_ids: IntArray, rng: np.random.Generator
    ) -> Responses:
        """Responses to the prompts `task_ids` [N], drawn from a table.

        Raises:
            ValueError: a table as `evaluate` refuses.
        """
        self._check_policy(policy)
        task, limits = self.task, self.task.limits[task_ids]
        cumulated = np.exp(policy).cumsum(axis=2)
        cumulated /= cumulated[:, :, -1:]
        tokens = np.full((len(task_ids), int(limits.max(initial=1))), task.pad)
        lengths = np.zeros(len(task_ids), dtype=np.int64)
        rows, pairs = np.arange(len(task_ids)), self.starts[task_ids]
        for place in range(tokens.shape[1]):
            below = cumulated[limits[rows] - place - 1, pairs] <= rng.random(len(rows))[:, None]
            drawn = below.sum(axis=1)
            tokens[rows, place], lengths[rows] = drawn, place + 1
            going_on = (drawn != task.eos_id) & (limits[rows] > place + 1)
            rows, pairs = rows[going_on], self._next[pairs, drawn][going_on]
        return task.responses(task_ids, tokens, lengths)

    # ------------------------------------------------------------------------------ the recursions

    def _solve(self, beta: float) -> tuple[FloatArray, FloatArray]:
        """Values [H + 1, M] and log-probabilities of the optimal policy [H, M, V], read-only."""
        if beta not in self._solved:
            values = np.empty((self.horizon + 1, self.n_states))
            policy = np.empty((self.horizon, *self._ref.shape))
            values[0] = self._cuts
            for n in range(1, self.horizon + 1):
                q = self._payments + self._after(values[n - 1])
                values[n], policy[n - 1] = _soft_maximum(self._ref, q, beta)
            values.flags.writeable = policy.flags.writeable = False
            self._solved[beta] = values, policy
        return self._solved[beta]

    def _after(self, values: FloatArray) -> FloatArray:
        """The values [M] of where each token leads, [M, V]; 0 behind end-of-sequence."""
        return np.where(self._ends, 0.0, values[self._next])

    def _expected(
        self, probs: FloatArray, payments: FloatArray, cuts: FloatArray | None = None
    ) -> float:
        """Mean over prompts of the expected sum of payments, [M, V] or [H, M, V], and cuts [M]."""
        payments = np.broadcast_to(payments, probs.shape)
        worth = np.zeros((self.horizon + 1, self.n_states))
        if cuts is not None:
            worth[0] = cuts
        for n in range(1, self.horizon + 1):
            terms = np.zeros_like(self._ref)  # what has probability 0 adds 0, were it infinite
            later = payments[n - 1] + self._after(worth[n - 1])
            np.multiply(probs[n - 1], later, out=terms, where=probs[n - 1] > 0.0)
            worth[n] = terms.sum(axis=1)
        return float(worth[self.task.limits, self.starts].mean())

    # ----------------------------------------------------------------------------- pairs and tables

    def _following(self, keys: IntArray) -> IntArray:
        """The keys [k, V] to which each token leads from `keys` [k]."""
        states, contexts = np.divmod(keys, len(self._reference.log_probs))
        tokens = np.arange(self.task.vocab_size)
        contexts = self._reference.next_contexts(contexts[:, None], tokens)
        return self._reward.automaton.transitions[states] * len(self._reference.log_probs) + contexts

    def _reachable(self, starts: IntArray) -> IntArray:
        """All keys that some response leads to, sorted."""
        found = new = np.unique(starts)
        while len(new):
            new = np.setdiff1d(self._following(new)[:, ~self._ends], found)
            found = np.union1d(found, new)
        return found

    def _locate(self, responses: Responses) -> tuple[IntArray, IntArray, BoolArray]:
        """Steps left before each token [N, T], pairs [N, T], and which are tokens [N, T]."""
        places = np.arange(responses.tokens.shape[1])
        real = places < responses.lengths[:, None]
        # Behind a response anything goes that is an index.
        steps_left = np.maximum(self.task.limits[responses.task_ids][:, None] - places, 1)
        pairs = np.empty(real.shape, dtype=np.int64)
        here = self.starts[responses.task_ids]
        for place in places:
            pairs[:, place] = here
            here = self._next[here, np.where(real[:, place], responses.tokens[:, place], 0)]
        return steps_left, pairs, real

    def _check_policy(self, policy: FloatArray) -> None:
        shape = (self.horizon, *self._ref.shape)
        if np.shape(policy) != shape:
            raise ValueError(f"policy: got shape {np.shape(policy)}; allowed: [H, M, V] = {shape}")
        sums = np.exp(policy).sum(axis=2)
        wrong = ~(np.abs(sums - 1.0) <= POLICY_TOLERANCE)
        if wrong.any():
            step, pair = np.argwhere(wrong)[0]
            raise ValueError(
                f"policy: the probabilities at [{step}, {pair}] sum to {sums[step, pair]}; "
                f"allowed: log-probabilities whose exponentials sum to 1 within {POLICY_TOLERANCE:g}"
            )


def _soft_maximum(ref: FloatArray, q: FloatArray, beta: float) -> tuple[FloatArray, FloatArray]:
    """beta log sum_a ref exp(q / beta) of each row, and the log-probabilities that attain it."""
    best = q.max(axis=1, keepdims=True)
    if beta == 0.0:
        among_best = q >= best - TIE_TOLERANCE
        shares = np.where(among_best, -np.log(among_best.sum(axis=1, keepdims=True)), -np.inf)
        return best[:, 0], shares
    with np.errstate(over="ignore"):  # a tiny beta gives -inf: probability 0
        logits = ref + (q - best) / beta
    top = logits.max(axis=1, keepdims=True)
    normaliser = top + np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    return (best + beta * normaliser)[:, 0], logits - normaliser


def _difference(log_p: FloatArray, log_q: FloatArray) -> FloatArray:
    """log p - log q, and 0 where p is 0 (0 log 0 = 0)."""
    terms = np.zeros(log_p.shape)
    np.subtract(log_p, log_q, out=terms, where=~np.isneginf(log_p))
    return terms
