"""One distribution whose base is the device. Source: docs/design.md 2; docs/security.md, attack list 22."""

import ast
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tests.house.conftest import walked

from edgefl_protocol.distribution import DISTRIBUTION, VERSION

DEVICE = {"numpy", "onnxruntime", "pillow", "click", "cryptography", "requests"}
PACKAGES = {
    "protocol/edgefl_protocol",
    "protocol/edgefl_exchange",
    "trainer/edgefl_trainer",
    "export/edgefl_export",
    "edge_client/edgefl_client",
    "coordinator/edgefl_coordinator",
}
TEXTS = {".py", ".md", ".toml", ".txt", ".service", ".svg", ".json", ""}
# Asked of an installer; with an extra; as a file; to be updated.
OTHER_PROJECT = re.compile(
    r"\b(pipx?3?|uv|uvx|conda|poetry) (\S+ )*?['\"]?edgefl(?![-\w.])"
    r"|\bedgefl\[|\bedgefl-\d|\b([Uu]pdate|[Uu]pgrade|newer) edgefl(?!-derm|\w)"
)
# Our name, asked of an index, which does not have it: whoever registers it there would be run. A wheel's file is none.
BARE_NAME = re.compile(
    r"\b(pipx?3?|uv|conda|poetry) (install|add|download|pip install) (\S+ )*?['\"]?edgefl(-|_)derm(?!\S*\.whl)"
)
PINNED_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


