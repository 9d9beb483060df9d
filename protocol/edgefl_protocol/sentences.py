"""What sentences for a person need again and again: a number with its noun, a list, a duration, a file."""

import re
from collections.abc import Sequence
from typing import Final

_MOST_NAMES: Final = 8  # in one sentence
UNTRAINED: Final = "this trial shows the steps, not what a model can do"  # of a network in which nothing was learned


def counted(number: int, one: str, several: str | None = None) -> str:
    """Say a number with its noun, such as `1 reply` or `2 replies`."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def capital(words: str) -> str:
    """Begin a sentence with these words: the first letter is a capital, the others stay, as in `AUROC`."""
    return words[:1].upper() + words[1:]


def joined_by_and(names: Sequence[str]) -> str:
    """Say names as a sentence has them: `a`, `a and b`, `a, b and c`."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def listed(names: Sequence[str]) -> str:
    """Say names as `joined_by_and`, and of a long list the first and how many more: a bundle may know 10,000."""
    more = len(names) - _MOST_NAMES
    return joined_by_and([*names[:_MOST_NAMES], f"{more} more"] if more > 0 else names)


def duration(seconds: float | None) -> str:
    """Write a duration: `40 s`, `58 min` or `2 h 05 min`; nothing where it is not known."""
    if seconds is None:
        return ""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def expiry(left_ms: float) -> str:
    """Say when a thing expires, or since when it has: `expires in 3 days`, `expired 30 hours ago` below two days."""
    return f"expires in {span(left_ms)}" if left_ms > 0 else f"expired {span(-left_ms)} ago"


def span(milliseconds: float) -> str:
    """Say in days how long a time is, in hours where it is below two days."""
    hours = int(milliseconds // 3_600_000)
    return counted(hours // 24, "day") if hours >= 48 else counted(hours, "hour") if hours else "less than an hour"


def out_of_use(error: OSError) -> str:
    """Say which file the system refuses and why; without a name it is most often a full disk behind standard output."""
    refused = isinstance(error, PermissionError) and error.filename is not None
    remedy = "; allow this user to use it, or name another" if refused else ""
    return f"{error.filename or 'standard output or a file'} cannot be used: {error.strerror or error}{remedy}"


def of_file(name: object, found: object) -> str:
    """Say what was found in a file, and name the file once: sentences of the disk name it already."""
    named = re.search(rf"(?<!\S){re.escape(str(name))}(?![\w/-])", str(found))
    return str(found) if named else f"{name}: {found}"
