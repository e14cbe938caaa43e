"""Weighted finite automata over tokens: rewards small enough that their optimum is exact.

An automaton reads a response token by token from state 0 and pays at each transition. The sum of
the payments is the reward (a weighted automaton over the semiring (max, +) with one path per word;
Mohri 2009, "Weighted automata algorithms"). `pattern_rewards`, `repeat_rewards` and
`length_rewards` make simple ones; `product` runs several at once and adds their payments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from llmgym.checks import check_count
from llmgym.row_random import FloatArray, IntArray
from llmgym.token_rewards import Responses, Scores


@dataclass(frozen=True, eq=False)
class Automaton:
    """A deterministic weighted automaton with S states over V tokens, starting in state 0.

    | field | type | meaning |
    |---|---|---|
    | `transitions` | int64 [S, V] | the state after each token |
    | `rewards` | float64 [S, V] | what the transition pays; at end-of-sequence, what stopping pays |
    | `cut` | float64 [S] | paid where the length limit stops the response in that state |

    The fields are read-only copies of what is given.

    Raises:
        ValueError: shapes that do not fit, a state out of range, a number that is not finite.
    """

    transitions: IntArray
    rewards: FloatArray
    cut: FloatArray

    def __post_init__(self) -> None:
        transitions = np.array(self.transitions)
        if transitions.ndim != 2 or 0 in transitions.shape or transitions.dtype.kind not in "iu":
            raise ValueError(
                f"transitions: got shape {transitions.shape} of {transitions.dtype}; "
                "allowed: [S, V] integers with S, V >= 1"
            )
        n_states = len(transitions)
        wrong = (transitions < 0) | (transitions >= n_states)
        if wrong.any():
            state, token = np.argwhere(wrong)[0]
            raise ValueError(
                f"transitions: state {state}, token {token} leads to {transitions[state, token]}; "
                f"allowed: 0 to {n_states - 1}"
            )
        rewards = _finite("rewards", self.rewards, transitions.shape)
        cut = _finite("cut", self.cut, (n_states,))
        for field, values in (
            ("transitions", transitions.astype(np.int64)), ("rewards", rewards), ("cut", cut)
        ):
            values.flags.writeable = False
            object.__setattr__(self, field, values)

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor, because copied and unpickled arrays would be writeable.
        return Automaton, (self.transitions, self.rewards, self.cut)

    @property
    def n_states(self) -> int:
        """S."""
        return int(self.transitions.shape[0])

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.transitions.shape[1])


def _finite(field: str, values: ArrayLike, shape: tuple[int, ...]) -> FloatArray:
    array = np.array(values, dtype=np.float64)
    if array.shape != shape:
        raise ValueError(f"{field}: got shape {array.shape}; allowed: {shape}")
    if not np.isfinite(array).all():
        place = tuple(np.argwhere(~np.isfinite(array))[0].tolist())
        raise ValueError(f"{field}: got {array[place]} at {place}; allowed: finite numbers")
    return array


def pattern_rewards(
    vocab_size: int, patterns: Sequence[tuple[Sequence[int], float]]
) -> Automaton:
    """Pays for each occurrence of each pattern, overlapping ones too.

    The automaton of Aho and Corasick (1975), "Efficient string matching": a state is the longest
    end of the response that begins some pattern.

    Args:
        vocab_size: V.
        patterns: (token ids, reward) of each.

    Raises:
        ValueError: an empty pattern, or a token outside the vocabulary.
    """
    check_count("vocab_size", vocab_size)
    worth: dict[tuple[int, ...], float] = {}
    for ids, reward in patterns:
        pattern = tuple(int(token) for token in ids)
        if not pattern or not all(0 <= token < vocab_size for token in pattern):
            raise ValueError(
                f"patterns: got {pattern}; allowed: at least one token of 0 to {vocab_size - 1}"
            )
        worth[pattern] = worth.get(pattern, 0.0) + float(reward)
    begins = {pattern[:end] for pattern in worth for end in range(len(pattern) + 1)} | {()}
    numbers = {begin: number for number, begin in enumerate(sorted(begins, key=lambda b: (len(b), b)))}
    transitions = np.zeros((len(numbers), vocab_size), dtype=np.int64)
    rewards = np.zeros(transitions.shape)
    for begin, state in numbers.items():
        for token in range(vocab_size):
            ends = [(*begin, token)[cut:] for cut in range(len(begin) + 2)]  # longest first
            transitions[state, token] = next(numbers[end] for end in ends if end in numbers)
            rewards[state, token] = sum(worth.get(end, 0.0) for end in ends)
    return Automaton(transitions, rewards, np.zeros(len(transitions)))


def repeat_rewards(vocab_size: int, reward: float) -> Automaton:
    """Pays `reward` (less than 0 for a penalty) for each token that equals the one before it.

    State 0 is the start, state 1 + v follows token v.
    """
    check_count("vocab_size", vocab_size)
    after = np.arange(vocab_size)
    transitions = np.tile(1 + after, (vocab_size + 1, 1))
    rewards = np.zeros(transitions.shape)
    rewards[1 + after, after] = reward
    return Automaton(transitions, rewards, np.zeros(len(transitions)))


def length_rewards(vocab_size: int, eos_id: int, per_token: float, cut: float = 0.0) -> Automaton:
    """Pays `per_token` for each token but end-of-sequence, and `cut` where the limit stops it."""
    check_count("vocab_size", vocab_size)
    rewards = np.full((1, vocab_size), float(per_token))
    rewards[0, eos_id] = 0.0
    return Automaton(np.zeros((1, vocab_size), dtype=np.int64), rewards, np.array([cut]))


def product(automata: Sequence[Automaton]) -> tuple[Automaton, IntArray]:
    """One automaton that runs all of `automata` at once and pays the sum.

    Returns:
        The automaton, of the S states that can be reached; and int64 [S, K], the states of the K
        automata in each of them.

    Raises:
        ValueError: no automaton, or vocabularies of different sizes.
    """
    sizes = {automaton.vocab_size for automaton in automata}
    if len(sizes) != 1:
        raise ValueError(f"automata: got vocabularies of {sorted(sizes)}; allowed: one size for all")
    numbers = {(0,) * len(automata): 0}
    found = [(0,) * len(automata)]
    transitions = []
    for states in found:  # grows while it is read
        targets = [a.transitions[state] for a, state in zip(automata, states, strict=True)]
        row = []
        for target in map(tuple, np.stack(targets, axis=1).tolist()):
            if target not in numbers:
                numbers[target] = len(found)
                found.append(target)
            row.append(numbers[target])
        transitions.append(row)
    parts = np.array(found, dtype=np.int64)
    rewards = np.zeros((len(found), sizes.pop()))
    cut = np.zeros(len(found))
    for automaton, part in zip(automata, parts.T, strict=True):
        rewards += automaton.rewards[part]
        cut += automaton.cut[part]
    return Automaton(np.array(transitions), rewards, cut), parts


class AutomatonReward:
    """A reward function: named automata, each a component of the reward.

    Of a response that is not at its end it gives what has been paid so far.

    Args:
        components: name: automaton, all over the same vocabulary. Automata are run as their
            `product`, so the time of a call hardly depends on their number.

    Attributes:
        components: as given.
        automaton: the product.
    """

    def __init__(self, components: Mapping[str, Automaton]) -> None:
        self.components = dict(components)
        self.automaton, parts = product(list(self.components.values()))
        # Per component: payments [S * (V + 1)] by product state and token, where the token V,
        # which is the padding, pays nothing and leaves the state as it is; and the cut [S].
        n_states, self._width = self.automaton.n_states, self.automaton.vocab_size + 1
        stay = np.arange(n_states)[:, None]
        self._next = np.hstack([self.automaton.transitions, stay]).ravel()
        self._rewards, self._cuts = {}, {}
        for (name, part), states in zip(self.components.items(), parts.T, strict=True):
            payments = np.hstack([part.rewards[states], np.zeros((n_states, 1))])
            self._rewards[name] = payments.ravel()
            self._cuts[name] = part.cut[states]

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.automaton.vocab_size

    def __call__(self, responses: Responses) -> Scores:
        places, last = self._walk(responses.tokens)
        cut = responses.stop_reasons == "length"
        components = {
            name: rewards[places].sum(axis=1) + np.where(cut, self._cuts[name][last], 0.0)
            for name, rewards in self._rewards.items()
        }
        return Scores(np.sum(list(components.values()), axis=0), components)

    def _walk(self, tokens: IntArray) -> tuple[IntArray, IntArray]:
        """Places [N, T] in the flat tables, and the last states [N]."""
        places = np.array(tokens)
        states = np.zeros(len(tokens), dtype=np.int64)
        for column in places.T:  # a view: the place is the token plus the state's offset
            column += states * self._width
            states = self._next[column]
        return places, states
