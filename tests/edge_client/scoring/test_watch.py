"""`edgefl watch`: each picture once, whole, across restarts, signals and broken files.

Source: docs/guides/device.md.
"""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgefl_client.cli import main
from edgefl_client.scoring import watched_folder
from edgefl_protocol import durable
from edgefl_protocol.errors import EdgeflError, StorageError

SCORING = ("--model", "model.edgefl", "--trust", "signing.pub", "--threads", "1")
OPTIONS = ("--model", "model.edgefl", "--trust", "signing.pub", "--interval", "0.1", "--threads", "1")


@pytest.fixture
def place(lab, tmp_path, monkeypatch) -> Path:
    """A bundle, its signer's key, and a folder that a device drops pictures into."""
    monkeypatch.setenv("EDGEFL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.edgefl").write_bytes(lab.bundle_bytes())
    (tmp_path / "signing.pub").write_text(lab.SIGNER.public.hex())
    (tmp_path / "drop" / "day").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def good(lab) -> bytes:
    return lab.encoded(lab.photo(60, 40))


def watch(capsys, *more: str) -> tuple[int, list[dict], str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["watch", "drop", *OPTIONS, *more])
    out, err = capsys.readouterr()
    return left.value.code, [json.loads(line) for line in out.splitlines()], err


def names(lines: list[dict]) -> list[str]:
    return [Path(line["image"]).name for line in lines]


def test_each_picture_once_and_again_when_written_anew(place, good, capsys):
    drop = place / "drop"
    (drop / "b.png").write_bytes(good)
    (drop / "day" / "a.png").write_bytes(good)
    (drop / "notes.txt").write_bytes(b"x")
    (drop / ".part.png").write_bytes(good)
    code, lines, _ = watch(capsys, "--once")
    assert (code, names(lines)) == (0, ["b.png", "a.png"])
    assert watch(capsys, "--once")[:2] == (0, [])
    (drop / "c.png").write_bytes(good)
    os.utime(drop / "b.png", ns=(1, 1))
    assert names(watch(capsys, "--once")[1]) == ["b.png", "c.png"]


def test_a_folder_that_cannot_be_looked_into_is_told(place, good, capsys, monkeypatch):
    """Its pictures were left out without a word. To root, whom no rights keep out, the system's answer is made up."""
    (place / "drop" / "a.png").write_bytes(good)
    scandir, closed = os.scandir, place / "drop" / "day"

    def refused(at="."):
        if str(at) == "drop/day":
            raise PermissionError(13, "Permission denied", at)
        return scandir(at)

    monkeypatch.setattr(os, "scandir", refused)
    closed.chmod(0)
    code, lines, err = watch(capsys, "--once")
    closed.chmod(0o700)
    assert code == 1 and "1 picture could not be scored" in err
    assert names([line for line in lines if "error" not in line]) == ["a.png"]
    assert "drop/day" in err or [line["image"] for line in lines if "error" in line] == ["drop/day"]


def test_its_lines_may_lie_in_a_home_that_it_makes(place, good, capsys):
    """As examples/systemd has it: the file was made first, and the home refused for it, then and ever after."""
    (place / "drop" / "a.png").write_bytes(good)
    (place / "home").mkdir(mode=0o700)
    assert watch(capsys, "--once", "--out", "home/scores.jsonl")[0] == 0
    assert names([json.loads(line) for line in (place / "home" / "scores.jsonl").read_text().splitlines()]) == ["a.png"]
    assert watch(capsys, "--once", "--out", "home/scores.jsonl")[0] == 0


def test_another_model_scores_nothing_again_unless_it_is_told_to(place, good, lab, capsys):
    """docs/guides/device.md: after a change of the model nothing was scored, and nothing said so, with any --out."""
    for name in ("a.png", "b.png"):
        (place / "drop" / name).write_bytes(good)
    assert "scored before" not in watch(capsys, "--once", "--out", "first.jsonl")[2]
    (place / "model.edgefl").write_bytes(lab.bundle_bytes(version=2))
    code, _, err = watch(capsys, "--once", "--out", "second.jsonl")
    said = "2 pictures were scored before (by skin/main/all version 1) and are left out; --again scores them\n"
    assert code == 0 and err.endswith(said) and lines_of(place / "second.jsonl") == []
    (place / "drop" / "c.png").write_bytes(good)
    assert watch(capsys, "--once", "--out", "second.jsonl")[2].count("scored before") == 1
    assert "(2 by skin/main/all version 1 and 1 by skin/main/all version 2)" in watch(capsys, "--once")[2]
    code, lines, err = watch(capsys, "--once", "--again")
    assert (code, names(lines)) == (0, ["a.png", "b.png", "c.png"]) and "scored before" not in err
    assert [line["model"]["version"] for line in lines] == [2, 2, 2]
    code, lines, err = watch(capsys, "--once")
    assert (code, lines) == (0, []) and "3 pictures were scored before (by skin/main/all version 2)" in err


