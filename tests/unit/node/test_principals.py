"""The table of principals: read strictly, and told where it is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reach.core.access import Rights
from reach.node.config import Config, ConfigError, load
from reach.node.principals import named
from tests.support.tls import Issuer

NAME = "spiffe://acme.org/ns/prod/extractor"


def test_an_entry_says_who_it_is_and_what_it_may() -> None:
    (entry,) = named(
        {
            NAME: {
                "principal": "extractor",
                "tenant": "acme",
                "envs": ["production"],
                "may_register": ["extractor"],
                "may_call": ["planner", "cap:ner"],
                "may_publish": ["docs/*"],
                "may_subscribe": ["docs/new"],
                "scrape": True,
            }
        }
    )
    assert (entry.name, entry.principal, entry.tenant, entry.node) == (NAME, "extractor", "acme", False)
    rights = entry.rights
    assert rights.envs == {"production"} and rights.scrape and not rights.admin
    assert rights.register.texts == ("extractor",) and rights.call.texts == ("planner", "cap:ner")
    assert rights.publish.texts == ("docs/*",) and rights.subscribe.texts == ("docs/new",)


def test_an_empty_entry_is_known_and_may_do_nothing() -> None:
    (entry,) = named({NAME: {}})
    assert entry.rights == Rights() and entry.principal == ""
    assert not entry.rights.call.texts and not entry.rights.admin


def test_a_node_has_no_rights_besides() -> None:
    (entry,) = named({NAME: {"node": True}})
    assert entry.node and entry.tenant == ""
    with pytest.raises(ValueError, match="no rights besides"):
        named({NAME: {"node": True, "admin": True}})


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        ("spiffe://acme.org*", {}, "no SPIFFE id"),
        (NAME, "extractor", "allowed: a table"),
        (NAME, {"may_registr": []}, "did you mean may_register"),
        (NAME, {"zzz": 1}, "there are principal"),
        (NAME, {"admin": "yes"}, "true or false"),
        (NAME, {"principal": ""}, "principal is ''"),
        (NAME, {"principal": "a b"}, "principal is 'a b'"),
        (NAME, {"tenant": "a/b"}, "tenant is 'a/b'"),
        (NAME, {"may_call": "planner"}, "a list of texts"),
        (NAME, {"may_call": [1]}, "a list of texts"),
        (NAME, {"may_call": ["a b"]}, "is no pattern"),
        (NAME, {"may_publish": ["cap:x"]}, "is no pattern"),
        (NAME, {"envs": ["a b"]}, "is no env"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(name: str, fields: Any, told: str) -> None:
    with pytest.raises(ValueError, match="principals") as refused:
        named({name: fields})
    assert told in str(refused.value) and "\n" not in str(refused.value)


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "certs")


def loaded(issuer: Issuer, tmp_path: Path, text: str = "", **changed: Any) -> Config:
    settings = {**issuer.settings(), **changed}
    del settings["principals"]
    file = tmp_path / "reach.toml"
    file.write_text("".join(f'{name} = "{value}"\n' for name, value in settings.items() if value) + text)
    return load(file, environment={})


def refused(issuer: Issuer, tmp_path: Path, text: str = "", **changed: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(issuer, tmp_path, text, **changed)
    assert "\n" not in str(caught.value)
    return str(caught.value)


ENTRY = f'[principals."{NAME}"]\nmay_call = ["*"]\n'


def test_mtls_needs_a_certificate_an_authority_and_somebody_to_let_in(issuer: Issuer, tmp_path: Path) -> None:
    assert loaded(issuer, tmp_path, ENTRY).principals[NAME] == {"may_call": ["*"]}
    assert "tls_ca" in refused(issuer, tmp_path, ENTRY, tls_ca="")
    assert "tls_key go together" in refused(issuer, tmp_path, ENTRY, tls_key="")
    assert "nobody could get in" in refused(issuer, tmp_path)
    assert "looks at no certificate" in refused(issuer, tmp_path, ENTRY, auth="none")
    assert "is no pattern" in refused(issuer, tmp_path, f'[principals."{NAME}"]\nmay_call = ["a b"]\n')


def test_the_table_stands_in_a_file_only() -> None:
    with pytest.raises(ConfigError, match="configuration file only"):
        load(environment={"REACH_PRINCIPALS": "x"})


def test_a_certificate_that_would_not_do_is_told_when_the_configuration_is_read(issuer: Issuer, tmp_path: Path) -> None:
    issuer.node(lasts_s=-1)
    assert "has expired" in refused(issuer, tmp_path, ENTRY)
    other = issuer.node("other")
    assert "does not belong" in refused(issuer, tmp_path, ENTRY, tls_cert=str(other.cert))
    assert "cannot read the TLS file" in refused(issuer, tmp_path, ENTRY, tls_cert="/nowhere/node.pem")


@pytest.mark.parametrize("name", ["listen", "http"])
def test_an_address_that_others_reach_needs_tls_and_auth_or_a_word(issuer: Issuer, tmp_path: Path, name: str) -> None:
    address = {name: "0.0.0.0:7999"}
    assert loaded(issuer, tmp_path, ENTRY, **address).insecure is False
    files = {"tls_cert": "", "tls_key": "", "tls_ca": ""}
    assert "without auth and tls_cert" in refused(issuer, tmp_path, **address, auth="none", **files)
    assert "without auth:" in refused(issuer, tmp_path, **address, auth="none")
    assert loaded(issuer, tmp_path, "insecure = true\n", **address, auth="none", **files).insecure
