"""What is wrong with an argument, said where it is given and by its name. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping


def check_text(what: str, value: object) -> None:
    """Raises `TypeError` for what is no text."""
    if not isinstance(value, str):
        raise TypeError(f"{what} must be text, got {value!r}")


def check_whole(what: str, value: object, least: int, most: int) -> None:
    """Raises `TypeError` for what is no whole number, `ValueError` for one out of bounds."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what} must be a whole number, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{what} must be {least} to {most}, got {value}")


def check_seconds(what: str, value: object) -> None:
    """Raises `TypeError` for what is no number, `ValueError` for one that is no time."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{what} must be a number of seconds, got {value!r}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{what} must be a number of seconds, 0 or more, got {value!r}")


def names(what: str, value: object) -> list[str]:
    """The list of texts that a value is. Raises `TypeError` for anything else."""
    if isinstance(value, str | bytes):
        raise TypeError(f"{what} is a list of names, not one text")
    try:
        each: list[str] = list(value)  # type: ignore[call-overload]  # what it is for: any object may be given
    except TypeError:
        raise TypeError(f"{what} must be a list of names, got {value!r}") from None
    for name in each:
        check_text(f"each of {what}", name)
    return each


def check_labels(labels: object) -> None:
    """Raises `TypeError` for what is no mapping of text to text, naming the label."""
    if labels is None:
        return
    if not isinstance(labels, Mapping):
        raise TypeError(f"labels must be a mapping of text to text, got {labels!r}")
    for key, value in labels.items():
        check_text("a label's name", key)
        check_text(f"labels[{key!r}]", value)
