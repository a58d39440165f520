"""From decoded JSON to the types a handler is annotated with, and back.

Dataclasses, TypedDicts and (where installed) pydantic models, nested in lists, dicts and unions. A mismatch is a
`ShapeError` naming the field. Unknown keys are ignored, so that a caller may be newer than the agent.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from agentreach.v1.envelope_pb2 import Payload
from agentreach.wire import payload as payloads
from agentreach.wire.payload import Blob, Form


class ShapeError(ValueError):
    """Data that does not fit the annotation; the message names the field."""


Decoder = Callable[[Any], Any]


def decoder_of(annotation: Any) -> Decoder | None:
    """What turns decoded JSON into the annotated type; None where data is handed over as it is."""
    if _is_model(annotation):
        return lambda value: _model(annotation, value)
    if _is_shape(annotation):
        get_type_hints(annotation)  # what cannot be resolved is told when the agent is written, not when it is called
        return lambda value: _fit(annotation, value, "")
    return None


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and hasattr(annotation, "model_validate")


def _is_shape(annotation: Any) -> bool:
    return is_typeddict(annotation) or (isinstance(annotation, type) and dataclasses.is_dataclass(annotation))


def _model(model: Any, value: Any) -> Any:
    try:
        return model.model_validate(value)
    except ValueError as error:  # pydantic.ValidationError is one
        errors = getattr(error, "errors", None)
        if errors is None:
            raise
        first = errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "data"
        raise ShapeError(f"{where}: {first['msg']}") from None


def _fit(kind: Any, value: Any, path: str) -> Any:
    """`value` as a `kind`; raises `ShapeError` naming `path`."""
    if kind is Any or kind is object:
        return value
    if _is_model(kind):
        try:
            return _model(kind, value)
        except ShapeError as error:
            raise ShapeError(f"{path}.{error}" if path else str(error)) from None
    if _is_shape(kind):
        return _record(kind, value, path)
    origin = get_origin(kind)
    if origin is not None:
        return _generic(kind, origin, value, path)
    if kind is None or kind is type(None):
        return _expect(value is None, value, "null", path)
    if kind is float:
        return float(_expect(isinstance(value, int | float) and not isinstance(value, bool), value, "number", path))
    if kind is int:
        return _expect(isinstance(value, int) and not isinstance(value, bool), value, "whole number", path)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(value)
        except ValueError:
            raise ShapeError(f"{path or 'data'}: {value!r:.80} is none of {[item.value for item in kind]}") from None
    if kind in _NAMES:
        return _expect(isinstance(value, kind), value, _NAMES[kind], path)
    return value


_NAMES: dict[Any, str] = {str: "text", bool: "true or false", bytes: "bytes", list: "list", dict: "object"}


def _expect(holds: bool, value: Any, what: str, path: str) -> Any:
    if not holds:
        raise ShapeError(f"{path or 'data'}: expected {what}, got {type(value).__name__}")
    return value


def _record(kind: Any, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise ShapeError(f"{path or 'data'}: expected object, got {type(value).__name__}")
    hints = get_type_hints(kind)
    if is_typeddict(kind):
        needed = kind.__required_keys__
        names = [name for name in hints if name in value or name in needed]
    else:
        made = [f for f in dataclasses.fields(kind) if f.init]
        optional = {
            f.name for f in made if f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
        }
        names = [f.name for f in made if f.name in value or f.name not in optional]
    found: dict[str, Any] = {}
    for name in names:
        where = f"{path}.{name}" if path else name
        if name not in value:
            raise ShapeError(f"{where}: missing")
        found[name] = _fit(hints[name], value[name], where)
    try:
        return kind(**found)
    except (TypeError, ValueError) as error:  # __post_init__ has its own opinion
        raise ShapeError(f"{path or 'data'}: {error}") from None


def _generic(kind: Any, origin: Any, value: Any, path: str) -> Any:
    arguments = get_args(kind)
    if origin in (typing.Annotated, typing.Required, typing.NotRequired):
        return _fit(arguments[0], value, path)
    if origin is Literal:
        return _expect(value in arguments, value, f"one of {list(arguments)}", path)
    if origin is Union or origin is types.UnionType:
        return _union(arguments, value, path)
    if origin in (list, set, frozenset, tuple, Sequence):
        _expect(isinstance(value, list | tuple), value, "list", path)
        kinds: Sequence[Any] = arguments or (Any,)
        if origin is tuple and arguments and arguments[-1] is not Ellipsis:
            _expect(len(value) == len(arguments), value, f"list of {len(arguments)}", path)
        else:
            kinds = [arguments[0] if arguments else Any] * len(value)
        items = [_fit(k, item, f"{path}[{n}]") for n, (k, item) in enumerate(zip(kinds, value, strict=True))]
        return items if origin in (list, Sequence) else origin(items)
    if origin in (dict, Mapping):
        _expect(isinstance(value, dict), value, "object", path)
        return {key: _fit(arguments[1], item, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
    return value


def _union(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    first: ShapeError | None = None
    for kind in kinds:
        try:
            return _fit(kind, value, path)
        except ShapeError as error:
            if first is None or kind is not type(None):
                first = first or error
    raise first or ShapeError(f"{path or 'data'}: fits nothing")


# ---- the other way ----


def encode(value: Any, form: Form = Form.BODY) -> Payload:
    """The payload of any value, dataclasses and models included. Raises `PayloadError`."""
    try:
        return payloads.encode(value, form)
    except payloads.PayloadError:
        plain = to_plain(value)
        if plain is value:
            raise
        return payloads.encode(plain, form)


def to_plain(value: Any) -> Any:
    """`value` with dataclasses, models, enums and sets inside it replaced by what JSON can say."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        plain = {key: to_plain(item) for key, item in value.items()}
        return value if all(plain[key] is value[key] for key in value) else plain
    if kind is list or kind is tuple:
        items = [to_plain(item) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    dump = getattr(value, "model_dump", None)
    if dump is not None and not isinstance(value, type):
        return dump(mode="json")
    if isinstance(value, enum.Enum):
        return to_plain(value.value)
    if isinstance(value, set | frozenset):
        return [to_plain(item) for item in value]
    return value


_PLAIN = frozenset({str, int, float, bool, bytes, type(None), Blob})  # a Blob is a payload of its own kind
