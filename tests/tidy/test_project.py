"""The project's own files: what a newcomer and a packager rely on."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest

from tests.tidy.sources import ROOT, sources

TARGETS = ("setup", "run", "test", "check", "bench", "sim", "fuzz", "soak", "proto", "lock", "audit", "sbom", "fmt")
PAGES = (
    "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "docs/tutorial.md",
    "docs/howto/operate.md", "docs/howto/write-an-agent.md", "docs/howto/callbacks.md", "docs/howto/dead-letters.md",
    "docs/howto/simulate.md",
    "docs/reference/settings.md", "docs/reference/limits.md",
    "docs/reference/metrics.md", "docs/reference/errors.md", "docs/reference/cli.md", "docs/design/behaviour.md",
    "docs/design/contract.md", "docs/design/house.md", "docs/design/cluster.md",
)  # fmt: skip
WITHOUT_A_WORD = frozenset({"pytest", "ruff", "mypy", "import-linter"})
"""Tools that everybody knows, and the types-… packages beside what they are the types of."""


def pyproject() -> str:
    return (ROOT / "pyproject.toml").read_text()


def unexplained(text: str) -> list[str]:
    """Dependencies without a comment that says what they are for."""
    listed = re.findall(r'^    "([A-Za-z0-9._-]+)[^"\n]*",?[ ]*(#.*)?$', text, re.MULTILINE)
    return [
        name for name, comment in listed
        if not comment and name not in WITHOUT_A_WORD and not name.startswith(("types-", "grpcurl", "nats"))
    ]  # fmt: skip


def test_every_dependency_says_what_it_is_for() -> None:
    dependencies, groups = pyproject().split("[dependency-groups]")
    assert unexplained(dependencies.split("dependencies = [")[1].split("]")[0]) == []
    assert unexplained(groups.split("[tool.")[0]) == []


def test_a_dependency_without_a_word_is_found() -> None:
    assert unexplained('    "leftpad>=1",\n    "click>=8",  # the command line\n') == ["leftpad"]


def test_the_lower_bound_of_protobuf_is_the_version_of_the_generated_code() -> None:
    generated = (ROOT / "proto/agentreach/v1/envelope_pb2.py").read_text()
    found = re.search(r"Protobuf Python Version: ([0-9.]+)", generated)
    assert found is not None
    assert f'"protobuf>={found[1]},<8"' in pyproject()


def test_every_package_is_typed_and_in_the_wheel() -> None:
    packages = tomllib.loads(pyproject())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages == ["reach", "agent_sdk", "proto/agentreach"]
    assert all((ROOT / package / "py.typed").exists() for package in packages)


@pytest.mark.parametrize("target", TARGETS)
def test_make_has_the_target_with_a_word_of_help(target: str) -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20).stdout
    assert re.search(rf"^{target} +\S", shown, re.MULTILINE)


def test_ci_runs_what_people_run() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert {line for line in lines if line.startswith("make ")} == {"make test", "make sim", "make check"}


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_there_and_not_empty(page: str) -> None:
    assert len((ROOT / page).read_text()) > 200


def test_the_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_links_between_pages_lead_somewhere() -> None:
    dead = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                dead.append(f"{page.relative_to(ROOT)} → {target}")
    assert dead == []


def test_files_that_pages_name_exist() -> None:
    """`reach/core/mesh.py` in a page is a promise."""
    gone = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        named = re.findall(r"`((?:reach|agent_sdk|proto|tools|tests|docs)/[\w./-]+?)/?`", page.read_text())
        gone += [f"{page.relative_to(ROOT)} names {path}" for path in named if not (ROOT / path).exists()]
    assert gone == []


def test_pages_that_the_code_refers_to_exist() -> None:
    """`behaviour.md §4` in a docstring sends the reader somewhere."""
    there = {path.name for path in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]}
    gone = set()
    for source in sources("reach", "agent_sdk", "proto/agentreach", "tools"):
        named = re.findall(r"\b([a-z0-9][a-z0-9-]+\.md)\b", source.text)
        gone |= {f"{source.path} names {page}" for page in named if page not in there}
    assert gone == set()


def test_sections_that_the_code_refers_to_exist() -> None:
    page = (ROOT / "docs/design/behaviour.md").read_text()
    sections = set(re.findall(r"^## (\d+) ", page, re.MULTILINE))
    for source in sources("reach", "agent_sdk", "proto/agentreach", "tools"):
        for number in re.findall(r"behaviour\.md §(\d+)", source.text):
            assert number in sections, source.path


def test_decisions_are_numbered_without_a_gap() -> None:
    numbers = sorted(int(path.name[:4]) for path in (ROOT / "docs/decisions").glob("*.md"))
    assert numbers == list(range(1, len(numbers) + 1))
