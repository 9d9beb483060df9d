"""The keys that docs/reference/device-learning.md lists of a command's `--json`."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/reference/device-learning.md"


def keys_of(command: str) -> set[str]:
    """The outermost keys of the object below "Keys of `COMMAND --json`"."""
    below = PAGE.read_text(encoding="utf-8").partition(f"## Keys of `{command} --json`")[2]
    text = below.split("```")[1].strip()[1:-1]
    while text != (less := re.sub(r"\{[^{}]*\}", "", text)):
        text = less
    return set(re.findall(r'(?:^|,)\s*"(\w+)"', text))
