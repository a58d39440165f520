"""The rules of the house that an ordinary linter does not know. Each has an example that breaks it."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.tidy.sources import OURS, WORKSHOP, Function, Source, sources

MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
SLACK = 20  # a module just below the bound keeps its exception: it is on its way out, or back

LONGER_MODULES: dict[str, tuple[int, str]] = {}
"""By path: (how long it may be, why). A module that became shorter is taken out."""

LONGER_FUNCTIONS: dict[str, tuple[int, str]] = {
    "agent_sdk/client.py:Mesh.request": (65, "seventeen keywords, one a line, and what each means"),
}
"""The same for functions, by `path:name`."""

RIMS: dict[str, str] = {
    "agent_sdk/configuring.py:Configuration._tell": "the on_config handler: it is called again",
    "agent_sdk/handlers.py:annotation_of": "whatever a user's annotation may raise; the handler then gets plain data",
    "agent_sdk/dialler.py:Dialler.run": "the link: nobody may wait for a link that a fault of ours ended",
    "agent_sdk/linkstream.py:LinkStream._write": "the link: without a writer it is dialled anew",
    "agent_sdk/intake.py:take": "the link: one envelope must not end it for the others",
    "agent_sdk/linkstream.py:LinkStream._signals": "the link: one signal must not end it",
    "agent_sdk/run.py:run": "the handler call: whatever the user's code raises is an answer",
    "agent_sdk/sessions.py:Sessions._release": "the session's hook: what it raises is told to the node",
    "agent_sdk/sessions.py:Sessions._restore": "the session's hook: what it raises is told to the node",
    "agent_sdk/threads.py:_thread.call": "the handler call in the pool: carried over to the loop",
    "agent_sdk/run.py:_failure": "the handler call: an exception whose own text cannot be had",
    "reach/node/nodelinks.py:NodeCarrier._frame": "the link between nodes: it ends, and the node goes on",
    "reach/node/nodelinks.py:NodeLinks._keep": "the link between nodes: one that fails is dialled again",
    "reach/node/nodelinks.py:DialledNode._write": "the link between nodes: without a writer it is dialled anew",
    "reach/node/forwarding.py:Forwarding._find": "what another node asked for is answered with INTERNAL",
    "reach/adapters/grpc_server/calls.py:query.serve": "the admin call: becomes INTERNAL with a reference",
    "reach/adapters/grpc_server/calls.py:everywhere.serve": "the same of a call that all nodes answer",
    "reach/adapters/grpc_server/calls.py:message_call.serve": "the unary call: becomes INTERNAL with a reference",
    "reach/adapters/grpc_server/calls.py:stream_call.serve": "the streaming call: becomes INTERNAL with a reference",
    "reach/adapters/grpc_server/calls.py:watch.serve": "the streaming call: becomes INTERNAL with a reference",
    "reach/adapters/grpc_server/connect.py:connect.serve": "the link: becomes INTERNAL with a reference",
    "reach/adapters/grpc_server/connect.py:_read": "the link: the transport's own exceptions end the stream",
    "reach/adapters/grpc_server/outcome.py:write": "the link: the transport says in many ways that the peer is gone",
    "reach/adapters/grpc_server/server.py:GrpcServer._look": "the node's health: a fault makes it NOT_SERVING",
    "reach/node/engine.py:Engine._tick": "the peer loop: a fault in one tick is logged, the next one comes",
    "reach/node/streams.py:Stream._next": "the link: a fault ends the link that met it",
}
"""Where `except Exception` may stand, by `path:function`, and why."""

ENVIRONMENT: dict[str, str] = {
    "reach/node/config.py": "the node's settings",
    "agent_sdk/settings.py": "the SDK's settings",
    "proto/agentreach/aio/grpc_runtime.py": "sets what gRPC reads when it is imported",
    "reach/cli/demo.py": "hands the environment on to the processes it starts",
}

NOTHING_HAPPENS = "a moment in which what must not happen would have happened; that can only be waited for"
UNDER_WAY = "a handler in another process is under way: it has no way to say so"
SLEEPS: dict[str, str] = {
    "tests/component/sdk/test_events.py:"
    "test_an_event_to_a_selector_runs_the_handler_and_nobody_answers": NOTHING_HAPPENS,
    "tests/component/sdk/test_handlers.py:"
    "test_nothing_starts_above_max_concurrency_before_the_old_handler_has_really_ended": NOTHING_HAPPENS,
    "tests/component/sdk/test_reconnect.py:test_requests_survive_cuts_in_their_midst_and_run_once": "cuts at any time",
    "tests/component/sdk/test_reconnect.py:test_an_agent_that_was_replaced_does_not_come_back": NOTHING_HAPPENS,
    "tests/component/sdk/test_reconnect.py:"
    "test_a_draining_node_is_left_for_another_once_nothing_is_under_way": NOTHING_HAPPENS,
    "tests/component/sdk/test_requests.py:test_leaving_a_joined_call_leaves_the_others_waiting": NOTHING_HAPPENS,
    "tests/component/sdk/test_streams.py:test_the_request_is_sent_on_entry": NOTHING_HAPPENS,
    "tests/component/sdk/test_streams.py:test_the_producer_waits_for_credit": NOTHING_HAPPENS,
    "tests/integration/test_sdk_over_grpc.py:"
    "test_the_agent_of_the_readme_drains_on_sigterm_and_exits_with_0": UNDER_WAY,
    "tests/integration/test_sdk_over_grpc.py:test_a_second_signal_exits_at_once": UNDER_WAY,
}
"""Tests that may sleep, by `path:function`, and why. A comment on the line of the sleep does as well."""


def too_long(source: Source) -> list[str]:
    """The module, and its functions, beyond their bounds."""
    bound, _ = LONGER_MODULES.get(source.path, (MODULE_LINES_MAX, ""))
    found = [f"{source.path} has {source.lines} lines, more than {bound}"] if source.lines > bound else []
    for name, function in source.functions():
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        bound, _ = LONGER_FUNCTIONS.get(f"{source.path}:{name}", (FUNCTION_LINES_MAX, ""))
        if lines > bound:
            found.append(f"{source.path}:{name} has {lines} lines, more than {bound}")
    return found


def caught(handler: ast.ExceptHandler) -> set[str]:
    """The last parts of the names that an `except` catches; {"everything"} for a bare one."""
    if handler.type is None:
        return {"everything"}
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(kind).rpartition(".")[2] for kind in kinds}


def swallowed_cancellations(source: Source) -> list[str]:
    """`except CancelledError` that does not raise it again.

    A server's handler may tell its caller when the cancelling came from inside: then the raise stands first, under
    `if cancelled_from_outside()` (a handler that ends without a status leaves the caller waiting for ever).
    """
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler) and "CancelledError" in caught(node):
            first, last = node.body[0], node.body[-1]
            from_outside = isinstance(first, ast.If) and ast.unparse(first.test) == "cancelled_from_outside()"
            raises = first.body[-1] if isinstance(first, ast.If) and from_outside else last
            if not (isinstance(raises, ast.Raise) and raises.exc is None):
                found.append(f"{source.path}:{node.lineno}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            found += [f"{source.path}:{node.lineno}" for kind in node.args if "CancelledError" in ast.unparse(kind)]
    return found


def raises_again(handler: ast.ExceptHandler) -> bool:
    """True if it only tidies up: its last statement is a bare `raise`."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def broad_excepts(source: Source) -> list[str]:
    """`path:function` of each `except` of Exception, BaseException or everything that does not raise again."""
    broad = {"Exception", "BaseException", "everything"}
    return [
        f"{source.path}:{function}"
        for function, node in source.inside()
        if isinstance(node, ast.ExceptHandler) and caught(node) & broad and not raises_again(node)
    ]


