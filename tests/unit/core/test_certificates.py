"""Whose a certificate is: by its SPIFFE id, else its DNS names; by an entry, or nobody's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reach.core.certificates import Certificate, Known, Named, Names, Unknown, name_fault, spiffe_fault

NS = "spiffe://acme.org/ns/prod"


def who(names: Names, *, uris: tuple[str, ...] = (), dns: tuple[str, ...] = ()) -> str:
    found = names.who(Certificate(uris, dns))
    return found.principal if isinstance(found, Known) else f"nobody: {found.why}"


def test_a_spiffe_id_stands_for_the_principal_of_its_entry() -> None:
    names = Names([Named(f"{NS}/extractor", "extractor"), Named(f"{NS}/planner", "planner")])
    assert who(names, uris=(f"{NS}/extractor",)) == "extractor"
    assert who(names, uris=(f"{NS}/planner",)) == "planner"


def test_a_certificate_without_an_entry_is_nobodys_and_its_names_are_told() -> None:
    found = Names([Named(f"{NS}/extractor")]).who(Certificate((f"{NS}/other",), ("x.acme.org",)))
    assert isinstance(found, Unknown)
    assert f"{NS}/other" in found.why and "x.acme.org" in found.why


def test_nothing_is_known_without_names() -> None:
    names = Names([Named(f"{NS}/*", "any"), Named("*.acme.org", "host")])
    assert who(names).startswith("nobody")
    assert who(Names(), uris=(f"{NS}/a",)).startswith("nobody")


def test_an_entry_with_a_star_takes_the_rest_and_the_longest_entry_wins() -> None:
    names = Names([Named(f"{NS}/*", "any"), Named(f"{NS}/team-a/*", "team-a"), Named(f"{NS}/team-a/lead", "lead")])
    assert who(names, uris=(f"{NS}/x",)) == "any"
    assert who(names, uris=(f"{NS}/x/y",)) == "any"
    assert who(names, uris=(f"{NS}/team-a/y",)) == "team-a"
    assert who(names, uris=(f"{NS}/team-a/lead",)) == "lead"
    assert who(names, uris=(NS,)).startswith("nobody")
    assert who(Names([Named(f"{NS}/team-*")]), uris=(f"{NS}/team-",)).startswith("nobody")


def test_an_entry_without_a_principal_gives_each_its_own_name() -> None:
    names = Names([Named(f"{NS}/*")])
    assert who(names, uris=(f"{NS}/a",)) == f"{NS}/a"
    assert who(names, uris=(f"{NS}/b",)) == f"{NS}/b"


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://acme.org.evil/ns/prod/extractor",
        "spiffe://evil/acme.org/ns/prod/extractor",
        "SPIFFE://acme.org/ns/prod/extractor",
        f"{NS}/extractor/",
        f"{NS}//extractor",
        f"{NS}/../prod/extractor",
        f"{NS}/./extractor",
        f"{NS}/extractor?x",
        f"{NS}/extractor#x",
        f"{NS}/extr%61ctor",
        f"{NS}/extractor\x00",
        "spiffe://user@acme.org/ns/prod/extractor",
        "spiffe://acme.org:1/ns/prod/extractor",
        "spiffe://acme.org",
        "spiffe:///ns/prod/extractor",
        f"{NS}/" + "a" * 2048,
    ],
)
def test_what_only_looks_like_a_spiffe_id_is_nobodys(uri: str) -> None:
    names = Names([Named(f"{NS}/extractor", "extractor"), Named("spiffe://acme.org/*", "any"), Named("*.acme.org")])
    assert who(names, uris=(uri,), dns=("a.acme.org",)).startswith("nobody")


def test_a_spiffe_id_beside_another_uri_is_nobodys() -> None:
    names = Names([Named(f"{NS}/a", "a"), Named(f"{NS}/b", "b")])
    assert "no other URI" in who(names, uris=(f"{NS}/a", f"{NS}/b"))
    assert "no other URI" in who(names, uris=(f"{NS}/a", "https://x"))


def test_dns_names_count_only_without_a_spiffe_id() -> None:
    names = Names([Named(f"{NS}/a", "a"), Named("b.acme.org", "b")])
    assert who(names, uris=(f"{NS}/a",), dns=("b.acme.org",)) == "a"
    assert who(names, uris=(f"{NS}/other",), dns=("b.acme.org",)).startswith("nobody")
    assert who(names, uris=("https://b.acme.org",), dns=("b.acme.org",)) == "b"
    assert who(names, dns=("B.ACME.org",)) == "b"


def test_a_star_of_a_dns_entry_is_one_label() -> None:
    names = Names([Named("*.agents.acme.org", "host")])
    assert who(names, dns=("a.agents.acme.org",)) == "host"
    assert who(names, dns=("a.b.agents.acme.org",)).startswith("nobody")
    assert who(names, dns=("agents.acme.org",)).startswith("nobody")
    assert who(names, dns=("a.agents.acme.org.evil.example",)).startswith("nobody")


def test_a_wildcard_certificate_is_no_identity() -> None:
    names = Names([Named("*.acme.org", "host")])
    assert who(names, dns=("*.acme.org",)).startswith("nobody")


def test_names_of_several_principals_are_nobodys() -> None:
    names = Names([Named("a.acme.org", "a"), Named("b.acme.org", "b"), Named("c.acme.org", "a")])
    assert "several principals" in who(names, dns=("a.acme.org", "b.acme.org"))
    assert who(names, dns=("a.acme.org", "x.acme.org")) == "a"
    assert "several principals" in who(names, dns=("a.acme.org", "c.acme.org")), "two entries may differ in rights"


@pytest.mark.parametrize(
    "name", [f"{NS}/a", f"{NS}/*", f"{NS}/a*", "spiffe://acme.org/*", "a.acme.org", "*.acme.org", "localhost"]
)
def test_names_that_an_entry_may_have(name: str) -> None:
    assert name_fault(name) == ""


@pytest.mark.parametrize(
    "name",
    ["", "*", "spiffe://acme.org", "spiffe://acme.org*", "spiffe://*", "spiffe://*/a", f"{NS}/*/a", "a*", "a.*",
     "*acme.org", "*.*.org", "A.acme.org", "https://acme.org/x", "a b", f"{NS}/a/"],
)  # fmt: skip
def test_names_that_no_entry_may_have_are_told(name: str) -> None:
    assert repr(name) in name_fault(name)


@given(st.text(max_size=60))
def test_no_text_is_known_by_accident(text: str) -> None:
    names = Names([Named(f"{NS}/*", "any")])
    known = not who(names, uris=(text,)).startswith("nobody")
    assert known == (text.startswith(f"{NS}/") and not spiffe_fault(text) and len(text) > len(NS) + 1)
