"""Plays: the store has lost pins of sessions that live on. No session has two owners; none loses its state for it."""

from __future__ import annotations

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from reach.core import owners
from reach.core.moving import Holder
from tests.scenarios.test_sessions_between_nodes import KEY, ask, lane_at, nodes_of, notes_of, release
from tests.support.cores import Cores, NodeCore
from tests.support.keepers import Keeper


def played() -> tuple[Cores, Keeper, Keeper, str]:
    """A session that an agent of the first node has, and which another node, by a new pin, gave to an agent of its."""
    cores = nodes_of(2)
    home, other = cores.nodes
    old, caller = Keeper(home, "old"), home.caller()
    first = ask(caller)
    old.handle_all()
    new = Keeper(other, "new")
    return cores, old, new, first


def give_away(home: NodeCore, other: NodeCore, *, later: int = 10, since: int = 0) -> Holder:
    agent = other.attachment("keeper/new").agent
    epoch = home.pins[*KEY, "s"].epoch + later
    holder = Holder("keeper/new", agent.incarnation, epoch, home=other.node_id, since=since or epoch)
    home.pins[*KEY, "s"] = holder
    return holder


def test_an_owner_whose_session_was_given_away_is_stopped_and_the_next_message_follows_the_pin() -> None:
    cores, old, new, first = played()
    home, other = cores.nodes
    caller = home.processes[-1]
    epoch = caller.reply_to(first).epoch
    running, waiting = ask(caller, epoch=epoch), ask(caller, epoch=epoch)
    lane = lane_at(home)
    assert lane is not None
    holder = give_away(home, other)
    with home.step() as state:
        owners.taken(state, lane, lane.epoch, holder)
        assert not state.pins
    home.pump()
    error = caller.error_of(running)
    assert error.code == codes.AGENT_LOST and error.may_have_executed
    old.handle_all()  # which counts for nothing
    new.handle_all()
    assert len(caller.replies_to(running)) == 1
    reply = caller.reply_to(waiting)
    assert (reply.source, reply.epoch, reply.session_event) == ("keeper/new", holder.epoch, pb.LOST)
    assert notes_of(caller, waiting) == [waiting]
    assert home.logged("another owner has a session of this node")
    cores.advance(3)
    cores.assert_settled()


def test_a_session_that_somebody_took_with_its_state_is_told_moved() -> None:
    cores, _old, new, _first = played()
    home, other = cores.nodes
    caller = home.processes[-1]
    lane = lane_at(home)
    assert lane is not None
    holder = give_away(home, other, since=lane.since)
    with home.step() as state:
        owners.taken(state, lane, lane.epoch, holder)
    home.pump()
    message = ask(caller)
    new.handle_all()
    assert caller.reply_to(message).session_event == pb.MOVED
    cores.assert_settled()


def test_a_pin_of_a_store_that_was_restored_has_a_smaller_epoch_and_is_followed_all_the_same() -> None:
    cores, _old, new, first = played()
    home, other = cores.nodes
    caller = home.processes[-1]
    lane = lane_at(home)
    assert lane is not None
    holder = give_away(home, other, later=-1000)
    with home.step() as state:
        owners.taken(state, lane, lane.epoch, holder)
    home.pump()
    message = ask(caller, epoch=caller.reply_to(first).epoch)
    new.handle_all()
    reply = caller.reply_to(message)
    assert (reply.source, reply.epoch, reply.session_event) == ("keeper/new", holder.epoch, pb.LOST)
    cores.assert_settled()


def test_a_move_that_is_under_way_ends_when_the_session_was_given_away() -> None:
    cores, old, new, _first = played()
    home, other = cores.nodes
    caller = home.processes[-1]
    lane = lane_at(home)
    assert lane is not None
    ask(caller)
    assert release(home) is None and lane.move is not None
    holder = give_away(home, other)
    with home.step() as state:
        owners.taken(state, lane, lane.epoch, holder)
        assert lane.move is None
    home.pump()
    message = ask(caller)
    old.handle_all()
    new.handle_all()
    assert caller.reply_to(message).source == "keeper/new"
    cores.advance(3)
    cores.assert_settled()


def test_news_of_an_epoch_that_is_over_changes_nothing() -> None:
    cores, old, _new, first = played()
    home, other = cores.nodes
    caller = home.processes[-1]
    lane = lane_at(home)
    assert lane is not None
    pin = home.pins[*KEY, "s"]
    holder = give_away(home, other)
    home.pins[*KEY, "s"] = pin
    running = ask(caller)
    with home.step() as state:
        owners.taken(state, lane, lane.epoch - 1, holder)
    old.handle_all()
    assert notes_of(caller, running) == [first, running]
    cores.assert_settled()


def test_a_session_whose_pin_is_gone_when_it_is_looked_at_keeps_owner_epoch_and_state() -> None:
    cores, old, _new, first = played()
    home, _ = cores.nodes
    caller = home.processes[-1]
    lane = lane_at(home)
    assert lane is not None
    epoch = lane.epoch
    for checkpoint in (False, True):
        if checkpoint:
            old.checkpoint()
        del home.pins[*KEY, "s"]
        lane.verified_at = owners.NEVER
        with home.step() as state:
            state.fence.broken_at = state.now
        message = ask(caller, epoch=epoch)
        old.handle_all()
        reply = caller.reply_to(message)
        assert (reply.source, reply.epoch, reply.session_event) == ("keeper/old", epoch, 0)
        assert notes_of(caller, message)[0] == first
        assert home.pins[*KEY, "s"].epoch == epoch and lane.verified_at == home.state.now
    cores.assert_settled()


def test_a_node_knows_the_pins_of_the_sessions_whose_owners_it_has_and_no_others() -> None:
    cores = nodes_of(2)
    home, entry = cores.nodes
    keeper, caller = Keeper(home, "k"), entry.caller()
    ask(caller, "a")
    ask(caller, "b")
    keeper.handle_all()
    assert sorted(lane.key[3] for lane in home.state.pins.values()) == ["a", "b"] and not entry.state.pins
    assert all(owners.pin_key(lane.key) == key for key, lane in home.state.pins.items())
    keeper.process.leave()
    cores.advance(3)
    assert not home.state.pins
    cores.assert_settled()
