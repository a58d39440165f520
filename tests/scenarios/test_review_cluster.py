"""Found by reading the cluster's code as the failure: each of these failed before."""

from __future__ import annotations

from dataclasses import replace

from tests.scenarios.test_sessions_between_nodes import KEY, ask, nodes_of
from tests.support.keepers import Keeper


def test_a_process_that_brings_a_session_along_serves_it_only_if_the_store_says_so() -> None:
    cores = nodes_of(3)
    home, other, entry = cores.nodes
    former, caller = Keeper(home, "former"), entry.caller()
    first = ask(caller)
    former.handle_all()
    heir = Keeper(entry, "heir")
    key = (*KEY, "s")
    pin = home.pins[key]
    home.pins[key] = replace(
        pin, agent_id=heir.agent_id, incarnation=heir.process.incarnation, epoch=pin.epoch + 1000, home=entry.node_id
    )  # it was away for so long that another node gave its session away
    process = former.process
    home.processes.remove(process)
    process.cut()
    process.forget()
    process.core = former.core = other
    other.processes.append(process)
    process.connect(holds=[("s", caller.reply_to(first).epoch)])
    message = ask(other.caller("local"))
    cores.advance(1)
    assert not process.has(message) and heir.process.has(message)
    heir.handle_all()
    cores.assert_settled()
