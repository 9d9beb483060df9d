"""Parts of sentences for a person: numbers with their noun, lists, files that are named once."""

import pytest

from edgefl_protocol.sentences import counted, expiry, joined_by_and, of_file, out_of_use


@pytest.mark.parametrize(("number", "words"), [(0, "0 replies"), (1, "1 reply"), (2, "2 replies")])
def test_one_is_not_told_in_the_plural(number, words) -> None:
    assert counted(number, "reply", "replies") == words
    assert counted(number, "day") == ("1 day" if number == 1 else f"{number} days")


@pytest.mark.parametrize(
    ("names", "words"), [((), ""), (("a",), "a"), (("a", "b"), "a and b"), (("a", "b", "c"), "a, b and c")]
)
def test_a_list_ends_with_and(names, words) -> None:
    assert joined_by_and(names) == words


@pytest.mark.parametrize(("hours", "words"), [
    (100 * 24 + 5, "expires in 100 days"), (48, "expires in 2 days"), (47.9, "expires in 47 hours"),
    (1, "expires in 1 hour"), (0.9, "expires in less than an hour"), (0, "expired less than an hour ago"),
    (-23.5, "expired 23 hours ago"), (-47, "expired 47 hours ago"), (-49, "expired 2 days ago"),
])  # fmt: skip
def test_an_expiry_is_told_in_days_and_near_it_in_hours(hours, words) -> None:
    """The same expired bundle read "1 day ago" and "2 days ago", and one with 23 hours left "in 0 days"."""
    assert expiry(hours * 3_600_000) == words


def test_a_file_is_named_once() -> None:
    assert of_file("a.jpg", "cannot read a.jpg: it does not exist") == "cannot read a.jpg: it does not exist"
    assert of_file("a.jpg", "the file is empty") == "a.jpg: the file is empty"
    assert of_file("a.jpg", "cannot read data.jpg: no") == "a.jpg: cannot read data.jpg: no"
    assert of_file("-", "the picture holds 8-bit pixels") == "-: the picture holds 8-bit pixels"


def test_a_file_that_the_system_refuses_is_named_with_the_reason() -> None:
    """A full disk behind standard output has no name."""
    assert out_of_use(OSError(28, "No space left on device")) == (
        "standard output or a file cannot be used: No space left on device"
    )
    assert out_of_use(OSError(5, "Input/output error", "/a/b")) == "/a/b cannot be used: Input/output error"
    assert out_of_use(PermissionError(13, "Permission denied", "/a")) == (
        "/a cannot be used: Permission denied; allow this user to use it, or name another"
    )