def test_while_it_runs_it_says_once_what_it_leaves_out(place, good, capsys):
    """The line stands in a service's journal at each start, not at each look."""
    (place / "drop" / "0.png").write_bytes(good)
    watch(capsys, "--once")
    out = place / "scores.jsonl"
    process = start("--out", str(out))
    (place / "drop" / "1.png").write_bytes(good)
    until(lambda: len(lines_of(out)) == 1, process)
    process.send_signal(signal.SIGTERM)
    assert finished(process)[1].count("1 picture was scored before (by skin/main/all version 1) and is left out") == 1


def test_a_folder_is_the_same_however_it_is_named(place, good, capsys, monkeypatch):
    """By hand with a relative path, by cron with the whole one: still each picture once."""
    (place / "drop" / "a.png").write_bytes(good)
    monkeypatch.chdir(place / "drop")
    options = ("--model", "../model.edgefl", "--trust", "../signing.pub", "--interval", "0.1", "--once")
    found = []
    for name in (".", "../drop", str(place / "drop")):
        with pytest.raises(SystemExit) as left:
            main(["watch", name, *options])
        assert left.value.code == 0
        found.append(capsys.readouterr().out.splitlines())
    assert [len(lines) for lines in found] == [1, 0, 0]


def test_a_name_that_is_no_text_stops_nothing(place, good, capsys):
    """Linux names are bytes: cameras and old archives bring Latin-1. Every line is UTF-8 all the same."""
    odd = os.fsdecode(os.fsencode(place / "drop") + b"/b\xff.png")
    Path(odd).write_bytes(good)
    (place / "drop" / "z.png").write_bytes(good)
    out = place / "scores.jsonl"
    assert watch(capsys, "--once", "--out", str(out))[0] == 0
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [place / line["image"] for line in lines] == [Path(odd), place / "drop" / "z.png"]
    assert watch(capsys, "--once", "--out", str(out))[:2] == (0, [])
    assert len(out.read_text("utf-8").splitlines()) == 2
    for form in ("--json", "--csv", "--heatmap=maps"):
        command = [sys.executable, "-c", "from edgefl_client.cli import main; main()", "score", "drop", form, *SCORING]
        environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
        done = subprocess.run(command, capture_output=True, env=environment, check=False, timeout=60)
        assert done.returncode == 0, done.stderr.decode()
        assert "b\\udcff.png" in done.stdout.decode("utf-8")


def test_broken_files_are_one_line_each_and_not_tried_again(place, good, capsys):
    for name, data in (("cut.png", good[:60]), ("empty.jpg", b""), ("text.jpg", b"no picture"), ("z.png", good)):
        (place / "drop" / name).write_bytes(data)
    code, lines, err = watch(capsys, "--once")
    assert code == 1 and "3 pictures could not be scored, so this ends with 1" in err
    assert names(lines) == ["cut.png", "empty.jpg", "text.jpg", "z.png"]
    assert ["error" in line for line in lines] == [True, True, True, False]
    assert watch(capsys, "--once")[:2] == (0, [])


@pytest.mark.parametrize("code", ["permissions", "storage"])
def test_a_file_that_cannot_be_read_is_not_given_up(place, good, capsys, monkeypatch, code):
    """docs/guides/device.md: rights or a disk that come right later; a change of rights changes neither size nor
    time."""
    from edgefl_client.scoring import score_files

    (place / "drop" / "a.png").write_bytes(good)
    real = score_files.read_bounded

    def refused(path, most, too_long=""):
        raise StorageError(f"cannot read {path}", code)

    monkeypatch.setattr(score_files, "read_bounded", refused)
    assert watch(capsys, "--once")[:2] == (1, [])
    assert "cannot read drop/a.png; it is tried again at the next start" in watch(capsys, "--once")[2]
    monkeypatch.setattr(score_files, "read_bounded", real)
    found, lines, _ = watch(capsys, "--once")
    assert (found, names(lines), "error" in lines[0]) == (0, ["a.png"], False)


