"""What `edgefl watch` notes: lasting, bounded, of one process, and readable by older and newer versions.

Source: docs/guides/device.md.
"""

import json
import os
import sqlite3
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(("crashed_after", "written"), [("begin", b""), ("half", b'{"image": "a'), ("line", b"{}\n")])
def test_recovery_of_a_file_that_was_begun(notes, tmp_path, crashed_after, written):
    """Module text: the length of the output says whether the line was written; half a line is cut off."""
    out, seen, a = tmp_path / "out.jsonl", Seen(1, 2), str(tmp_path / "drop" / "a")
    with open_output(out) as output:
        write_line(output, '{"image": "before"}')
        first = notes()
        first.begin(a, seen, output.tell())
        output.write(written)
    first.close()
    second = notes()
    with open_output(out) as output:
        second.recover(output)
        assert second.scored() == ({a: seen} if crashed_after == "line" else {})
        write_line(output, '{"image": "after"}')
    whole = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line.get("image") for line in whole] == ["before", *([None] if crashed_after == "line" else []), "after"]


def test_notes_are_bounded_but_never_forget_what_is_there(notes, monkeypatch, tmp_path):
    monkeypatch.setattr(watched_folder, "MAX_NOTES", 10)
    made, called = notes(), [str(tmp_path / "drop" / str(number)) for number in range(25)]
    for number, name in enumerate(called):
        made.begin(name, Seen(number, number), 0)
        made.finish(name)
    present = {name: Seen(number, number) for number, name in enumerate(called[:5])}
    assert made.forget(present) == 15
    assert set(made.scored()) == {*called[:5], *called[20:]}
    assert made.forget(present) == 0


def test_two_folders_share_a_home_and_one_folder_has_one_watcher(notes, tmp_path):
    one, other = notes(), notes(tmp_path / "elsewhere")
    one.begin(str(tmp_path / "drop" / "a"), Seen(1, 1), 0)
    one.finish(str(tmp_path / "drop" / "a"))
    assert other.scored() == {}
    with pytest.raises(StorageError, match="another edgefl watch"):
        notes()


def test_two_watchers_never_share_a_file_of_results(tmp_path):
    """After a crash the length of the file says whose line is missing: only where one process alone writes to it."""
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
    made.begin(b, Seen(1, 2), 0, "a model", without_map=True)
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
