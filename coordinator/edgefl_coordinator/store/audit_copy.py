"""A copy of the audit log in one file, which anybody checks with the coordinator's public key alone.

    line 1        {"federation": NAME}
    then          a row each: [number, at_ms, event, subject, detail, sha256]
    then          a signed head each, as a text

Guarantees: each line is one JSON value; a copy that `check_copy` accepts is unbroken, and has every row that a signed
head tells of. Source: docs/security.md 2.9, check 69.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from edgefl_coordinator.errors import USAGE, OperatorError
from edgefl_coordinator.store.audit_chain import LogHead, LogRow, check_log, newest, read_head
from edgefl_protocol.durable import open_bounded, read_bounded, write_pieces
from edgefl_protocol.errors import RecordError

ROWS_AT_ONCE = 2000
MAX_COPY_BYTES = 1 << 30
MAX_LINE_BYTES = 1 << 20


def write_copy(path: Path, rows_after: Callable[[int], Mapping[str, Any]]) -> None:
    """Write the log of a coordinator to a new file.

    Args:
        rows_after: asks the coordinator for at most `ROWS_AT_ONCE` rows after a number (`operations.copy_log`).

    Raises:
        OperatorError: the file exists.
        StorageError: the disk.
    """
    if path.exists():
        raise OperatorError(f"{path} exists; name a new file", USAGE)
    write_pieces(path, (json.dumps(line).encode() + b"\n" for line in _lines(rows_after)))


def check_copy(
    path: Path, key_ids: Collection[str], heads: Path | None = None, restored: Collection[int] = ()
) -> dict[str, Any]:
    """Check a copy, and that it holds what heads kept elsewhere tell of.

    Returns federation, rows, signed_rows, signed_ms.

    Raises:
        OperatorError: no copy, a broken one, or one without a signed head; one sentence.
        StorageError: the file cannot be read.
    """
    found: list[LogHead] = []
    with open_bounded(path, MAX_COPY_BYTES) as file:
        lines = _values(path, iter(lambda: file.readline(MAX_LINE_BYTES), b""))
        first = next(lines, None)
        if not isinstance(first, dict) or not isinstance(first.get("federation"), str):
            raise OperatorError(
                f"{path} is no copy of an audit log; make one with: edgefl-coordinator audit --write FILE"
            )
        try:
            rows = list(_rows(lines, found))
            if heads:
                found += [read_head(line) for line in read_bounded(heads, MAX_COPY_BYTES).splitlines()]
        except (RecordError, TypeError, ValueError) as error:
            raise OperatorError(f"{heads or path} is damaged: {error}") from error
    count, head = check_log(rows, found, first["federation"], key_ids, restored), newest(found)
    if head is None:
        raise OperatorError(
            f"no line of {path} is signed by the coordinator, so nobody can tell whether the copy was changed: "
            "`edgefl-coordinator serve` signs its log when it starts, every hour and when it stops; copy it after that"
        )
    return {"federation": first["federation"], "rows": count, "signed_rows": head.rows, "signed_ms": head.at_ms}


def _lines(rows_after: Callable[[int], Mapping[str, Any]]) -> Iterator[object]:
    after, heads = 0, list[str]()
    while True:
        piece = rows_after(after)
        if after == 0:
            heads = piece["heads"]
            yield {"federation": piece["federation"]}
        yield from piece["rows"]
        if len(piece["rows"]) < ROWS_AT_ONCE:
            break
        after = piece["rows"][-1][0]
    yield from heads


def _values(path: Path, lines: Iterator[bytes]) -> Iterator[Any]:
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError:
            raise OperatorError(f"{path}, line {number}, is no line of a copied audit log") from None


def _rows(lines: Iterator[Any], heads: list[LogHead]) -> Iterator[LogRow]:
    """The rows; the heads behind them go into `heads`."""
    for line in lines:
        if isinstance(line, str):
            heads.append(read_head(line.encode("ascii", "replace")))
            continue
        number, at_ms, *texts = line
        if type(number) is not int or type(at_ms) is not int or not all(type(text) is str for text in texts):
            raise ValueError("a row does not have the form of one")
        yield LogRow(number, at_ms, *texts)
