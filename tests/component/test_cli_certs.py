"""`reach certs dev`: an authority, a node and clients for trying TLS."""

from __future__ import annotations

import ssl
import stat
import time
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agentreach.aio.tls import TlsFiles
from reach.adapters.certificates import NodeCertificate, parsed, trusted
from reach.cli.ending import Ended, Exit
from reach.cli.root import reach


def run(*arguments: str) -> Result:
    return CliRunner().invoke(reach, ["certs", "dev", *arguments])


@pytest.fixture
def made(tmp_path: Path) -> Path:
    done = run("--dir", str(tmp_path / "certs"), "--host", "my.lan", "--client", "extractor")
    assert done.exit_code == 0, done.output
    return tmp_path / "certs"


def test_the_files_are_for_their_owner_alone(made: Path) -> None:
    names = {path.name: stat.S_IMODE(path.stat().st_mode) for path in made.iterdir()}
    assert set(names) == {
        "ca.pem", "ca-key.pem", "node.pem", "node-key.pem", "extractor.pem", "extractor-key.pem", "principals.toml",
    }  # fmt: skip
    assert set(names.values()) == {0o600}


def test_they_hold_the_names_asked_for_and_their_authority_vouches_for_them(made: Path) -> None:
    ca, node = (made / "ca.pem").read_bytes(), (made / "node.pem").read_bytes()
    extractor = (made / "extractor.pem").read_bytes()
    NodeCertificate(TlsFiles(str(made / "ca.pem"), str(made / "node.pem"), str(made / "node-key.pem")))
    assert parsed(node).dns == ("localhost", "my.lan")
    assert parsed(extractor).uris == ("spiffe://reach.local/extractor",)
    assert trusted(node, b"", ca, time.time()) and trusted(extractor, b"", ca, time.time())
    ssl.create_default_context(cafile=str(made / "ca.pem")).load_cert_chain(made / "node.pem", made / "node-key.pem")


def test_what_is_there_is_not_overwritten_without_force(made: Path) -> None:
    before = {path.name: path.read_bytes() for path in made.iterdir()}
    for arguments in (("--client", "extractor"), ()):
        done = run("--dir", str(made), *arguments)
        assert done.exit_code != 0 and "--force" in done.output
    assert {path.name: path.read_bytes() for path in made.iterdir()} == before
    assert run("--dir", str(made), "--client", "extractor", "--force").exit_code == 0
    assert (made / "extractor.pem").read_bytes() != before["extractor.pem"]
    assert (made / "ca.pem").read_bytes() == before["ca.pem"], "whoever trusts it need not be told anew"


def test_a_further_client_is_added_and_edited_entries_stay(made: Path) -> None:
    entries = made / "principals.toml"
    entries.write_text(entries.read_text().replace('principal = "extractor"', 'principal = "mine"'))
    node = (made / "node.pem").read_bytes()
    assert run("--dir", str(made), "--client", "planner").exit_code == 0
    assert (made / "node.pem").read_bytes() == node
    table = tomllib.loads(entries.read_text())["principals"]
    assert table["spiffe://reach.local/extractor"]["principal"] == "mine"
    assert table["spiffe://reach.local/planner"]["may_register"] == ["planner"]


@pytest.mark.parametrize("name", ["ca", "node", "../x", "A b", ""])
def test_a_name_that_cannot_be_a_file_or_an_id_is_refused(tmp_path: Path, name: str) -> None:
    done = run("--dir", str(tmp_path / "certs"), "--client", name)
    assert done.exit_code == 2 and "--client" in done.output
    assert not (tmp_path / "certs").exists()


def test_half_an_authority_is_told(made: Path) -> None:
    (made / "ca-key.pem").unlink()
    done = run("--dir", str(made), "--client", "planner")
    assert done.exit_code != 0 and "cannot sign" in done.output


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--tls-ca", "nowhere.pem"), "cannot read the TLS file nowhere.pem"),
        (("--tls-cert", "extractor.pem"), "give both or none"),
        (("--tls-cert", "extractor.pem", "--tls-key", "node-key.pem"), "node-key.pem does not belong to"),
        (("--tls-ca", "ca.pem", "--tls-cert", "extractor.pem", "--tls-key", "ca.pem"), "ca.pem does not belong to"),
    ],
)
@pytest.mark.parametrize("command", [("agents",), ("call", "--type", "x", "1"), ("test-agent", "--type", "x")])
def test_tls_files_that_cannot_be_used_are_a_mistake_of_usage_before_anything_is_dialled(
    made: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], options: tuple[str, ...], told: str
) -> None:
    monkeypatch.chdir(made)
    done = CliRunner().invoke(reach, [*command, "--url", "127.0.0.1:1", *options], standalone_mode=False)
    assert isinstance(done.exception, Ended), done.output
    assert done.exception.code is Exit.USAGE and told in done.exception.message
    assert not done.output, "nothing was tried"
