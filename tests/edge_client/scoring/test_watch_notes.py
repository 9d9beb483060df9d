"""What `edgefl watch` notes: lasting, bounded, of one process, and readable by older and newer versions.

Source: docs/guides/device.md.
"""

import contextlib
import os
import sqlite3
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_client.home import Home
from edgefl_client.scoring import watched_folder
from edgefl_client.scoring.watched_folder import Notes, Seen, left_out_words, open_output, write_line
from edgefl_protocol.errors import StorageError


@pytest.fixture
def notes(tmp_path):
    made = []

    def make(folder: Path = tmp_path / "drop") -> Notes:
        made.append(Notes(Home(tmp_path / "home"), folder))
        return made[-1]

    yield make
    for one in made:
        one.close()


BEFORE, MINE, OTHER = '{"image": "before"}', '{"image": "drop/a", "error": {}}', '{"image": "else/a", "error": {}}'


@pytest.mark.parametrize(
    ("crashed_after", "written", "counts"),
    [
        ("begin", b"", False),
        ("half", MINE[:13].encode(), False),
        ("little", MINE[:3].encode(), False),
        ("all but its end", MINE.encode(), True),
        ("line", f"{MINE}\n".encode(), True),
        ("line, and another watch wrote on", f"{MINE}\n{OTHER}\n".encode(), True),
        ("begin, and another watch wrote on", f"{OTHER}\n".encode(), False),
    ],
)
def test_recovery_of_a_file_that_was_begun(notes, tmp_path, crashed_after, written, counts):
    """Module text: it counts as scored where its very line stands at its place; half a line is cut off.

    Another watch may score a file of the same name below another folder.
    """
    out, seen, a = tmp_path / "out.jsonl", Seen(1, 2), str(tmp_path / "drop" / "a")
    with open_output(out) as output:
        write_line(output, BEFORE)
        first = notes()
        first.begin(a, seen, MINE, output.tell())
        output.write(written)
    first.close()
    second = notes()
    with open_output(out) as output:
        second.recover(output)
        assert second.scored() == ({a: seen} if counts else {}), crashed_after
        write_line(output, '{"image": "after"}')
    lines = [line for line in (MINE, OTHER) if line.encode() in written]
    assert out.read_text().splitlines() == [BEFORE, *lines, '{"image": "after"}']


@pytest.mark.parametrize("older", [f"{BEFORE}\n", f"{BEFORE}\n{OTHER}", "kept by somebody else", ""])
@pytest.mark.parametrize("begun_on", ["standard output", "another file"])
def test_what_was_begun_on_another_output_is_scored_again(notes, tmp_path, begun_on, older):
    """It counted as scored without a line where the file ended in a line end; where not, the file was emptied."""
    out, a = tmp_path / "out.jsonl", str(tmp_path / "drop" / "a")
    out.write_text(older)
    first = notes()
    first.begin(a, Seen(1, 2), MINE, 0 if begun_on == "standard output" else 5)
    first.close()
    second = notes()
    with open_output(out) as output:
        second.recover(output)
    assert second.scored() == {}
    assert out.read_text() == (older if older.endswith("\n") or not older else f"{older}\n")


ENDS = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([MINE, OTHER, "kept by somebody else\n", "{", "\n"]).flatmap(
        lambda line: st.integers(0, len(line)).map(lambda end: line[:end].encode())
    ),
)


@settings(max_examples=200)
@given(st.lists(ENDS, max_size=4).map(b"".join), st.integers(1, 8))
def test_nothing_of_a_whole_line_is_ever_lost(held, block):
    """Whatever stands in the output: only half a line of ours may go, and what comes next begins a line."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(watched_folder, "_READ_BYTES", block):
        out = Path(folder, "out.jsonl")
        out.write_bytes(held)
        with open_output(out) as output:
            write_line(output, BEFORE)
        whole, end, last = held.rpartition(b"\n")
        ours = b'{"image": '
        half = last[: len(ours)] == ours[: len(last)] and last.rstrip(b" \t\r") not in (MINE.encode(), OTHER.encode())
        kept = b"" if not last or half else last + b"\n"
        assert out.read_bytes() == whole + end + kept + BEFORE.encode() + b"\n"


def test_a_note_of_an_older_version_that_was_begun_is_scored_again(notes, tmp_path):
    """It does not say which line it was: a picture is scored twice rather than never."""
    out, a = tmp_path / "out.jsonl", str(tmp_path / "drop" / "a")
    out.write_text(f"{MINE}\n")
    made = notes()
    made.begin(a, Seen(1, 2), MINE, 0)
    with contextlib.closing(sqlite3.connect(tmp_path / "home" / "watched.sqlite3", isolation_level=None)) as old:
        old.execute("UPDATE watched SET line_sha256 = NULL")
    with open_output(out) as output:
        made.recover(output)
    assert made.scored() == {} and out.read_text() == f"{MINE}\n"


def test_a_new_output_survives_a_power_cut(tmp_path, monkeypatch):
    """A file's own flush does not keep its name: docs/guides/device.md promises a line that a crash leaves."""
    flushed = []
    monkeypatch.setattr(watched_folder, "flush_to_disk", flushed.append)
    for _ in range(2):
        with open_output(tmp_path / "out.jsonl"):
            pass
    assert flushed == [tmp_path]


