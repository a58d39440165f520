"""The bill of materials names what is locked."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tools.lock import entries
from tools.sbom import BILLS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def bills(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    into = tmp_path_factory.mktemp("sbom")
    subprocess.run([sys.executable, "-W", "error", "-m", "tools.sbom", str(into)], cwd=ROOT, check=True, timeout=60)
    return {name: json.loads((into / f"{name}.cdx.json").read_text()) for name in BILLS}


@pytest.mark.parametrize("name", BILLS)
def test_the_bill_names_each_dependency_with_its_version_and_hashes(bills: dict[str, Any], name: str) -> None:
    listed = {
        each["name"]: (each["version"], {digest["content"] for digest in each["externalReferences"][0]["hashes"]})
        for each in bills[name]["components"]
    }
    locked = entries((ROOT / "requirements" / f"{name}.txt").read_text())
    assert listed == {each.name: (each.version, set(each.hashes)) for each in locked}


def test_what_a_deployment_installs_is_what_the_project_asks_for(bills: dict[str, Any]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bill = bills["run"]
    ours = bill["metadata"]["component"]
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert (ours["name"], ours["version"]) == (project["name"], project["version"])
    wants = {each["ref"]: each.get("dependsOn", []) for each in bill["dependencies"]}
    assert len(wants[ours["bom-ref"]]) == len(project["dependencies"])


@pytest.mark.parametrize("name", BILLS)
def test_somebody_wants_each_component(bills: dict[str, Any], name: str) -> None:
    wants = {each["ref"]: each.get("dependsOn", []) for each in bills[name]["dependencies"]}
    reached, todo = set(), [bills[name]["metadata"]["component"]["bom-ref"]]
    while todo:
        ref = todo.pop()
        if ref not in reached:
            reached.add(ref)
            todo += wants[ref]
    assert {each["bom-ref"] for each in bills[name]["components"]} <= reached


def test_each_component_of_a_deployment_has_a_licence(bills: dict[str, Any]) -> None:
    installed = [each for each in bills["run"]["components"] if "properties" not in each]
    assert [each["name"] for each in installed if not each.get("licenses")] == []
