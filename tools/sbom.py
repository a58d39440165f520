"""Writes the bill of materials of what requirements/*.txt lock: build/sbom/*.cdx.json, CycloneDX 1.6. `make sbom`.

run.cdx.json is what a node, an agent or a caller runs on; dev.cdx.json is that and what the tests and tools need. Each
component has its version, its package URL, the hashes of the files that may be installed, who wants it, and its
licence as its author wrote it; a licence is known only of what is installed here.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

from tools.lock import FOLDER, ROOT, Locked, entries

BILLS = ("run", "dev")
INTO = ROOT / "build" / "sbom"
LICENCE_CHARS_MAX = 80  # longer is not the licence's name but its text


def licence(name: str) -> License | None:
    """What an installed package says that its licence is."""
    try:
        said = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    classifiers = [each.rpartition(" :: ")[2] for each in said.get_all("Classifier") or () if "License ::" in each]
    for text in (said.get("License-Expression"), said.get("License"), *classifiers):
        if text and len(text) <= LICENCE_CHARS_MAX and text.isprintable():
            return LicenseFactory().make_from_string(text)
    return None


def component(locked: Locked) -> Component:
    """One entry of a lock."""
    url = PackageURL("pypi", None, locked.name, locked.version)
    files = ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION,
        url=XsUri(url.to_string()),
        comment="the files that the lock allows",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=each) for each in locked.hashes],
    )
    found = licence(locked.name)
    return Component(
        name=locked.name,
        version=locked.version,
        type=ComponentType.LIBRARY,
        bom_ref=url.to_string(),
        purl=url,
        licenses=[found] if found is not None else [],
        external_references=[files],
        properties=[Property(name="agentreach:marker", value=locked.marker)] if locked.marker else [],
    )


def bill(text: str) -> Bom:
    """The bill of one lock."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    url = PackageURL("pypi", None, project["name"], project["version"])
    ours = Component(
        name=project["name"],
        version=project["version"],
        type=ComponentType.APPLICATION,
        bom_ref=url.to_string(),
        purl=url,
        licenses=[LicenseFactory().make_from_string(project["license"])],
    )
    locked = entries(text)
    components = {each.name: component(each) for each in locked}
    bom = Bom(components=components.values())
    bom.metadata.component = ours
    for wanter in (ours, *components.values()):
        wanted = [components[each.name] for each in locked if wanter.name in each.wanted_by]
        bom.register_dependency(wanter, wanted)
    return bom


def main(into: Path = INTO) -> int:
    """Write the bills."""
    into.mkdir(parents=True, exist_ok=True)
    for name in BILLS:
        bom = bill((FOLDER / f"{name}.txt").read_text())
        file = into / f"{name}.cdx.json"
        outputter = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6)
        outputter.output_to_file(str(file), allow_overwrite=True, indent=2)
        print(file)
    return 0


def _folder(arguments: Sequence[str]) -> Path:
    return Path(arguments[0]) if arguments else INTO


if __name__ == "__main__":
    sys.exit(main(_folder(sys.argv[1:])))
