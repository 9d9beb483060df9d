"""`--log FILE.sqlite`. Source: docs/security.md, check 70; docs/reference/scores.md, "A log of scores"."""

import contextlib
import hashlib
import json
import os
import platform
import resource
import signal
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime
from unittest import mock

import numpy as np
import pytest

from edgefl_client.scoring import score_files, watched_folder
from edgefl_client.scoring.log_file import LogFile
from edgefl_client.scoring.scorer import Scorer
from edgefl_protocol.errors import StorageError
from edgefl_protocol.pictures.imaging import PREPROCESSING

NUMBERS = ("vacuity", "dissonance", "entropy_nats", "predicted")
THRESHOLDS = ("vacuity_from", "entropy_from", "dissonance_from", "suspicious_from")


def rows(path):
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.row_factory = sqlite3.Row
        return [dict(row) for row in db.execute("SELECT * FROM score ORDER BY number")]


@pytest.fixture
def day(files, lab):
    """A folder of eight pictures of skin, one grey one, and one that is broken; names that must not be kept."""
    folder = files / "CANARY-folder"
    folder.mkdir()
    rng = np.random.default_rng(3)
    for number in range(8):
        colour = (160 + number * 8, 110, 80 + number)
        (folder / f"CANARY-{number}.png").write_bytes(lab.encoded(lab.photo(40 + number, 36, colour)))
    (folder / "CANARY-grey.png").write_bytes(lab.encoded(rng.integers(60, 200, (40, 40, 1), np.uint8).repeat(3, 2)))
    (folder / "CANARY-cut.png").write_bytes(lab.encoded(lab.photo(50, 50))[:70])
    return folder


def scored(run, files, day, *more):
    return run(
        "score", day, "--model", files / "model.edgefl", "--trust", files / "signing.pub", "--json", "--threads", "1",
        *more,
    )  # fmt: skip


def test_off_unless_it_is_asked_for(run, files, day):
    assert scored(run, files, day)[0] == 1  # one picture is broken
    assert not list(files.rglob("*.sqlite*"))


def test_check_70_replaying_the_input_gives_the_same_numbers(run, files, day, plain_bundle, lab):
    """docs/security.md, check 70: for every row the file of that SHA-256, scored anew, gives the very same numbers."""
    log, begun = files / "log.sqlite", datetime.now(UTC).replace(microsecond=0)
    _, out, _ = scored(run, files, day, "--log", log, "--batch", "8")
    lines = [json.loads(line) for line in out.splitlines()]
    by_sha256 = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in day.iterdir()}
    found = rows(log)
    assert len(found) == len(lines) == len(by_sha256) == 10
    scorer = Scorer(plain_bundle, threads=1)
    for row, line in zip(found, lines, strict=True):
        assert by_sha256[row["image_sha256"]].name == line["image"].rsplit("/", 1)[1]
        if row["error_code"]:
            assert row["error_code"] == line["error"]["code"] and row["probabilities"] is None
            continue
        again = scorer.score(by_sha256[row["image_sha256"]].read_bytes())
        for told in (again.to_json(), line):
            assert json.loads(row["probabilities"]) == told["probabilities"]
            assert json.loads(row["evidence"]) == told["evidence"]
            assert {name: row[name] for name in (*NUMBERS, *THRESHOLDS)} == {
                name: told[name] for name in (*NUMBERS, *THRESHOLDS)
            }
            assert row["rules_tried"].split() == told["rules_tried"]
            assert row["refer_reasons"].split() == told["refer_reasons"] and bool(row["refer"]) == told["refer"]
        assert (row["model_id"], row["model_sha256"], row["model_version"]) == (
            plain_bundle.id, plain_bundle.sha256, 1
        )  # fmt: skip
        assert (row["weights"], row["weights_sha256"]) == ("bundle", again.model.state_sha256)
        assert row["temperature"] == 1.25 and row["threads"] == 1
        assert row["preprocessing"].split()[0] == str(PREPROCESSING) and len(row["preprocessing"].split()[1]) == 64
        assert "onnxruntime" in row["software"] and row["device"] == (platform.node() or "unnamed")
        assert begun <= datetime.fromisoformat(row["at"]) <= datetime.now(UTC)
    assert [row["out_of_scope"] for row in found if row["refer_reasons"] and "not_skin" in row["refer_reasons"]] == [1]
    assert {row["out_of_scope"] for row in found if row["refer_reasons"] == ""} <= {0}