def test_while_it_runs_such_a_file_is_tried_now_and_then(place, good, monkeypatch, capsys):
    from edgefl_client.commands import watch as command
    from edgefl_client.scoring import score_files

    (place / "drop" / "a.png").write_bytes(good)
    tries, clock = [], [0.0]

    def refused(path, most, too_long=""):
        tries.append(clock[0])
        raise StorageError(f"cannot read {path}", "storage")

    class Stop:
        """Tells the time instead of waiting; ends after 200 s."""

        def is_set(self):
            return clock[0] > 200

        def wait(self, seconds):
            clock[0] += 2.0

    monkeypatch.setattr(score_files, "read_bounded", refused)
    monkeypatch.setattr(command.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(command, "stop_on_signal", lambda _: contextlib.nullcontext(Stop()))
    assert watch(capsys)[2].count("cannot read") == 1
    assert tries == [2.0, 62.0, 122.0, 182.0]


def test_a_file_that_still_grows_is_left_alone(place, good, capsys, monkeypatch):
    """Module text: taken when the same at two looks in a row."""
    grows = place / "drop" / "grows.png"
    grows.write_bytes(good[:100])
    real, looks = watched_folder.look, []

    def look(folder, suffixes):
        if looks:
            grows.write_bytes(good)
        looks.append(folder)
        return real(folder, suffixes)

    monkeypatch.setattr(watched_folder, "look", look)
    code, lines, told = watch(capsys, "--once")
    assert (code, lines) == (0, [])
    assert "drop/grows.png appeared or changed between two looks; it is scored at the next start" in told
    monkeypatch.setattr(watched_folder, "look", real)
    code, lines, _ = watch(capsys, "--once")
    assert (code, names(lines), "error" in lines[0]) == (0, ["grows.png"], False)


def test_heat_maps_are_kept_and_never_scored(place, good, lab, capsys):
    """A line that was written points at its own picture's map for good, also where names repeat day by day."""
    (place / "drop" / "a.png").write_bytes(good)
    (place / "drop" / "day" / "a.png").write_bytes(lab.encoded(lab.photo(60, 50)))
    first = watch(capsys, "--once", "--heatmap", "drop/maps")[1]
    before = {line["heatmap"]: (place / line["heatmap"]).read_bytes() for line in first}
    assert len(before) == 2
    (place / "drop" / "a.png").write_bytes(lab.encoded(lab.photo(50, 60)))  # the next patient
    (again,) = watch(capsys, "--once", "--heatmap", "drop/maps")[1]
    assert again["heatmap"] not in before
    assert {name: (place / name).read_bytes() for name in before} == before
    assert len(list((place / "drop" / "maps").iterdir())) == 3


def test_a_heat_map_that_a_full_disk_refused_is_drawn_when_it_is_tried_again(place, good, lab, capsys, monkeypatch):
    """docs/reference/scores.md, exit codes: it ended with 0, and no later call drew the map."""
    (place / "drop" / "a.png").write_bytes(good)
    (place / "drop" / "b.png").write_bytes(lab.encoded(lab.photo(50, 60)))
    maps, real, tries = ("--once", "--heatmap", "maps"), os.fsync, []

    def full(descriptor):
        tries.append(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable.os, "fsync", full)
    code, lines, err = watch(capsys, *maps)
    assert (code, [line["heatmap"] for line in lines], len(tries)) == (1, [None, None], 2)
    assert "drop/a.png: no heat map: cannot write maps/a-" in err and "2 heat maps could not be drawn, so this" in err
    assert err.count("the next start with --heatmap draws it, and writes the line again") == 2
    code, lines, err = watch(capsys, *maps)  # the disk is still full: one try says it of all, and no line more
    assert (code, lines, len(tries)) == (1, [], 3) and "2 heat maps missing as before" in err
    assert watch(capsys, "--once")[:2] == (0, [])  # nobody asked for maps
    monkeypatch.setattr(durable.os, "fsync", real)
    (place / "drop" / "c.png").write_bytes(lab.encoded(lab.photo(60, 60)))
    code, lines, err = watch(capsys, *maps)
    assert (code, names(lines)) == (0, ["c.png", "a.png", "b.png"]) and "scored before" not in err
    assert all((place / line["heatmap"]).is_file() for line in lines) and len(list((place / "maps").iterdir())) == 3
    assert watch(capsys, *maps)[:2] == (0, [])


def test_a_heat_map_that_fails_for_another_reason_is_counted_and_not_tried_again(place, good, capsys, monkeypatch):
    """No disk is to blame, so trying again would fail at each call of a timer."""
    from edgefl_client.scoring import scorer

    def fails(*_):
        raise EdgeflError("not finite", "score")

    (place / "drop" / "a.png").write_bytes(good)
    monkeypatch.setattr(scorer.Scorer, "explain", fails)
    code, (line,), err = watch(capsys, "--once", "--heatmap", "maps")
    assert (code, line["heatmap"]) == (1, None) and "drop/a.png: no heat map: not finite\n" in err
    assert watch(capsys, "--once", "--heatmap", "maps")[:2] == (0, [])


def test_an_interval_that_is_no_number_is_a_usage_error(place, capsys):
    with pytest.raises(SystemExit) as left:
        main(["watch", "drop", *OPTIONS, "--interval", "nan"])
    assert left.value.code == 2


def test_a_folder_that_is_not_there_is_a_usage_error(place, capsys):
    with pytest.raises(SystemExit) as left:
        main(["watch", "nowhere", *OPTIONS])
    assert left.value.code == 2


def start(*more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from edgefl_client.cli import main; main()", "watch", "drop", *OPTIONS, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finished(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Exit code and standard error, once it has ended."""
    err = process.communicate(timeout=60)[1].decode()
    assert "Traceback" not in err
    return process.returncode, err


def until(condition, process: subprocess.Popen[bytes], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and process.poll() is None, process.communicate()[1].decode()
        time.sleep(0.05)


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_cleanly_and_goes_on_from_there(place, good, capsys, kind):
    out = place / "scores.jsonl"
    for number in range(3):
        (place / "drop" / f"{number}.png").write_bytes(good)
    first = start("--out", str(out))
    until(lambda: len(lines_of(out)) == 3, first)
    (place / "drop" / "3.png").write_bytes(good)
    until(lambda: len(lines_of(out)) == 4, first)
    code, _, err = watch(capsys, "--out", str(out), "--once")
    assert code == 1 and "another edgefl watch" in err
    first.send_signal(kind)
    code, err = finished(first)
    assert code == 0 and "stopping after the present picture; a second Ctrl-C ends at once" in err
    (place / "drop" / "4.png").write_bytes(good)
    assert watch(capsys, "--out", str(out), "--once")[0] == 0
    assert names([json.loads(line) for line in lines_of(out)]) == [f"{number}.png" for number in range(5)]


def test_each_file_that_is_never_scored_is_named_once(place, good, capsys):
    """A camera that begins to write HEIC stopped being scored, and nothing said so."""
    (place / "drop" / "IMG_0041").write_bytes(good)
    code, lines, err = watch(capsys, "--once")
    assert (code, lines) == (0, []) and "its name does not end like a picture's: drop/IMG_0041." in err
    out = place / "scores.jsonl"
    process = start("--out", str(out))
    (place / "drop" / "0.png").write_bytes(good)
    until(lambda: len(lines_of(out)) == 1, process)
    for name, content in (("a.heic", b""), ("IMG_0042", good), ("notes.txt", b"x")):
        (place / "drop" / name).write_bytes(content)
    time.sleep(0.5)  # five looks
    (place / "drop" / "1.png").write_bytes(good)
    until(lambda: len(lines_of(out)) == 2, process)
    process.send_signal(signal.SIGTERM)
    err = finished(process)[1]
    assert err.count("a.heic is not scored. Left out, because files of these kinds are not read: 1 .heic.") == 1
    assert err.count("IMG_0042 is not scored, because its name does not end like a picture's: rename it.") == 1
    assert "notes" not in err and err.count("IMG_0041") == 1


@pytest.mark.slow
def test_killed_at_any_moment_every_picture_has_one_line(place, good):
    """Module text: after kill -9 at a random moment, three times over, no line is missing, double or half."""
    out = place / "scores.jsonl"
    for number in range(90):
        (place / "drop" / f"{number:03}.png").write_bytes(good)
    for more in (5, 30, 60):
        process = start("--out", str(out))
        until(lambda: len(lines_of(out)) >= more, process)  # noqa: B023 - called before the loop goes on
        process.kill()
        finished(process)
    assert finished(start("--out", str(out), "--once"))[0] == 0
    assert names([json.loads(line) for line in lines_of(out)]) == [f"{number:03}.png" for number in range(90)]
