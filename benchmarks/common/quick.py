"""The rule behind every script's ``--quick``."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

A = TypeVar("A")


def apply_quick(args: A, quick: dict[str, Any]) -> A:
    """`args` with the values of `quick` in place of those options that are at their defaults.

    Unchanged unless ``args.quick``. `args` is a dataclass whose fields all have defaults.
    """
    if not args.quick:  # type: ignore[attr-defined]
        return args
    default = type(args)()
    untouched = {k: v for k, v in quick.items() if getattr(args, k) == getattr(default, k)}
    return dataclasses.replace(args, **untouched)  # type: ignore[type-var]
