"""Write the bill of materials of a wheel: CycloneDX 1.6 as JSON, beside the wheel.

    python .ci/bill_of_materials.py dist/edgefl_derm-0.1.0-py3-none-any.whl report.json

The report is that of `pip install --dry-run --ignore-installed --report report.json -r requirements-device.txt`: what a
device would install. Each package stands there with version, licence, hashes of every file that may be installed
(requirements-device.txt) and what it needs itself. The same inputs give the same bytes. Needs cyclonedx-python-lib.
Source: docs/security.md, attack list 22 and check 72.
"""

import hashlib
import json
import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
NAMESPACE = uuid.UUID("5b0c0a33-58ae-4d0e-a3ea-0b2c2a1e7d5f")  # of the serial numbers below, drawn once


def main() -> None:
    """Write the bill and say where it is."""
    wheel, report = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    packages = [one["metadata"] for one in report["install"]]
    out = wheel.with_suffix(".cdx.json")
    out.write_text(bill(wheel, packages, report["environment"]), encoding="utf-8")
    print(f"{out}: {len(packages) + 1} packages on a device, with edgefl-derm")


def bill(wheel: Path, packages: list[Mapping[str, Any]], environment: Mapping[str, str]) -> str:
    """Return the bill of a wheel and of the packages whose metadata pip reports, as JSON."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    ours = metadata_of(wheel)
    hashes = {**pinned_hashes(), canonicalize_name(ours["name"]): [digest]}
    root, *parts = [component(one, hashes) for one in (ours, *packages)]
    made = Bom(components=parts)
    made.metadata.component = root
    made.metadata.tools.components.clear()
    known = {part.name: part for part in parts}
    for one, whole in zip((ours, *packages), (root, *parts), strict=True):
        needed = sorted(set(needs(one, environment)) & known.keys())
        made.register_dependency(whole, [known[name] for name in needed])
    told = json.loads(JsonV1Dot6(made).output_as_string())
    told["serialNumber"] = f"urn:uuid:{uuid.uuid5(NAMESPACE, digest)}"
    told["metadata"].pop("timestamp", None)  # the wheel's bytes alone say which bill it is
    return json.dumps(told, indent=1, sort_keys=True) + "\n"


def metadata_of(wheel: Path) -> Mapping[str, Any]:
    """Return the metadata of a wheel under the names that pip's report gives them."""
    with ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        found = HeaderParser().parsestr(archive.read(name).decode())
    return {
        "name": found["Name"],
        "version": found["Version"],
        "license_expression": found["License-Expression"],
        "requires_dist": found.get_all("Requires-Dist", []),
    }


def component(metadata: Mapping[str, Any], hashes: Mapping[str, list[str]]) -> Component:
    """Return one package of the bill."""
    name, version = canonicalize_name(metadata["name"]), metadata["version"]
    licence = metadata.get("license_expression") or from_classifiers(metadata) or metadata.get("license")
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=f"{name}@{version}",
        purl=PackageURL("pypi", None, name, version),
        licenses=[LicenseFactory().make_from_string(licence)] if licence else [],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=one) for one in hashes.get(name, [])],
    )


def from_classifiers(metadata: Mapping[str, Any]) -> str | None:
    """Return the licence that a package's classifiers name."""
    names = [one.rpartition(" :: ")[2] for one in metadata.get("classifier", []) if one.startswith("License :: ")]
    return " and ".join(names) or None


def needs(metadata: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[str]:
    """Give the names that a package needs without extras."""
    for line in metadata.get("requires_dist", []):
        one = Requirement(line)
        if one.marker is None or one.marker.evaluate({**environment, "extra": ""}):
            yield canonicalize_name(one.name)


def pinned_hashes() -> Mapping[str, list[str]]:
    """Return the hashes of every file that requirements-device.txt lets a device install, by name."""
    text = (ROOT / "requirements-device.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return {pin.partition("==")[0]: re.findall(r"sha256:([0-9a-f]{64})", " ".join(rest)) for pin, *rest in lines}


if __name__ == "__main__":
    main()
