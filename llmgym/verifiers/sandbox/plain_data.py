"""Python values as JSON and back, and their equality, without running anything that is in them.

Numbers, strings, bytes, None, lists, tuples, sets, frozensets and dicts, nested up to 100 levels. What
JSON has no word for is a list with a tag in front. An int is written in hexadecimal, for which Python
has no limit on digits and needs linear time. (Pickle would let the sender run code in the reader.)
"""

import json
from typing import Any

MAX_DEPTH = 100


class NotPlainError(ValueError):
    """A value that is not plain data; the message says which type."""


def encode(value: Any, depth: int = 0) -> Any:
    """A value as what `json.dumps` takes. Subclasses, such as Counter, are encoded as their base class.

    Raises:
        NotPlainError: another type, or nested deeper than 100 levels.
    """
    if depth > MAX_DEPTH:
        raise NotPlainError(f"nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return ["int", int.__format__(value, "x")]
    if isinstance(value, float):
        return float.__add__(value, 0.0)
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes.hex(bytes(value))]
    if isinstance(value, dict):
        pairs = dict.items(value)
        return ["dict", *([encode(key, depth + 1), encode(item, depth + 1)] for key, item in pairs)]
    kinds: tuple[type[Any], ...] = (list, tuple, set, frozenset)
    for kind in kinds:
        if isinstance(value, kind):
            return [kind.__name__, *(encode(item, depth + 1) for item in kind.__iter__(value))]
    raise NotPlainError(f"{type(value).__name__} is not plain data")


def decode(tree: Any) -> Any:
    """The value that `encode` made a tree of. For trees of a trusted writer only: see `canonical`."""
    if not isinstance(tree, list):
        return tree
    tag, *items = tree
    if tag == "int":
        return int(items[0], 16)
    if tag == "complex":
        return complex(*items)
    if tag == "bytes":
        return bytes.fromhex(items[0])
    if tag == "dict":
        return {decode(key): decode(item) for key, item in items}
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[tag](map(decode, items))


def canonical(tree: Any, depth: int = 0) -> Any:
    """A tree such that two of them are equal exactly if Python's `==` holds for the values.

    So 1, 1.0 and True are one, a set is a frozenset, a list is no tuple, a dict has no order. NaN
    equals NaN, unlike in Python, since a test that expects it could not be passed otherwise. No set
    or dict is built on the way: a hostile writer could choose members of equal hash, for which that
    takes quadratic time. Sets are compared as sorted lists instead.

    Raises:
        ValueError: the tree is not one of `encode`.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if tree is None or isinstance(tree, str):
        return tree
    if isinstance(tree, (bool, int, float)):
        return _canonical_number(tree)
    if not isinstance(tree, list) or not tree:
        raise ValueError(f"not a value: {type(tree).__name__}")
    tag, *items = tree
    match tag, items:
        case "int", [str(digits)]:
            return _canonical_number(int(digits, 16))
        case "complex", [float(real), float(imaginary)]:
            if imaginary == 0.0:
                return _canonical_number(real)
            return ["complex", _canonical_number(real), _canonical_number(imaginary)]
        case "bytes", [str(digits)]:
            return ["bytes", bytes.fromhex(digits).hex()]
        case (("list" | "tuple"), _):
            return [tag, *(canonical(item, depth + 1) for item in items)]
        case (("set" | "frozenset"), _):
            return ["set", *sorted(json.dumps(canonical(item, depth + 1)) for item in items)]
        case "dict", _:
            pairs = []
            for pair in items:
                if not isinstance(pair, list) or len(pair) != 2:
                    raise ValueError("not a pair of key and value")
                key, item = (canonical(part, depth + 1) for part in pair)
                pairs.append([json.dumps(key), item])
            return ["dict", *sorted(pairs, key=lambda pair: pair[0])]
    raise ValueError(f"not a value: {str(tag)[:20]!r}")


def _canonical_number(number: bool | int | float) -> Any:
    """Numbers that are equal look equal: whole ones as hexadecimal digits, the others as their repr."""
    if isinstance(number, float) and not number.is_integer():  # so are NaN and the infinities
        return ["float", repr(number)]
    return ["int", format(int(number), "x")]
