"""Data into annotated types, and back."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

import pytest

from agent_sdk.shapes import ShapeError, decoder_of, encode, to_plain
from agentreach.wire import payload


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: float
    y: float = 0.0


@dataclass
class Shape:
    points: list[Point]
    name: str | None = None
    colour: Colour = Colour.RED
    kind: Literal["open", "closed"] = "open"
    tags: dict[str, int] = field(default_factory=dict)
    corner: tuple[int, int] = (0, 0)


class Note(TypedDict):
    text: str
    stars: NotRequired[int]


def fit(kind: Any, value: Any) -> Any:
    decode = decoder_of(kind)
    assert decode is not None
    return decode(value)


def test_nested_types_are_made() -> None:
    shape = fit(Shape, {"points": [{"x": 1}, {"x": 2, "y": 3.5}], "tags": {"a": 1}, "corner": [1, 2], "new": True})
    assert shape == Shape([Point(1.0), Point(2.0, 3.5)], tags={"a": 1}, corner=(1, 2))
    assert fit(Note, {"text": "a", "stars": 2, "more": 1}) == {"text": "a", "stars": 2}


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (Shape, {}, "points: missing"),
        (Shape, {"points": [{"x": "a"}]}, r"points\[0\].x: expected number, got str"),
        (Shape, {"points": [{"x": True}]}, "expected number, got bool"),
        (Shape, {"points": [], "name": 1}, "name: expected text, got int"),
        (Shape, {"points": [], "colour": "blue"}, "colour: 'blue' is none of"),
        (Shape, {"points": [], "kind": "half"}, "kind: expected one of"),
        (Shape, {"points": [], "tags": {"a": "b"}}, "tags.a: expected whole number"),
        (Shape, {"points": [], "corner": [1]}, "corner: expected list of 2"),
        (Shape, [], "data: expected object, got list"),
        (Note, {"stars": 1}, "text: missing"),
    ],
)
def test_a_mismatch_names_the_field(kind: Any, value: Any, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        fit(kind, value)


@pytest.mark.parametrize("annotation", [dict, str, bytes, Any, None, list[int]])
def test_other_annotations_leave_the_data_alone(annotation: Any) -> None:
    assert decoder_of(annotation) is None


def test_what_json_cannot_say_becomes_what_it_can() -> None:
    shape = Shape([Point(1.0)], "a")
    plain = {
        "points": [{"x": 1.0, "y": 0.0}],
        "name": "a",
        "colour": "red",
        "kind": "open",
        "tags": {},
        "corner": (0, 0),
    }
    assert to_plain(shape) == plain
    assert payload.decode(encode({"shape": shape, "set": {1}})) == {"shape": plain | {"corner": [0, 0]}, "set": [1]}
    unchanged = {"a": [1, {"b": None}]}
    assert to_plain(unchanged) is unchanged


def test_content_that_lies_elsewhere_stays_a_name_and_becomes_no_object() -> None:
    blob = payload.Blob("s3://bucket/key", 1 << 40, b"s" * 32)
    assert to_plain(blob) is blob
    assert payload.decode(encode(blob)) == blob
