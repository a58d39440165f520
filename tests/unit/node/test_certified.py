"""Whose a certificate is while authorities and time change; no handshake takes place here."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from agentreach.v1.envelope_pb2 import Target
from reach.adapters.dev_certificates import Authority
from reach.core.access import may_call
from reach.core.ports import Change, End, Identity
from reach.node.certified import CertifiedPrincipals
from reach.node.principals import named
from tests.support.certificates import Folder

TABLE = {
    "spiffe://test/a": {"principal": "a", "may_call": ["x"]},
    "spiffe://test/a2": {"principal": "a", "may_call": ["y"]},
    "spiffe://test/team/*": {"may_call": ["x"]},
    "spiffe://test/node": {"node": True},
}


class Desk:
    """Principals with a clock and authorities that a test moves."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.now = time.time()
        self.ca = folder.authority.pem.cert
        self.ended: list[str] = []
        self.how: set[End] = set()
        self.changes = 0
        self.known = CertifiedPrincipals(named(TABLE), lambda: self.ca, lambda: self.now)
        self.known.on_change(self._told)

    def _told(self, change: Change) -> None:
        self.changes += 1
        self.ended += sorted(who.key_id for who, _ in change.ended)
        self.how.update(end for _, end in change.ended)

    def shown(self, name: str) -> bytes:
        tls = self.folder.client(name.replace("/", "-"), f"spiffe://test/{name}")
        assert tls.cert
        return Path(tls.cert).read_bytes()

    def who(self, pem: bytes) -> Identity:
        found = self.known.identify({"x509_pem_cert": [pem]})
        assert isinstance(found, Identity), found
        return found

    def why_not(self, pem: bytes) -> str:
        found = self.known.identify({"x509_pem_cert": [pem]})
        assert isinstance(found, str)
        return found


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(Folder(tmp_path / "certs"))


def test_an_entry_gives_principal_tenant_and_rights(desk: Desk) -> None:
    who = desk.who(desk.shown("a"))
    assert (who.tenant, who.principal) == ("default", "a")
    assert who.rights is not None and who.rights.call.texts == ("x",)
    assert desk.who(desk.shown("node")) == Identity("", "node/spiffe://test/node")


def test_nobody_is_told_with_all_names(desk: Desk) -> None:
    assert "spiffe://test/z" in desk.why_not(desk.shown("z"))
    assert "no certificate" in desk.why_not(b"")
    assert "none" in desk.why_not(b"rubbish")


def test_rights_of_one_principal_in_two_entries_add_up_for_its_actors(desk: Desk) -> None:
    found = desk.known.principals()
    for agent_type in ("x", "y"):
        assert may_call(found["default", "a"], Target(agent_type=agent_type), "").allowed
    assert all(tenant for tenant, _ in found), "a node is no principal"


def test_a_principal_that_is_called_as_its_certificate_is_known_though_it_never_came(desk: Desk) -> None:
    name = "spiffe://test/team/x"
    rights = desk.known.named("default", name)
    assert rights is not None and rights.call.texts == ("x",)
    assert desk.who(desk.shown("team/x")).rights == rights and desk.who(desk.shown("team/x")).principal == name
    for tenant, principal in (
        ("elsewhere", name), ("", name), ("default", "spiffe://test/team/"), ("default", "spiffe://test/z"),
        ("default", "spiffe://test/a"), ("default", "a"), ("", "spiffe://test/node"),
    ):  # fmt: skip
        assert desk.known.named(tenant, principal) is None, (tenant, principal)


def test_a_certificate_ends_with_its_time_once(desk: Desk) -> None:
    pem = desk.shown("a")
    key_id = desk.who(pem).key_id
    desk.known.look()
    assert not desk.ended
    desk.now += 3601
    desk.known.look()
    desk.known.look()
    assert desk.ended == [key_id] and desk.how == {End.CERTIFICATE}
    assert "has expired" in desk.why_not(pem)


def test_a_certificate_ends_with_the_trust_in_its_authority_and_comes_back_with_it(desk: Desk) -> None:
    pem, was = desk.shown("a"), desk.ca
    before = desk.who(pem).key_id
    desk.ca = Authority.made("other", desk.now, 86_400).pem.cert
    desk.known.look()
    assert desk.ended == [before]
    assert "no authority" in desk.why_not(pem)
    desk.ca = was
    desk.known.look()
    assert desk.who(pem).key_id != before, "what was ended stays so; this is another stay"


def test_more_authorities_end_nothing(desk: Desk) -> None:
    pem = desk.shown("a")
    desk.who(pem)
    desk.ca += Authority.made("other", desk.now, 86_400).pem.cert
    desk.known.look()
    assert not desk.ended and desk.who(pem).principal == "a"


def test_who_comes_for_the_first_time_after_a_change_is_checked_by_what_is_trusted_now(desk: Desk) -> None:
    """Its connection may be older than the change."""
    desk.ca = Authority.made("other", desk.now, 86_400).pem.cert
    desk.known.look()
    assert "no authority" in desk.why_not(desk.shown("a"))


# ---- other entries ----


def test_whose_entry_is_taken_out_is_out_and_others_go_on(desk: Desk) -> None:
    gone, stays = desk.shown("a"), desk.shown("team/x")
    key_id = desk.who(gone).key_id
    before = desk.who(stays)
    assert not desk.known.exchange(named({name: TABLE[name] for name in TABLE if name != "spiffe://test/a"}))
    assert desk.ended == [key_id] and desk.how == {End.CHANGED}
    assert "spiffe://test/a" in desk.why_not(gone)
    assert desk.who(stays) is before, "who is the same as before is not disturbed"
    found = desk.known.principals()
    assert not may_call(found["default", "a"], Target(agent_type="x"), "").allowed, "nor is it an actor by that entry"


def test_whose_entry_says_something_else_comes_anew_with_what_it_says_now(desk: Desk) -> None:
    for change in ({"may_call": ["y"]}, {"tenant": "acme"}, {"principal": "else"}, {"envs": ["staging"]}):
        desk.known.exchange(named(TABLE))
        pem = desk.shown("a")
        before, desk.ended = desk.who(pem), []
        desk.known.exchange(named(TABLE | {"spiffe://test/a": TABLE["spiffe://test/a"] | change}))
        assert desk.ended == [before.key_id], change
        after = desk.who(pem)
        assert (after, after.rights) != (before, before.rights) and after.key_id != before.key_id


def test_what_is_named_by_its_certificate_follows_its_entry(desk: Desk) -> None:
    name = "spiffe://test/team/x"
    desk.known.exchange(named(TABLE | {"spiffe://test/team/*": {"may_call": ["y"]}}))
    rights = desk.known.named("default", name)
    assert rights is not None and rights.call.texts == ("y",)
    desk.known.exchange(named({"spiffe://test/a": {}}))
    assert desk.known.named("default", name) is None


def test_a_node_that_is_none_any_more_is_told_of(desk: Desk) -> None:
    desk.who(desk.shown("node"))
    assert desk.known.exchange(named({name: TABLE[name] for name in TABLE if name != "spiffe://test/node"}))
    assert not desk.known.exchange(named(TABLE)), "who comes in is no reason to end anything"


def test_the_same_entries_end_nothing(desk: Desk) -> None:
    who = desk.who(desk.shown("a"))
    desk.known.exchange(named(dict(reversed(TABLE.items()))))
    assert not desk.ended and desk.who(desk.shown("a")).principal == who.principal