@pytest.fixture(scope="module")
def project(root: Path) -> Mapping[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pins(root: Path) -> Mapping[str, Version]:
    """constraints.txt as name → version."""
    return pins_of(root / "constraints.txt")


def pins_of(path: Path) -> dict[str, Version]:
    """A file of pins as name → version."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, exact, version = line.partition("==")
            assert exact, f"{line!r} is no plain pin"
            found[canonicalize_name(name)] = Version(version)
    return found


def requirements(project: Mapping[str, Any]) -> list[Requirement]:
    """Everything pyproject.toml asks for, our own extras left out."""
    extras = project["project"]["optional-dependencies"].values()
    lines = [*project["project"]["dependencies"], *(line for extra in extras for line in extra)]
    lines += [line for group in project["dependency-groups"].values() for line in group]
    return [one for one in map(Requirement, lines) if one.name != DISTRIBUTION]


def test_name_and_version_stand_once(project) -> None:
    """docs/design.md 2: what the commands tell is what `pyproject.toml` builds, also where nothing is installed."""
    assert (project["project"]["name"], project["project"]["version"]) == (DISTRIBUTION, VERSION)


def test_no_text_tells_anyone_to_install_the_other_edgefl(root: Path, tracked) -> None:
    """`edgefl` on the public index is another project, and `edgefl-derm` is none there: no page, error or hint has an
    index asked for either."""
    for path in tracked:
        if path.suffix in TEXTS:
            text = (root / path).read_text(encoding="utf-8", errors="ignore")
            for number, line in enumerate(text.splitlines(), 1):
                assert not OTHER_PROJECT.search(line) and not BARE_NAME.search(line), f"{path}:{number} {line.strip()}"


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("pip install edge" + "fl", True),
        ("pip install 'edge" + "fl[trainer]'", True),
        ("python -m pip install --upgrade edge" + "fl==0.1.0", True),
        ("uv add edge" + "fl", True),
        ("needs edge" + "fl[export]", True),
        ("pip install edge" + "fl-0.1.0-py3-none-any.whl", True),
        ("install a newer edge" + "fl", True),
        ("pip install 'edge" + "fl-derm[trainer]'", True),
        ("pip install --upgrade edge" + "fl_derm", True),
        ("uv add edge" + "fl-derm", True),
        ("pip install --no-deps edgefl_derm-0.1.0-py3-none-any.whl", False),
        ("pip install './edgefl_derm-0.1.0-py3-none-any.whl[trainer]'", False),
        ("install -d -m 700 -o edgefl -g edgefl /var/lib/edgefl", False),
        ("update edgefl-derm", False),
    ],
)
def test_the_search_for_the_other_name_finds_it(line: str, wrong: bool) -> None:
    assert bool(OTHER_PROJECT.search(line) or BARE_NAME.search(line)) is wrong


def test_the_base_dependencies_are_exactly_the_six(project) -> None:
    """docs/design.md 2."""
    assert {Requirement(line).name for line in project["project"]["dependencies"]} == DEVICE


def test_the_design_names_every_extra(project, root: Path) -> None:
    """docs/design.md 2 listed eight of twelve."""
    [listed] = re.findall(r"Extras: ([^.]+)\.", (root / "docs/design.md").read_text(encoding="utf-8"))
    assert set(re.findall(r"`(\w+)`", listed)) == project["project"]["optional-dependencies"].keys()


def test_nothing_is_capped_and_cryptography_is_new_enough(project) -> None:
    """docs/security.md, decision 2: at least 48, and no upper bound anywhere that would keep a repair out."""
    for one in requirements(project):
        assert not any(part.operator in ("<", "<=", "==", "~=", "!=") for part in one.specifier), str(one)
    (crypto,) = [one for one in requirements(project) if one.name == "cryptography"]
    assert not crypto.specifier.contains("47.0") and crypto.specifier.contains("48.0")


def test_every_requirement_is_pinned_at_a_version_it_allows(project, pins, root: Path) -> None:
    """Flower has pins of its own, for it holds other packages back (docs/decisions/0063)."""
    pins = {"flwr": pins_of(root / "constraints-flower.txt")["flwr"], **pins}
    for one in requirements(project):
        assert canonicalize_name(one.name) in pins, f"{one.name} is not in constraints.txt"
        assert one.specifier.contains(pins[canonicalize_name(one.name)]), str(one)


def test_the_device_is_pinned_by_hash(root: Path, pins) -> None:
    """docs/security.md, attack list 22: same versions as constraints.txt, at least one SHA-256 each."""
    text = (root / "requirements-device.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            pin, *hashes = line.split()
            assert hashes and all(PINNED_HASH.fullmatch(one) for one in hashes), pin
            name, _, version = pin.partition("==")
            found[name] = Version(version)
    assert set(found) >= DEVICE and len(found) <= 16
    for name, version in found.items():
        assert pins[name] == version, f"run `make pins`: {name} is {version} here, {pins[name]} in constraints.txt"


def test_third_party_imports_are_declared(project, modules) -> None:
    """Every package that our code imports is a dependency or an extra, not a guest of one."""
    names = {"pillow": "PIL", "scikit-learn": "sklearn", "tomli-w": "tomli_w"}
    declared = {names.get(one.name, one.name).replace("-", "_") for one in requirements(project)}
    guests = {"urllib3", "edgefl_protocol"}  # urllib3: the transport below requests, whose limits we set
    import sys

    for module in modules.values():
        for target, line in module.imports():
            top = target.partition(".")[0]
            if top not in sys.stdlib_module_names and not top.startswith("edgefl_"):
                assert top in declared | guests, f"{module.path}:{line} imports {top}"


def test_folders_hold_the_package_and_nothing_else(root: Path, tracked) -> None:
    """docs/design.md 2: the folder is on the path of an editable install, so a stray module would be importable."""
    for folder in ("protocol", "trainer", "export", "edge_client", "coordinator"):
        inside = {path.parts[1] for path in tracked if path.parts[0] == folder}
        assert {f"{folder}/{name}" for name in inside if name != "README.md"} <= PACKAGES


def test_every_package_is_typed_and_shipped(root: Path, project) -> None:
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(packages) == PACKAGES
    for package in packages:
        assert (root / package / "py.typed").is_file(), package


def test_every_public_object_is_annotated(modules) -> None:
    """Each parameter and result of each function of ours has a type."""
    for module in modules.values():
        for node in walked(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
                assert not bare and node.returns is not None, f"{module.path}:{node.lineno} {node.name} {bare}"