def reads_environment(source: Source) -> bool:
    """True if it reads or writes the process's environment."""
    return any(isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") for node in ast.walk(source.tree))


def notes_to_self(source: Source) -> list[str]:
    """Lines with a note that something is not finished."""
    marks = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
    return [f"{source.path}:{n}" for n, line in enumerate(source.text.splitlines(), 1) if marks.search(line)]


def sleeping_tests(source: Source) -> list[str]:
    """Tests that sleep as synchronisation: outside of a loop that looks for something, without a comment that says why.

    Not meant: sleep(0), which only lets others run; virtual time; a handler made to be slow, which is a function with
    parameters or a decorator inside the test.
    """
    if "looptime" in source.text:
        return []
    lines = source.text.splitlines()
    found = []
    for name, function in source.functions():
        if name.rpartition(".")[2].startswith("test_"):
            sleeps = [call for call in _own_calls(function.body) if _sleeps(call)]
            found += [f"{source.path}:{name}" for call in sleeps if "#" not in lines[call.lineno - 1]]
    return found


def _own_calls(nodes: list[ast.stmt]) -> list[ast.Call]:
    calls: list[ast.Call] = []
    stack: list[ast.AST] = list(nodes)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.While | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, Function) and (ast.unparse(node.args) or node.decorator_list):
            continue
        if isinstance(node, ast.Call):
            calls.append(node)
        stack += ast.iter_child_nodes(node)
    return calls


def _sleeps(call: ast.Call) -> bool:
    return ast.unparse(call.func) in ("time.sleep", "asyncio.sleep", "sleep") and ast.unparse(call.args[0]) != "0"


def missing_docstrings(source: Source) -> list[str]:
    """Public modules, classes and functions without a word on what they are."""
    found = [] if ast.get_docstring(source.tree) or not source.text.strip() else [source.path]
    named = [node for node in source.tree.body if isinstance(node, Function | ast.ClassDef)]
    public = [node for node in named if not node.name.startswith("_")]
    return found + [f"{source.path}:{node.name}" for node in public if not ast.get_docstring(node)]


