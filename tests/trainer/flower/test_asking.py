"""What a server hears of a node that gives nothing: Flower's own errors, in words (docs/guides/flower.md)."""

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: make test-flower")

from flwr.app import Error
from flwr.common.constant import ErrorCode

from edgefl_trainer.flower.asking import cause_of


@pytest.mark.parametrize(
    ("code", "reason", "told"),
    [
        (
            ErrorCode.LOAD_CLIENT_APP_EXCEPTION,
            "ModuleNotFoundError",
            "cannot load the app: install edgefl-derm[flower]",
        ),
        (ErrorCode.MESSAGE_UNAVAILABLE, "", "did not get the request in time"),
        (ErrorCode.REPLY_MESSAGE_UNAVAILABLE, "", "its reply was lost on its way"),
        (ErrorCode.NODE_UNAVAILABLE, "", "its SuperNode does not answer any more"),
        (ErrorCode.CLIENT_APP_CRASHED, "", "its process ended in the middle of the work"),
        (
            ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
            "<class 'ray.exceptions.ActorDiedError'>",
            "want of memory: fewer workers",
        ),
        (ErrorCode.UNKNOWN, "ray.exceptions.OutOfMemoryError: Task was killed", "want of memory: fewer workers"),
        (ErrorCode.UNKNOWN, "two\n lines", "Flower says: two lines"),
    ],
)
def test_an_error_of_flowers_is_told_in_words(code, reason, told) -> None:
    """The codes are those of the Flower that is installed."""
    assert told in cause_of(Error(code, reason))


def test_a_reason_is_cut() -> None:
    assert len(cause_of(Error(99, "x" * 10_000))) < 400