def test_no_name_and_no_picture_is_kept(run, files, day, lab):
    """docs/security.md, checks 36 and 70: the SHA-256 stands for the picture; no name, folder or metadata is in it."""
    from PIL import Image

    exif = Image.Exif()
    exif[0x010E] = "CANARY-EXIF"
    (day / "CANARY-exif.jpg").write_bytes(lab.encoded(lab.photo(60, 60), "JPEG", exif=exif))
    log = files / "log.sqlite"
    scored(run, files, day, "--log", log)
    assert len(rows(log)) == 11
    assert b"CANARY" not in log.read_bytes()
    assert log.stat().st_mode & 0o777 == 0o600
    assert not list(files.glob("log.sqlite-*"))


def test_a_log_goes_on(run, files, day):
    """Rows are appended; what was there stays as it was."""
    log = files / "log.sqlite"
    scored(run, files, day, "--log", log)
    before = rows(log)
    code, out, _ = run("score", files / "missing.png", files / "good.png", "--model", files / "model.edgefl",
                       "--trust", files / "signing.pub", "--csv", "--log", log)  # fmt: skip
    assert code == 1 and len(out.splitlines()) == 3
    after = rows(log)
    assert after[: len(before)] == before
    assert [(row["error_code"], row["image_sha256"] is None) for row in after[len(before) :]] == [
        ("missing", True),
        (None, False),
    ]


@pytest.mark.parametrize(("softmax", "column"), [(False, "vacuity_from"), (True, "entropy_from")])
def test_a_recommendation_is_repeated_from_its_row(run, files, lab, make_bundle, softmax, column):
    """docs/reference/scores.md, "A log of scores": bundle, file and threshold of a row give its reasons again."""
    bundle = make_bundle(softmax=softmax)
    (files / "model.edgefl").write_bytes(lab.bundle_bytes(softmax=softmax))
    log, picture = files / "log.sqlite", files / "good.png"
    for threshold in ("0.001", "0.5"):
        options = ("--model", files / "model.edgefl", "--trust", files / "signing.pub", "--log", log)
        assert run("score", picture, *options, "--refer-above", threshold)[0] == 0
    reasons = []
    for row in rows(log):
        again = Scorer(bundle, threads=row["threads"], refer_above=row[column]).score(picture.read_bytes())
        assert row["refer_reasons"].split() == list(again.refer_reasons)
        reasons.append("vacuity" in again.refer_reasons)
    assert [row[column] for row in rows(log)] == [0.001, 0.5] and reasons[0]


OLD_TABLE = """
CREATE TABLE score (
    number INTEGER PRIMARY KEY, at TEXT NOT NULL, device TEXT NOT NULL, software TEXT NOT NULL,
    threads INTEGER NOT NULL, image_sha256 TEXT, model_id TEXT NOT NULL, model_sha256 TEXT NOT NULL,
    model_version INTEGER NOT NULL, weights TEXT NOT NULL, weights_sha256 TEXT NOT NULL, preprocessing TEXT NOT NULL,
    temperature REAL, predicted TEXT, probabilities TEXT, evidence TEXT, vacuity REAL, dissonance REAL,
    entropy_nats REAL, out_of_scope INTEGER, refer INTEGER, refer_reasons TEXT, error_code TEXT
) STRICT
"""
OLD_ROW = """
INSERT INTO score (at, device, software, threads, model_id, model_sha256, model_version, weights, weights_sha256,
    preprocessing, error_code) VALUES ('then', 'd', 's', 1, 'm', 'x', 1, 'bundle', 'y', '1 z', 'missing')
"""


