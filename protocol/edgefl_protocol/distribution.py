"""The name and version under which this software is installed, and how a missing part of it is named.

The distribution is `edgefl-derm`; packages and commands are called edgefl. (On the public index `edgefl` is another
project.) Name and version stand here and nowhere else in the code, and are not asked of the installed metadata, so
that they are known in a checkout too; tests hold them equal to `pyproject.toml`. Source: docs/design.md 2.
"""

from typing import Final

DISTRIBUTION: Final = "edgefl-derm"
VERSION: Final = "0.1.0"
VERSION_LINE: Final = f"%(prog)s, from {DISTRIBUTION} {VERSION}"  # what --version prints


def needs_extra(extra: str) -> str:
    """Say which extra is missing and how to install it, such as `edgefl-derm[trainer]: pip install '…'`."""
    return f"{DISTRIBUTION}[{extra}]: pip install '{DISTRIBUTION}[{extra}]'"
