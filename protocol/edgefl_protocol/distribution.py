"""The name and version under which this software is installed, what it needs, and how a missing part of it is named.

The distribution is `edgefl-derm`; packages and commands are called edgefl. (On the public index `edgefl` is another
project.) Name and version stand here and nowhere else in the code, and are not asked of the installed metadata, so
that they are known in a checkout too; tests hold them equal to `pyproject.toml`. Source: docs/design.md 2.
"""

import re
import sys
from contextlib import suppress
from typing import Final

from edgefl_protocol.errors import EdgeflError

DISTRIBUTION: Final = "edgefl-derm"
VERSION: Final = "0.1.0"
WHEEL: Final = f"{DISTRIBUTION.replace('-', '_')}-{VERSION}-py3-none-any.whl"  # what `make wheel` builds
VERSION_LINE: Final = f"%(prog)s, from {DISTRIBUTION} {VERSION}"  # what --version prints


def needs_extra(extra: str) -> str:
    """Say which extra is missing, how to install it, and which environment lacks it.

    It names a file or a checkout, never the bare name: no public index has that, so anybody may register it there.
    Every environment with the distribution has every command, so the one found first may not be the one meant.
    """
    return (
        f"{DISTRIBUTION}[{extra}]: pip install './{WHEEL}[{extra}]' where the wheel lies, or "
        f"'.[{extra}]' in a checkout (not found in the environment {sys.prefix})"
    )


# The oldest library that a device runs with: older ones lack what we call, or a repair of what reads foreign bytes.
# `pyproject.toml` says the same to the installer; a test holds the two equal.
LEAST: Final = {"numpy": "1.26", "onnxruntime": "1.23", "pillow": "12.3", "cryptography": "48", "requests": "2.32.4"}


def require(name: str, found: str) -> None:
    """Refuse a library that is older than `LEAST`; called where it is loaded, so that nothing runs with it.

    Raises:
        EdgeflError: it is older, or its version cannot be read (`library_too_old`).
    """
    if _numbers(found) < _numbers(LEAST[name]):
        raise EdgeflError(
            f"{name} {found} is installed, but {DISTRIBUTION} needs {LEAST[name]} or newer: pip install "
            f"'{name}>={LEAST[name]}'",
            "library_too_old",
        )


def require_all() -> None:
    """Do as `require` for every library that is installed; asked where one cannot even be loaded, for it takes time.

    Raises:
        EdgeflError: one is older.
    """
    from importlib.metadata import PackageNotFoundError, version

    for name in LEAST:
        with suppress(PackageNotFoundError):
            require(name, version(name))


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release of a version as numbers; a build may add .dev20260101 or +local."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = () if found is None else tuple(map(int, found[0].split(".")))
    return numbers + (0,) * (3 - len(numbers)) if numbers else ()
