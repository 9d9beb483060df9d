"""What a device gets: the wheel without extras in a fresh environment. Source: docs/design.md 2; docs/guides/device.md.

Needs a package index; EDGEFL_OFFLINE=1 skips it by name.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from tests.forks import Forks
from tests.house.test_packaging import DEVICE
from tests.shared import Shared

from edgefl_trainer.data.lesions import draw_lesion

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.skipif(os.environ.get("EDGEFL_OFFLINE") == "1", reason="EDGEFL_OFFLINE is set: no package index"),
]

MAX_PACKAGES = 17
NOT_ON_A_DEVICE = {
    "torch",
    "torchvision",
    "timm",
    "onnx",
    "onnxscript",
    "scikit-learn",
    "scipy",
    "sqlalchemy",
}
HEAVY = {
    "edgefl-train": (["methods"], "trainer"),
    "edgefl-export": (["bundle", ".", "--site", "a", "--sign", ".", "-o", "x.edgefl"], "export"),
    "edgefl-coordinator": (["serve"], "coordinator"),
}
Outcome = subprocess.CompletedProcess[str]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python")  # then the program that it works on


def succeed(*words: str | Path, **options: object) -> Outcome:
    """Run a command that must succeed."""
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, timeout=600, **options)
    assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}"
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wheel")


@pytest.fixture(scope="module")
def wheel(root: Path, shared: Shared) -> Path:
    """The wheel of this checkout, and beside it its bill of materials, as `make wheel` leaves them."""

    def build(place: Path) -> None:
        made = (f"PYTHON={sys.executable}", f"DIST={place}/dist", f"WORK={place}/work")
        succeed("make", "--directory", root, "wheel", *made)

    (built,) = shared.made("wheel", build).glob("dist/edgefl_derm-*.whl")
    return built


@pytest.fixture(scope="module")
def device(root: Path, shared: Shared, wheel: Path) -> Path:
    """The `bin` of a fresh environment: dependencies by hash, then the wheel, whose own requirements must then hold."""

    def install(place: Path) -> None:
        succeed(sys.executable, "-m", "venv", "--without-pip", place)
        pip = [*PIP, place / "bin/python", "install", "--quiet", "--no-compile"]
        if sys.platform == "linux" and sys.version_info < (3, 14):
            succeed(*pip, "--require-hashes", "--only-binary=:all:", "-r", root / "requirements-device.txt")
        succeed(*pip, "--constraint", root / "constraints.txt", wheel)

    return shared.made("wheel-environment", install) / "bin"


@pytest.fixture(scope="module")
def outside(folder: Path) -> Callable[..., Outcome]:
    """Run a command with nothing of this checkout in its environment."""
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TMPDIR") if name in os.environ}

    def run(*words: str | Path, path: Path) -> Outcome:
        environment = {**kept, "PATH": f"{path}:/usr/bin:/bin", "HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            list(map(str, words)),
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return run


def test_the_wheel_holds_the_packages_and_no_more(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
        assert archive.testzip() is None
    packages = {
        "edgefl_protocol",
        "edgefl_exchange",
        "edgefl_trainer",
        "edgefl_export",
        "edgefl_client",
        "edgefl_coordinator",
    }
    assert {top for top in tops if not top.endswith(".dist-info")} == packages


def test_no_file_of_another_licence_is_in_the_wheel(root: Path, wheel: Path) -> None:
    """docs/decisions/0021: what is CC BY-NC stays in the repository, so the wheel is Apache-2.0 and says so."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        told = archive.read(metadata).decode()
        shipped = [name for name in names if "/backbones/" in name]
        assert archive.read(shipped[0]) == (root / "backbones/drawn-lesions-84.safetensors").read_bytes()
    assert [Path(name).name for name in shipped] == ["drawn-lesions-84.safetensors"]
    assert not [name for name in names if "derm-vit" in name]
    assert "License-Expression: Apache-2.0\n" in told and "NC" not in told.partition("\n\n")[0]


def test_the_pages_count_the_packages_that_a_device_installs() -> None:
    """README and guide say one number: the pins of requirements-device.txt, and the wheel itself."""
    root = Path(__file__).parents[2]
    count = 1 + len(re.findall(r"(?m)^[a-z][\w.-]*==", (root / "requirements-device.txt").read_text()))
    assert f"{count} packages with this one" in (root / "README.md").read_text()
    assert f"{count} packages with itself" in (root / "docs/guides/device.md").read_text()


