"""Minimum versions: what is older than we need is refused where it is loaded. Source: docs/security.md check 72."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from edgefl_protocol.distribution import LEAST, needs_extra, require, require_all
from edgefl_protocol.errors import EdgeflError

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
LOADED_BY = {
    "numpy": ("numpy", "edgefl_protocol.tensors"),
    "pillow": ("PIL.Image", "edgefl_protocol.pictures.imaging"),
    "onnxruntime": ("onnxruntime", "edgefl_client.runtime"),
    "cryptography": ("cryptography", "edgefl_protocol.envelopes.keys"),
    "requests": ("requests", "edgefl_exchange.https"),
}


def test_code_and_installer_ask_for_the_same() -> None:
    """`pip` refuses older ones by the wheel's metadata; click, of which nothing foreign is read, is left to it."""
    asked = {one.name: str(one.specifier).removeprefix(">=") for one in map(Requirement, PROJECT["dependencies"])}
    assert asked == {**LEAST, "click": "8.1"}


def test_a_missing_extra_is_installed_from_a_file() -> None:
    """The name is free on the public index, so what is registered there is not ours. The file's name is of PEP 427."""
    wheel = f"{PROJECT['name'].replace('-', '_')}-{PROJECT['version']}-py3-none-any.whl"
    assert needs_extra("heic") == (
        f"edgefl-derm[heic]: pip install './{wheel}[heic]' where the wheel lies, or '.[heic]' in a checkout "
        f"(not found in the environment {sys.prefix})"
    )


@pytest.mark.parametrize("found", ["12.2.9", "12", "9.9", "0", "", "unknown", "12.2.0.post9"])
def test_an_older_version_is_refused(found: str) -> None:
    with pytest.raises(EdgeflError, match=r"pillow .* needs 12\.3 or newer: pip install 'pillow>=12\.3'") as error:
        require("pillow", found)
    assert error.value.code == "library_too_old"


@pytest.mark.parametrize("found", ["12.3", "12.3.0", "12.3.1", "12.10", "13", "13.0.0.dev20260101", "12.3.0+local"])
def test_a_newer_version_is_taken(found: str) -> None:
    """12.10 is newer than 12.3, as numbers and not as text; the oracle is PyPA's own order of versions."""
    require("pillow", found)
    assert Version(found).release >= Version(LEAST["pillow"]).release


def test_what_is_installed_here_suffices() -> None:
    require_all()
    assert all(Version(metadata.version(name)) >= Version(least) for name, least in LEAST.items())


@pytest.mark.parametrize("name", LEAST)
def test_nothing_runs_with_an_older_library(name: str) -> None:
    """Each is judged where it is loaded: the module that calls it cannot be imported."""
    library, module = LOADED_BY[name]
    code = f"import {library}\n{library.partition('.')[0]}.__version__ = '0.9'\nimport {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"{name} 0.9 is installed" in done.stderr


def test_a_command_says_so_in_one_sentence(tmp_path: Path) -> None:
    """cryptography before 48 has no HPKE, so its import fails first; the sentence says why."""
    code = (
        "import sys, importlib.metadata as metadata\n"
        "sys.modules['cryptography.hazmat.primitives.hpke'] = None\n"
        "found = metadata.version\n"
        "metadata.version = lambda name: '47.0.1' if name == 'cryptography' else found(name)\n"
        "from edgefl_client.cli import main\n"
        f"main(['trust', 'add', '{'ab' * 32}', '--home', {str(tmp_path)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("edgefl: cryptography 47.0.1 is installed, but edgefl-derm needs 48 or newer")
