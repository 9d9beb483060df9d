"""A moment in words, alike in what commands print, in refusals and in the audit log's explanations."""

from datetime import UTC, datetime


def moment(unix_ms: int) -> str:
    """Say a time, in UTC, to the second."""
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