def test_notes_are_bounded_but_never_forget_what_is_there(notes, monkeypatch, tmp_path):
    monkeypatch.setattr(watched_folder, "MAX_NOTES", 10)
    made, called = notes(), [str(tmp_path / "drop" / str(number)) for number in range(25)]
    for number, name in enumerate(called):
        made.begin(name, Seen(number, number), MINE, 0)
        made.finish(name)
    present = {name: Seen(number, number) for number, name in enumerate(called[:5])}
    assert made.forget(present) == 15
    assert set(made.scored()) == {*called[:5], *called[20:]}
    assert made.forget(present) == 0


def test_two_folders_share_a_home_and_one_folder_has_one_watcher(notes, tmp_path):
    one, other = notes(), notes(tmp_path / "elsewhere")
    one.begin(str(tmp_path / "drop" / "a"), Seen(1, 1), MINE, 0)
    one.finish(str(tmp_path / "drop" / "a"))
    assert other.scored() == {}
    with pytest.raises(StorageError, match="another edgefl watch"):
        notes()


def test_two_watchers_never_share_a_file_of_results(tmp_path):
    """After a crash the end of the file says whose line is missing: only where one process alone writes to it."""
    with open_output(tmp_path / "out.jsonl"):
        with (
            pytest.raises(StorageError, match="another edgefl watch writes to") as busy,
            open_output(tmp_path / "out.jsonl"),
        ):
            pass
        assert busy.value.code == "busy"
    with open_output(tmp_path / "out.jsonl") as free:
        write_line(free, "x")


def test_notes_of_an_older_version_are_read_and_it_reads_ours(notes, tmp_path):
    """The table as it was before models were noted; both versions write to it, one after the other."""
    (tmp_path / "home").mkdir(mode=0o700)
    old = sqlite3.connect(tmp_path / "home" / "watched.sqlite3", isolation_level=None)
    old.execute(
        "CREATE TABLE watched (number INTEGER PRIMARY KEY, folder BLOB NOT NULL, name BLOB NOT NULL, "
        "size INTEGER NOT NULL, time_ns INTEGER NOT NULL, begun_at INTEGER, UNIQUE (folder, name))"
    )
    insert = "INSERT OR REPLACE INTO watched (folder, name, size, time_ns, begun_at) VALUES (?, ?, 1, 2, NULL)"
    folder, a, b = tmp_path / "drop", str(tmp_path / "drop" / "a"), str(tmp_path / "drop" / "b")
    old.execute(insert, (os.fsencode(folder), b"a"))
    made = notes()
    made.begin(b, Seen(1, 2), MINE, 0, "a model", without_map=True)
    assert made.without_map() == set()  # its line is not written yet
    made.finish(b)
    assert made.without_map() == {b}
    assert made.scored() == {a: Seen(1, 2), b: Seen(1, 2)} and made.models() == {a: None, b: "a model"}
    old.execute(insert, (os.fsencode(folder), b"c"))
    old.close()
    assert len(made.scored()) == 3
    made.drop()
    assert made.scored() == {}


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ([None], "1 picture was scored before and is left out; --again scores it"),
        (["one"] * 3, "3 pictures were scored before (by one) and are left out; --again scores them"),
        (
            ["one", "two", "two", None],
            "4 pictures were scored before (2 by two and 1 by one) and are left out; --again scores them",
        ),
    ],
)
def test_what_is_left_out_is_said_with_its_models(models, said):
    """A note of an older version names none."""
    assert left_out_words(models) == said


def test_damaged_notes_are_one_sentence(notes, tmp_path):
    notes().close()
    (tmp_path / "home" / "watched.sqlite3").write_bytes(b"no database" * 100)
    with pytest.raises(StorageError, match="cannot keep its notes"):
        notes()
