"""The picture of one round in CONTRIBUTING.md names functions that exist. Source: docs/design.md 4."""

import importlib
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

PICTURE = Path(__file__).resolve().parents[2] / "docs/images/round.svg"


def named_calls() -> list[tuple[str, str]]:
    """Full name and shown name of every call in the picture."""
    found = ElementTree.parse(PICTURE).iter()
    return sorted({(one.attrib["data-name"], "".join(one.itertext())) for one in found if "data-name" in one.attrib})


def resolve(name: str) -> object:
    """What a dotted name stands for: the longest part that is a module, then attributes of it."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as missing:
            if missing.name is None or not name.startswith(missing.name):
                raise
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"{name} begins with no package")


@pytest.mark.parametrize(("name", "shown"), named_calls(), ids=lambda value: value)
def test_a_call_of_the_picture_exists(name: str, shown: str) -> None:
    """A function that is renamed turns this red, and the picture is drawn again."""
    assert callable(resolve(name))
    assert name.endswith(f".{shown}")


def test_every_call_carries_its_full_name() -> None:
    """No bold name in the picture is without the address that the test above resolves."""
    text = PICTURE.read_text(encoding="utf-8")
    assert len(re.findall('class="call"', text)) == len(re.findall('class="call"[^>]*data-name=', text)) >= 25


def test_it_stands_at_the_top_of_the_page_with_the_example(root: Path) -> None:
    """CONTRIBUTING.md opens with the method in eighty lines and the picture."""
    top = (root / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## ")[0]
    assert "docs/images/round.svg" in top and "examples/fedavg.py" in top
