"""`--class-info FILE.toml`: what the classes of somebody's own data mean, where the product's table does not know them.

    [melanoma]
    name = "Melanoma"
    meaning = "A cancer of the pigment cells of the skin, which can spread early."
    malignancy = "malignant"                  # malignant, premalignant, benign or unknown

A table for each class, exactly these keys. A class without one stays as the product knows it, else `unknown`, which
asks for a look. Source: docs/reference/scores.md.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from edgefl_protocol.durable import read_bounded
from edgefl_protocol.pictures.class_info import KNOWN, ClassInfo
from edgefl_trainer.data.errors import DataError

MAX_BYTES: Final = 1 << 20
KEYS: Final = ("name", "meaning", "malignancy")


def read_class_info(path: Path, classes: Sequence[str]) -> dict[str, ClassInfo]:
    """Read what classes mean.

    Raises:
        DataError: the file is no such table, or names a class that the run does not have.
        StorageError: it cannot be read.
    """
    try:
        table = tomllib.loads(read_bounded(path, MAX_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as error:  # no UTF-8, or no TOML, or nested without end
        raise _refused(path, f"it is not TOML ({error or 'it is nested too deep'})") from error
    found: dict[str, ClassInfo] = {}
    for label, entry in table.items():
        if label not in classes:
            raise _refused(path, f"the run has no class {label[:80]!r}; it has {', '.join(classes)[:300]}")
        if not isinstance(entry, dict) or set(entry) != set(KEYS):
            raise _refused(path, f"[{label}] must hold exactly {', '.join(KEYS)}")
        try:
            found[label] = ClassInfo(entry["name"], entry["meaning"], entry["malignancy"])
        except ValueError as error:
            raise _refused(path, f"[{label}]: {error}") from error
    return found


def called_harmless(given: dict[str, ClassInfo]) -> list[str]:
    """Classes that a file calls benign and the product's table does not: told, for nothing else would tell."""
    return [label for label, info in given.items() if label in KNOWN and KNOWN[label].suspicious > info.suspicious]


def _refused(path: Path, found: str) -> DataError:
    return DataError(f"the class information in {path} is refused: {found}; correct the file", "setting")
