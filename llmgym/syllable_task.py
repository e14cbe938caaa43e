"""The default task of `TokenGeneration-v0`, whose optimum is known."""

import numpy as np

from llmgym.automaton import AutomatonReward, length_rewards, pattern_rewards, repeat_rewards
from llmgym.checks import check_count
from llmgym.ngram import NGram
from llmgym.token_tasks import Alphabet, TokenTask


def syllable_task(reward_at: str = "end", order: int = 2) -> TokenTask:
    """Words of syllables: the default task of `TokenGeneration-v0`.

    Tokens are 5 vowels, 14 consonants and end-of-sequence, shown as ".". The reference is an n-gram
    model that mostly alternates vowels and consonants and ends with probability 0.08 at each token.
    There are eight prompts of two to five letters, none of which begins another, and at most 20
    tokens of response. The reward has three components:

    | component | pays |
    |---|---|
    | `patterns` | 2.0 for each "kobe", 1.0 for "tir" and "oma", 0.5 for "sa", "ki" and "ul", -0.5 for "on" |
    | `repeats` | -0.5 for each letter that equals the one before it |
    | `length` | 0.05 for each letter, and -1 if the limit stops the response |

    The reference has the objective 0.24 at any beta. The optimum has, exactly:

    | beta | objective | reward | KL to the reference |
    |---|---|---|---|
    | 0 | 10.00 | 10.00 | 60.1 |
    | 0.05 | 7.22 | 9.94 | 54.5 |
    | 0.1 | 4.65 | 9.25 | 46.0 |
    | 0.2 | 1.49 | 4.89 | 17.0 |
    | 0.3 | 0.68 | 1.63 | 3.2 |
    | 0.5 | 0.42 | 0.68 | 0.5 |
    | 1 | 0.32 | 0.41 | 0.1 |

    Args:
        reward_at: "end" or "token", as for `TokenTask`.
        order: n of the reference, at least 2. The figures are those of 2.
    """
    if check_count("order", order) < 2:
        raise ValueError("order: got 1; allowed: at least 2, so that vowels and consonants alternate")
    letters = Alphabet("aeioubdfgklmnprstvz.")
    size = len(letters.symbols)
    eos_id = size - 1
    is_vowel = np.arange(size) < 5
    rng = np.random.Generator(np.random.PCG64(20))
    logits = rng.standard_normal((size + 1, size))
    logits[:size] += np.where(is_vowel[:, None] != is_vowel, 2.0, 0.0)
    for _ in range(order - 2):
        # One letter further back: the same pairs, and a little of each context's own.
        logits = np.tile(logits, (size + 1, 1))
        logits = logits + 0.3 * rng.standard_normal(logits.shape)
    reference = NGram.from_logits(logits, order, eos_id, eos_prob=0.08)
    patterns = {"kobe": 2.0, "tir": 1.0, "oma": 1.0, "sa": 0.5, "ki": 0.5, "ul": 0.5, "on": -0.5}
    reward = AutomatonReward(
        {
            "patterns": pattern_rewards(
                size, [(letters.encode(word).tolist(), worth) for word, worth in patterns.items()]
            ),
            "repeats": repeat_rewards(size, -0.5),
            "length": length_rewards(size, eos_id, 0.05, cut=-1.0),
        }
    )
    words = ("ba", "den", "ilo", "kur", "mesa", "pito", "gruna", "somel")
    return TokenTask(
        prompts=[letters.encode(word) for word in words],
        vocab_size=size,
        eos_id=eos_id,
        max_new_tokens=20,
        reward=reward,
        reward_at=reward_at,
        reference=reference,
        decode=letters,
    )
