"""What a handler function is: sync or async, plain or a generator, with or without a context, and its data's type."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from agent_sdk.shapes import Decoder, decoder_of

log = logging.getLogger("agent_sdk")


class Handler:
    """A bound handler. `sync` ones run in the pool; `streams` ones yield the items of their reply."""

    __slots__ = ("decode", "fn", "name", "streams", "sync", "wants_context")

    def __init__(self, fn: Callable[..., Any]) -> None:
        call = fn if inspect.isroutine(fn) or inspect.isclass(fn) else type(fn).__call__
        plain = inspect.unwrap(call)
        self.fn = fn
        self.name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
        asynchronous = inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain)
        self.streams = inspect.isasyncgenfunction(plain) or inspect.isgeneratorfunction(plain)
        self.sync = not asynchronous
        parameters = self._parameters(fn)
        self.wants_context = len(parameters) == 2
        self.decode: Decoder | None = decoder_of(annotation_of(plain, parameters[0]))

    def _parameters(self, fn: Callable[..., Any]) -> list[inspect.Parameter]:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.signature(fn)
        parameters = [p for p in signature.parameters.values() if p.kind in kinds]
        needed = [p for p in parameters if p.default is inspect.Parameter.empty]
        if len(needed) > 2 or not parameters:
            raise TypeError(f"handler {self.name}{signature} must take (data) or (data, ctx)")
        return parameters[: max(len(needed), 1)]


def annotation_of(fn: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The type of a parameter; a text annotation is looked up where the function was written."""
    annotation = parameter.annotation
    if not isinstance(annotation, str):
        return annotation
    try:
        names = dict(getattr(fn, "__globals__", {}))
        names.update(inspect.getclosurevars(fn).nonlocals if inspect.isfunction(fn) else {})
        return eval(annotation, names)  # what typing.get_type_hints does, for one parameter
    except Exception as error:  # whatever an annotation may raise: the handler then gets plain data
        log.warning("the annotation %r of handler %s cannot be resolved (%s)", annotation, fn, error)
        return None