def test_a_log_of_an_earlier_version_goes_on(run, files):
    """The table and a row as versions until 2026-11-28 made them; those go on writing it, too."""
    log = files / "log.sqlite"
    with contextlib.closing(sqlite3.connect(log)) as db:
        for statement in (OLD_TABLE, "PRAGMA application_id=1162234929", "PRAGMA user_version=1", OLD_ROW):
            db.execute(statement)
        db.commit()
    (before,) = rows(log)
    options = ("--model", files / "model.edgefl", "--trust", files / "signing.pub", "--log", log)
    for _ in range(2):
        assert run("score", files / "good.png", *options)[0] == 0
    with contextlib.closing(sqlite3.connect(log)) as db:
        db.execute(OLD_ROW)
        db.commit()
    old, *new, last = rows(log)
    assert {name: old[name] for name in before} == before
    assert [row["vacuity_from"] for row in (old, *new, last)] == [None, 0.9, 0.9, None]


def in_wal(path):
    """A database of somebody else, in WAL mode."""
    other = sqlite3.connect(path)
    other.execute("PRAGMA journal_mode=WAL")
    other.execute("CREATE TABLE other (x)")
    other.commit()
    return other


@pytest.mark.parametrize("kind", ["text", "other database", "newer log", "folder", "wal", "open wal"])
def test_a_file_that_is_no_log_is_left_alone(run, files, kind, request):
    log = files / "log.sqlite"
    if kind == "text":
        log.write_text("something else " * 100)
    elif kind == "folder":
        log.mkdir()
    elif kind == "wal":
        other = in_wal(log)
        other.close()
    elif kind == "open wal":  # of a program that runs: what it wrote may stand in the WAL alone
        other = in_wal(log)
        request.addfinalizer(other.close)
    else:
        with contextlib.closing(sqlite3.connect(log)) as db:
            db.execute("CREATE TABLE other (x)")
            if kind == "newer log":
                db.execute("PRAGMA application_id=1162234929")
                db.execute("PRAGMA user_version=2")
            db.commit()
    before = None if kind == "folder" else {path.name: path.read_bytes() for path in files.glob("log.sqlite*")}
    code, out, err = run("score", files / "good.png", "--model", files / "model.edgefl", "--trust",
                         files / "signing.pub", "--log", log)  # fmt: skip
    assert (code in (1, 2), out) == (True, "")
    assert "log.sqlite" in err.splitlines()[-1]
    assert before is None or {path.name: path.read_bytes() for path in files.glob("log.sqlite*")} == before


def started(files, folder, log, preexec=None):
    code = "import sys; from edgefl_client.cli import main; main(sys.argv[1:])"
    options = {"--model": files / "model.edgefl", "--trust": files / "signing.pub", "--log": log}
    given = [str(word) for pair in options.items() for word in pair]
    words = [sys.executable, "-c", code, "score", str(folder), "--json", *given]
    environment = {**os.environ, "EDGEFL_HOME": str(files / "home"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=preexec
    )


@pytest.fixture
def many(files, lab):
    folder = files / "many"
    folder.mkdir()
    for number in range(120):
        (folder / f"{number:03d}.png").write_bytes(lab.encoded(lab.photo(30, 30, (150 + number % 90, 110, 80))))
    return folder


def test_what_was_told_is_in_the_log_after_a_kill(files, many):
    """Durable before told: every line that came out before a kill has its row, in order."""
    log = files / "log.sqlite"
    process = started(files, many, log)
    told = [json.loads(process.stdout.readline()) for _ in range(20)]
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate()
    told += [json.loads(line) for line in rest.splitlines() if line.endswith("}")]
    found = rows(log)
    assert len(found) >= len(told) >= 20
    for row, line in zip(found, told, strict=False):
        assert json.loads(row["probabilities"]) == line["probabilities"]


def test_what_cannot_be_logged_is_not_told(files, many):
    """A disk that is full (here: a file that may not grow): as many lines as rows, one sentence, exit 1."""
    log = files / "log.sqlite"
    process = started(files, many, log, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (48 * 1024, 48 * 1024)))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert (
        "Traceback" not in err
        and "log.sqlite" in err.splitlines()[-1]
        and "every score must be logged" in err.splitlines()[-1]
    )
    assert 0 < len(out.splitlines()) == len(rows(log)) < 120