def test_the_bill_of_materials_is_what_a_device_installs(wheel: Path, device: Path) -> None:
    """docs/security.md check 72: every package that pip installed, at that version, with hashes and what it needs."""
    bill = json.loads(wheel.with_suffix(".cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    root = bill["metadata"]["component"]
    assert root["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    listed = succeed(*PIP, device / "python", "list", "--format=json")
    installed = {entry["name"].lower().replace("_", "-"): entry["version"] for entry in json.loads(listed.stdout)}
    parts = [root, *bill["components"]]
    told = {part["name"]: part["version"] for part in parts}
    assert told == {name: version for name, version in installed.items() if name not in {"pip", "setuptools", "wheel"}}
    assert all(part["licenses"] and part["hashes"] and part["purl"].startswith("pkg:pypi/") for part in parts)
    needs = {one["ref"]: one.get("dependsOn", []) for one in bill["dependencies"]}
    assert {ref.partition("@")[0] for ref in needs[root["bom-ref"]]} == DEVICE
    assert set(needs) == {part["bom-ref"] for part in parts}


def test_a_wheel_says_where_the_other_backbone_is(device: Path, outside) -> None:
    """docs/decisions/0021: with nothing of a checkout near it."""
    look = (
        "from edgefl_trainer.models.shipped import shipped_backbones as found, where_to_get\n"
        "print(*found(), *found().values())\nprint(where_to_get('derm-vit-tiny-84'))"
    )
    done = outside("python", "-c", look, path=device)
    assert done.stdout.startswith("drawn-lesions-84 /") and "EDGEFL_BACKBONES" in done.stdout, done.stderr


def test_at_most_17_packages_and_no_framework(device: Path) -> None:
    """docs/design.md 2: the six dependencies and what they need; pip itself is not counted."""
    listed = succeed(*PIP, device / "python", "list", "--format=json")
    names = {entry["name"].lower() for entry in json.loads(listed.stdout)} - {"pip", "setuptools", "wheel"}
    assert "edgefl-derm" in names and len(names) <= MAX_PACKAGES, sorted(names)
    assert not names & NOT_ON_A_DEVICE
    succeed(*PIP, device / "python", "check")


@pytest.mark.parametrize("name", ["edgefl", *HEAVY])
def test_help_answers_in_the_base_install(name: str, device: Path, outside) -> None:
    """docs/design.md 2."""
    done = outside(name, "--help", path=device)
    assert done.returncode == 0 and "Usage:" in done.stdout and not done.stderr


@pytest.mark.parametrize("name", HEAVY)
def test_a_missing_extra_is_one_sentence(name: str, device: Path, outside) -> None:
    """docs/design.md 2 and 5: status 2, and the sentence names the extra."""
    words, extra = HEAVY[name]
    done = outside(name, *words, path=device)
    assert done.returncode == 2 and not done.stdout
    lines = done.stderr.strip().splitlines()
    assert f"edgefl-derm[{extra}]" in done.stderr and len(lines) == 1, done.stderr


@pytest.fixture(scope="module")
def made_elsewhere(folder: Path, environment, forks: Forks) -> Path:
    """On the GPU side: a run, its bundle, its signer's key, a 4:3 photograph and the trainer's own score of it."""
    place = folder / "elsewhere"
    place.mkdir()

    def typed(*words: str) -> str:
        done = forks.run(words, place, {**environment, "EDGEFL_CACHE": str(place / "cache")})
        assert done.returncode == 0, done.stderr
        return done.stdout

    Image.fromarray(draw_lesion("MEL", site=0, number=3, px=256)[0]).resize((640, 480)).save(place / "photo.jpg")
    data = ("--data", "lesions:sites=2,images=48,px=48")
    typed("edgefl-train", "run", "local", *data, "--preset", "tiny", "--out", "run")
    typed("edgefl-export", "keygen", "signer")
    typed("edgefl-export", "bundle", "run", "--site", "site-1", "--sign", "signer", "-o", "a.edgefl")
    (place / "expected.json").write_text(
        typed("edgefl-train", "predict", "run", "--site", "site-1", "photo.jpg", "--json")
    )
    return place


def test_a_bundle_made_elsewhere_is_scored(device: Path, outside, made_elsewhere: Path) -> None:
    """docs/design.md 2 and 7: alone, the device scores what the trainer scored, within the gates, with a heat map."""
    bundle, photo = made_elsewhere / "a.edgefl", made_elsewhere / "photo.jpg"
    refused = outside("edgefl", "score", photo, "--model", bundle, path=device)
    assert refused.returncode == 3 and re.search(r"[0-9a-f]{64}", refused.stderr)

    trust = ("--trust", made_elsewhere / "signer/signing.pub")
    heatmaps = made_elsewhere / "heatmaps"
    done = outside("edgefl", "score", photo, "--model", bundle, *trust, "--json", "--heatmap", heatmaps, path=device)
    assert done.returncode == 0, done.stderr
    found, expected = json.loads(done.stdout), json.loads((made_elsewhere / "expected.json").read_text())
    assert found["predicted"] == expected["predicted"]
    assert found["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-4)
    assert found["vacuity"] == pytest.approx(expected["vacuity"], abs=1e-4)
    assert found["dissonance"] == pytest.approx(expected["dissonance"], abs=1e-4)
    for name, evidence in expected["evidence"].items():
        assert abs(found["evidence"][name] - evidence) <= 1e-4 * (1 + evidence)
    with Image.open(found["heatmap"]) as drawn:
        assert min(drawn.size) >= 448
