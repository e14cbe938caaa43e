"""Text to token ids and back: a tokenizer of characters, and any other behind the same four names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from llmgym.row_random import IntArray
from llmgym.token_tasks import Alphabet


@dataclass(frozen=True)
class Tokenizer:
    """What the token view of a text needs to know.

    | field | meaning |
    |---|---|
    | `encode` | text to ids, int64 [T], nothing added |
    | `encode_prompt` | the same of a prompt, with what the tokenizer puts before it |
    | `decode` | ids [T] to text, all of them, end-of-sequence as any other |
    | `vocab_size` | V; ids are 0 to V - 1 |
    | `eos_id` | the id that ends a response |
    """

    encode: Callable[[str], IntArray]
    encode_prompt: Callable[[str], IntArray]
    decode: Callable[[ArrayLike], str]
    vocab_size: int
    eos_id: int


def character_tokenizer(characters: Sequence[str], eos: str = "\N{SYMBOL FOR END OF TEXT}") -> Tokenizer:
    """One token for each character, in the order given, and end-of-sequence as the last.

    Args:
        characters: those there are, each once.
        eos: what end-of-sequence looks like in a text where it should not be; none of `characters`.

    Raises:
        ValueError: a character that is there twice; from `encode`, one that is not there.
    """
    if eos in characters:
        raise ValueError(f"eos: got {eos!r}, which is one of the characters; allowed: another one")
    alphabet = Alphabet([*characters, eos])
    return Tokenizer(alphabet.encode, alphabet.encode, alphabet, len(characters) + 1, len(characters))


@dataclass(frozen=True)
class _HuggingFace:
    """The calls that `transformers` tokenizers need; not functions inside a function, so as to pickle."""

    tokenizer: Any

    def encode(self, text: str) -> IntArray:
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)

    def encode_prompt(self, text: str) -> IntArray:
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=True), dtype=np.int64)

    def decode(self, ids: ArrayLike) -> str:
        # Special tokens stay: dropped from within a response, they would join what they part. And no
        # blank before a point is tidied away: text is graded as it was written.
        ids = np.asarray(ids).tolist()
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def as_tokenizer(tokenizer: Any) -> Tokenizer:
    """A `Tokenizer` as it is, or one of the `transformers` library's behind the same names.

    Raises:
        TypeError: neither of the two.
        ValueError: a tokenizer without an end-of-sequence token.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if not all(hasattr(tokenizer, name) for name in ("encode", "decode", "eos_token_id", "__len__")):
        raise TypeError(
            f"tokenizer: got {type(tokenizer).__name__}; allowed: a llmgym.tokenizers.Tokenizer, or one with "
            "encode, decode, eos_token_id and len(), as transformers' have"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError("tokenizer: eos_token_id is None; allowed: one that can end a response")
    calls = _HuggingFace(tokenizer)
    return Tokenizer(
        calls.encode, calls.encode_prompt, calls.decode, len(tokenizer), int(tokenizer.eos_token_id)
    )