# ---- the rules ----


def test_modules_and_functions_are_short() -> None:
    assert [fault for source in sources(*OURS, *WORKSHOP) for fault in too_long_here(source)] == []


def too_long_here(source: Source) -> list[str]:
    """Tests may be long; their functions may not."""
    found = too_long(source)
    return (
        [fault for fault in found if " has " in fault and ":" in fault] if source.path.startswith("tests/") else found
    )


def test_no_exception_to_the_size_is_left_over() -> None:
    lines = {source.path: source.lines for source in sources()}
    assert [path for path in LONGER_MODULES if lines.get(path, 0) <= MODULE_LINES_MAX - SLACK] == []


def test_cancellation_is_caught_only_to_be_raised_again() -> None:
    assert [fault for source in sources() for fault in swallowed_cancellations(source)] == []


def test_everything_is_caught_only_at_the_named_rims() -> None:
    found = {place for source in sources() for place in broad_excepts(source)}
    assert found - set(RIMS) == set()


def test_no_rim_is_left_over() -> None:
    found = {place for source in sources() for place in broad_excepts(source)}
    assert set(RIMS) - found == set()


def test_only_the_settings_read_the_environment() -> None:
    assert {source.path for source in sources() if reads_environment(source)} == set(ENVIRONMENT)


def test_nothing_is_left_to_do() -> None:
    assert [note for source in sources(*OURS, *WORKSHOP) for note in notes_to_self(source)] == []


@cache
def sleeps_found() -> set[str]:
    return {fault for source in sources("tests") if "sleep(" in source.text for fault in sleeping_tests(source)}


def test_no_test_waits_by_sleeping() -> None:
    assert sleeps_found() - set(SLEEPS) == set()


def test_no_allowed_sleep_is_left_over() -> None:
    assert set(SLEEPS) - sleeps_found() == set()


def test_what_is_public_says_what_it_is() -> None:
    assert [fault for source in sources(*OURS, "tools") for fault in missing_docstrings(source)] == []


# ---- the checks can fail ----


def example(text: str) -> Source:
    return Source("reach/node/example.py", text)


def test_a_long_module_is_found() -> None:
    assert too_long(example("x = 1\n" * 401))
    assert not too_long(example("x = 1\n" * 400))


def test_a_long_function_is_found_in_a_class_too() -> None:
    text = "class A:\n    def long(self):\n" + "        x = 1\n" * 60
    assert too_long(example(text)) == ["reach/node/example.py:A.long has 61 lines, more than 60"]


@pytest.mark.parametrize(
    "body",
    [
        "try:\n    f()\nexcept asyncio.CancelledError:\n    pass",
        "try:\n    f()\nexcept (ValueError, CancelledError) as e:\n    raise ValueError from e",
        "with contextlib.suppress(asyncio.CancelledError):\n    f()",
    ],
)
def test_a_swallowed_cancellation_is_found(body: str) -> None:
    assert swallowed_cancellations(example(body))


def test_a_cancellation_that_is_raised_again_is_fine() -> None:
    assert not swallowed_cancellations(example("try:\n    f()\nexcept asyncio.CancelledError:\n    g()\n    raise"))


@pytest.mark.parametrize("kind", ["Exception", "BaseException", "(OSError, Exception)", ""])
def test_a_broad_except_is_found_by_its_function(kind: str) -> None:
    text = f"class A:\n    def f(self):\n        try:\n            g()\n        except {kind}:\n            pass"
    assert broad_excepts(example(text)) == ["reach/node/example.py:A.f"]


def test_a_broad_except_that_only_tidies_up_is_fine() -> None:
    assert not broad_excepts(example("try:\n    f()\nexcept BaseException:\n    g()\n    raise"))


def test_reading_the_environment_is_found() -> None:
    assert reads_environment(example("import os\nx = os.environ['X']"))
    assert reads_environment(example("import os\nx = os.getenv('X')"))


def test_a_note_to_self_is_found() -> None:
    assert notes_to_self(example("x = 1  # TO" + "DO: more"))


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("await asyncio.sleep(0.1)", True),
        ("for _ in range(3):\n        time.sleep(1)", True),
        ("await asyncio.sleep(0)", False),
        ("while not ready():\n        await asyncio.sleep(0.01)", False),
        ("async def slow(data):\n        await asyncio.sleep(1)", False),
        ("async def later():\n        await asyncio.sleep(1)", True),
        ("await asyncio.sleep(1)  # the outage itself", False),
    ],
)
def test_a_test_that_sleeps_is_found(body: str, found: bool) -> None:
    source = Source("tests/unit/test_example.py", f"async def test_x():\n    {body}")
    assert bool(sleeping_tests(source)) is found