def test_watch_logs_too(run, files, day):
    """Each picture that watch scores has its row, and none twice over restarts."""
    log = files / "log.sqlite"
    options = ("--model", files / "model.edgefl", "--trust", files / "signing.pub", "--once", "--interval", "0.1",
               "--out", files / "lines", "--log", log)  # fmt: skip
    assert run("watch", day, *options)[0] == 1  # one picture is broken
    assert run("watch", day, *options)[0] == 0
    found = rows(log)
    assert len(found) == len((files / "lines").read_text().splitlines()) == 10
    assert len({row["image_sha256"] for row in found}) == 10


@pytest.fixture
def ward(run, files, lab):
    """Watches a folder of two pictures once; gives exit code, lines and rows."""
    (files / "ward").mkdir()
    for number in range(2):
        (files / "ward" / f"{number}.png").write_bytes(lab.encoded(lab.photo(60 + number, 40)))
    options = ("--model", files / "model.edgefl", "--trust", files / "signing.pub", "--once", "--interval", "0.1",
               "--threads", "1", "--out", files / "lines", "--log", files / "log.sqlite")  # fmt: skip

    def watch(*more):
        code = run("watch", files / "ward", *options, *more)[0]
        lines = [json.loads(line) for line in (files / "lines").read_text().splitlines()]
        return code, lines, rows(files / "log.sqlite")

    return watch


@pytest.mark.parametrize("code", ["storage", "missing"])
def test_what_watch_writes_no_line_of_has_no_row(ward, monkeypatch, code):
    """docs/reference/scores.md: a file that cannot be read had a row at each try, and one that vanished had one."""

    def refused(path, most, too_long=""):
        raise StorageError(f"cannot read {path}", code)

    monkeypatch.setattr(score_files, "read_bounded", refused)
    assert ward() == (int(code == "storage"), [], [])


def test_a_heat_map_that_fails_again_adds_no_row(ward, monkeypatch):
    """docs/reference/scores.md: each start had one more row of the picture, and no line."""

    def full(path, data, mode=0o644):
        raise StorageError("the disk is full", "disk_full")

    with monkeypatch.context() as busy:
        busy.setattr(score_files, "write_atomic", full)
        for _ in range(3):
            code, lines, found = ward("--heatmap", "maps")
            assert (code, len(lines), len(found)) == (1, 2, 2)
    code, lines, found = ward("--heatmap", "maps")
    assert (code, len(lines), len(found)) == (0, 4, 4)


@pytest.mark.parametrize(("where", "rows_more"), [("append", 0), ("write_line", 1)])
def test_a_crash_between_row_and_line_gives_a_second_row(ward, monkeypatch, where, rows_more):
    """docs/reference/scores.md: one line of each picture; a row more only where the crash came after the row."""
    with monkeypatch.context() as crash:
        crash.setattr(LogFile if where == "append" else watched_folder, where, lambda *_: sys.exit(9))
        assert ward() == (9, [], [mock.ANY] * rows_more)
    code, lines, found = ward()
    assert (code, len(lines), len(found)) == (0, 2, 2 + rows_more)
    assert len({row["image_sha256"] for row in found}) == 2


def test_a_log_in_a_home_that_is_not_begun_is_refused(run, files, day):
    """With it the folder was taken for one of something else: every later `edgefl use` was refused."""
    code, out, err = scored(run, files, day, "--log", run.home / "log.sqlite")
    assert (code, out) == (1, "") and "run edgefl use first" in err and not run.home.exists()
    code, out, err = scored(run, files, day, "--heatmap", run.home / "maps")
    assert (code, out) == (1, "") and "run edgefl use first" in err and not run.home.exists()
    assert run("use", files / "model.edgefl", "--trust", files / "signing.pub")[0] == 0
    assert scored(run, files, day, "--log", run.home / "log.sqlite")[0] == 1  # one picture is broken
    assert len(rows(run.home / "log.sqlite")) == 10
