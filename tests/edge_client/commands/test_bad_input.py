"""Bad input at the command line: each one sentence, the right exit code, and nothing lost.

Source: docs/reference/doctor.md, "When something is wrong"; docs/security.md, checks 20, 26, 59 and 63. Bad pictures:
test_score_files.py and test_cli.py.
"""

import errno
import json
import os
import sqlite3
from dataclasses import replace

import pytest
from PIL import Image
from tests.told import told_task

from edgefl_client.sharing import enrolled_device
from edgefl_exchange.broadcast_limits import check_broadcast, largest_broadcast, memory_bytes
from edgefl_exchange.errors import Unavailable
from edgefl_exchange.transport import Answer
from edgefl_protocol import durable
from edgefl_protocol.envelopes.blob import BlobReference, sealed_size
from edgefl_protocol.envelopes.keys import SigningKey
from edgefl_protocol.records.invite import encode_invite

HOUR_MS = 3_600_000


def one_sentence(result, code):
    """A refused or failed command: its code, nothing on standard output, one sentence."""
    found, out, err = result
    lines = [line for line in err.splitlines() if line.startswith("edgefl: ")]
    assert (found, out, len(lines)) == (code, "", 1), err
    return lines[0]


def in_use(run):
    return json.loads(run("status", "--json", "--offline")[1])["model"]["sha256"]


BUNDLES = {
    "another federation": ({"federation": "other", "version": 3}, "index"),
    "another line": ({"line": "night", "version": 3}, "index"),
    "expired": ({"version": 3, "expires_ms": 1_790_000_000_001}, "expired"),
    "a newer client": ({"version": 3, "needs": {"min_client": "99.0.0"}}, "99.0.0"),
    "a newer runtime": ({"version": 3, "needs": {"min_runtime": "99.0.0"}}, "99.0.0"),
    "nobody trusted": ({"version": 3, "signer": "other"}, "trust"),
    "older than the last seen": ({"version": 1}, "version"),
}


@pytest.mark.parametrize("kind", BUNDLES)
def test_bundles_that_are_not_taken(run, device, live, lab, kind, tmp_path, monkeypatch):
    """docs/security.md, check 26: refused with 3 by `pull` and by `score --model`; the one in use stays and scores."""
    options, word = BUNDLES[kind]
    live.bundles = {("main", "all", 2): lab.bundle_bytes(version=2)}
    assert run("pull")[0] == 0
    before = in_use(run)
    changed = {**options, **({"signer": SigningKey(bytes(32))} if "signer" in options else {})}
    with monkeypatch.context() as future:  # a signer who has that client
        future.setattr("edgefl_protocol.bundle.manifest.CLIENT_VERSION", "99.0.0")
        data = lab.bundle_bytes(**changed)
    live.bundles = {("main", "all", options["version"]): data}
    sentence = one_sentence(run("pull"), 3)
    assert word in sentence
    (tmp_path / "bad.edgefl").write_bytes(data)
    scored = run("score", device / "0.png", "--model", tmp_path / "bad.edgefl")
    if kind not in ("another federation", "another line"):  # of which a device without a federation may run any
        assert scored[0] == 3 and scored[1] == ""
    assert in_use(run) == before
    assert run("score", device / "0.png")[0] == 0


@pytest.mark.parametrize("hours", [-47, 47, -49, 49])
@pytest.mark.parametrize("command", ["pull", "sync"])
def test_a_clock_that_is_off(run, device, live, monkeypatch, hours, command):
    """docs/security.md, check 20: 47 hours are corrected by signed time, 49 are one sentence; the item waits."""
    run("pull")
    assert run("contribute", "--labels", device / "labels.csv")[0] == 0
    wrong = live.now_ms + hours * HOUR_MS
    monkeypatch.setattr(enrolled_device.Device, "__init__", _with_clock(enrolled_device.Device.__init__, lambda: wrong))
    if abs(hours) < 48:
        code, _, err = run(command)
        assert code == 0, err
        assert len(live.effects) == (command == "sync")
        return
    assert "hours off" in one_sentence(run(command), 1)
    assert live.effects == []
    assert len(json.loads(run("outbox", "--json")[1])["items"]) == 1


@pytest.mark.parametrize("hours", [-47, 47, -49, 49])
def test_a_newcomer_whose_clock_is_off(run, live, invite, monkeypatch, hours):
    """docs/security.md, check 20: an invite of 24 hours is judged by signed time, not by a clock 47 hours ahead."""
    wrong = live.now_ms + hours * HOUR_MS
    monkeypatch.setattr(enrolled_device.Device, "__init__", _with_clock(enrolled_device.Device.__init__, lambda: wrong))
    if abs(hours) < 48:
        code, _, err = run("enrol", invite)
        assert code == 0 and len(live.members) == 1, err
    else:
        assert "hours off" in one_sentence(run("enrol", invite), 1) and not live.members


def _with_clock(init, clock):
    def made(self, **given):
        init(self, **{**given, "clock_ms": clock})

    return made


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("command", ["enrol", "pull", "contribute", "sync", "policy", "trust"])
def test_a_full_disk(run, live, invite, device, lab, monkeypatch, command):
    """docs/security.md, check 59: one sentence that says so, and everything works again when there is space."""
    run("pull")
    assert run("contribute", "--labels", device / "labels.csv")[0] == 0
    live.bundles["main", "all", 2] = lab.bundle_bytes(version=2)
    words = {
        "enrol": ("enrol", invite, "--home", device / "other"),
        "pull": ("pull",),
        "contribute": ("contribute", "--labels", device / "labels.csv"),
        "sync": ("sync",),
        "policy": ("policy", "deny", "maps"),
        "trust": ("trust", "remove", lab.SIGNER.public.hex()),
    }[command]
    before, waiting = in_use(run), run("outbox", "--json")[1]
    live.invite()  # its token counts once more
    with monkeypatch.context() as patch:
        patch.setattr(durable.os, "fsync", full)
        if command == "contribute":  # its row is SQLite's to write
            patch.setattr("edgefl_exchange.outbox.sqlite3.connect", _full_database)
        sentence = one_sentence(run(*words), 1)
    assert "disk is full" in sentence
    assert in_use(run) == before
    assert json.loads(run("outbox", "--json")[1])["items"][0]["id"] == json.loads(waiting)["items"][0]["id"]
    assert json.loads(run("policy", "show", "--json")[1])["allowed"].keys() == {"maps"}
    assert run(*words)[0] == 0
    if command == "sync":
        assert len(live.effects) == 1


class _Full:
    """A database whose disk is full."""

    def __init__(self, real):
        self._real = real

    def __getattr__(self, name):
        return getattr(self._real, name)

    def execute(self, statement, *values):
        if statement.lstrip().startswith("INSERT"):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorname = "SQLITE_FULL"
            raise error
        return self._real.execute(statement, *values)


_connect = sqlite3.connect


def _full_database(*words, **options):
    return _Full(_connect(*words, **options))


def cut_short(share):
    """The coordinator acts and dies while it answers: a part of the answer arrives, and is told to be all of it."""

    def fault(answer):
        return Answer(status=answer.status, body=answer.body[: round(share * len(answer.body))])

    return fault


def reset(_):
    raise Unavailable("the answer of coordinator.example was cut off; try again later", "cut_off")


@pytest.mark.parametrize("fault", [cut_short(0.6), reset], ids=["cut", "reset"])
def test_a_coordinator_that_dies_in_the_middle_of_its_answer(run, live, lab, labelled, fault):
    """docs/security.md, check 63: at every request of every command; one sentence, and the next call finishes it."""
    live.bundles["main", "all", 1] = lab.bundle_bytes()
    good = live.send
    text = encode_invite(live.invite(), live.now_ms)

    def dying_at(number):
        seen = [0]

        def send(request):
            answer = good(request)  # it acted
            seen[0] += 1
            return fault(answer) if seen[0] >= number else answer

        return send

    def until_done(*words):
        """Let it die at the first request, then at the second …, until a call comes through."""
        for number in range(1, 9):
            live.send = dying_at(number)
            code, out, err = run(*words)
            live.send = good
            if code == 0:
                return number
            assert (code, out) == (1, ""), err
            assert len([line for line in err.splitlines() if line.startswith("edgefl: ")]) == 1
        raise AssertionError("it never came through")

    assert until_done("enrol", text) > 2
    live.approve()
    assert run("trust", "add", lab.SIGNER.public.hex())[0] == run("policy", "allow", "maps")[0] == 0
    assert until_done("pull") > 2
    assert run("contribute", "--labels", labelled / "labels.csv")[0] == 0
    assert until_done("sync") > 1
    assert len(live.effects) == 1 and len(live.members) == 1
    assert json.loads(run("outbox", "--json")[1])["items"] == []


def test_a_damaged_membership_says_what_works(run, device, live):
    """docs/security.md, check 60: one sentence from every command, enrol among them; doing what it says works."""
    assert run("pull")[0] == 0
    path = run.home / "member" / "membership.json"
    path.write_bytes(path.read_bytes()[:200])
    text = encode_invite(live.invite("device-2"), live.now_ms)
    for words in (("sync",), ("pull",), ("contribute", "--labels", device / "labels.csv"), ("enrol", text)):
        sentence = one_sentence(run(*words), 1)
        assert f"move the folder {path.parent} away and enrol with a new invite" in sentence
    path.parent.rename(device / "away")
    assert run("enrol", text)[0] == 0
    live.approve("device-2")
    assert run("sync")[0] == run("contribute", "--labels", device / "labels.csv")[0] == run("sync")[0] == 0
    assert [name for name, *_ in live.effects] == ["device-2"]


def offered(size):
    """What a broadcast of so many bytes, too many for an envelope, is announced as."""
    return BlobReference(blob="ab" * 16, size=sealed_size(size), sha256="cd" * 32, key=bytes(32)).to_payload()


def test_a_broadcast_larger_than_its_task_needs(run, device, live, monkeypatch):
    """docs/security.md 2.2, endless data: what the signed task cannot need, or half of the memory cannot hold, is
    refused before a byte of it is asked for; one sentence beside the report, and what waited has been sent."""
    run("pull")
    most = 4000 * 5 * 36 * 2 + 2**20  # arrays that travel together, maps a class, tokens, float16; the header
    for size, memory, words in (
        (most + 2**16, 2**40, f"a round of this task needs at most {most}"),
        (most - 2**16, 2**21, "half of its memory"),
    ):
        monkeypatch.setattr("edgefl_exchange.member.memory_bytes", lambda memory=memory: memory)
        live.broadcasts[live.round] = offered(size)
        assert run("contribute", "--labels", device / "labels.csv")[0] == 0
        asked = len(live.requests)
        code, out, err = run("sync")
        assert code == 1 and words in err and "reply accepted" in out
        assert not any(request.path == "/v1/blob" for request in live.requests[asked:])
        assert [effect[1] for effect in live.effects] == list(range(1, live.round + 1))
        live.round += 1


def test_what_a_task_can_need():
    """Reckoned by hand: maps by the 4,000 arrays that travel together; a network by the largest reply; never above the
    largest blob."""
    task = told_task(max_reply_bytes=10**7, travels=("features", "weights"))
    assert largest_broadcast(task) == 10**7 + 65_536 * 256 + 2**20
    assert largest_broadcast(replace(task, travels=("weights",))) == 10**7 + 2**20
    assert largest_broadcast(replace(task, tokens=196, maps_per_class=5)) == 4000 * 5 * 196 * 2 + 2**20
    assert largest_broadcast(replace(task, max_reply_bytes=2**40)) == 2**30
    check_broadcast(10**7, task, 2 * 10**7)
    assert memory_bytes() > 2**20


def bad_pictures(lab):
    """docs/reference/pictures.md: pictures that no command takes, with the code of each."""
    photo = lab.photo(60, 40)
    png, other = lab.encoded(photo), [Image.fromarray(photo[::-1])]
    return {
        "cut.png": (png[: len(png) // 2], "truncated"),
        "cut.jpg": (lab.encoded(photo, "JPEG")[:400], "truncated"),
        "empty.png": (b"", "empty"),
        "a gif.png": (lab.encoded(photo, "GIF"), "unsupported_format"),
        "animated.png": (lab.encoded(photo, "PNG", save_all=True, append_images=other), "animated"),
        "huge.png": (png.ljust(20_000_001, b"\0"), "too_large"),
    }


def test_bad_pictures_among_those_that_are_contributed(run, device, lab):
    """Each kind: `contribute` names the file in one sentence and keeps nothing; `score` gives its code in a line."""
    run("pull")
    pictures = bad_pictures(lab)
    for name, (data, _) in pictures.items():
        (device / name).write_bytes(data)
        (device / "bad.csv").write_text(f"image,label\n0.png,MEL\n{name},NV\n")
        assert one_sentence(run("contribute", "--labels", device / "bad.csv"), 1).count(name) == 1
    lines = run("score", *(device / name for name in pictures), "--json")[1].splitlines()
    assert [json.loads(line)["error"]["code"] for line in lines] == [code for _, code in pictures.values()]
    assert json.loads(run("outbox", "--json")[1])["items"] == []


def test_a_bad_picture_among_those_that_teach(run, device, lab, school, tmp_path):
    """`train` names the file in one sentence, exit code 1, before anything is learned."""
    bundle = tmp_path / "learns.edgefl"
    bundle.write_bytes(school.learning_bytes())
    (device / "cut.png").write_bytes(bad_pictures(lab)["cut.png"][0])
    (device / "bad.csv").write_text("image,label\n0.png,MEL\ncut.png,NV\n")
    words = ("train", "--model", bundle, "--threads", "1", "--labels", device / "bad.csv")
    assert "cut.png: " in one_sentence(run(*words), 1)
    assert not (run.home / "learning" / "personal.payload").exists()


def test_little_memory_for_an_answer_is_one_sentence(asked, ward, monkeypatch):
    """docs/reference/pictures.md, `too_large`."""

    def scarce(*_given, **_named):
        raise MemoryError

    with monkeypatch.context() as little:
        little.setattr("edgefl_client.scoring.drawing.answer_picture.draw_answer", scarce)
        code, out, err = asked("which organ?", "--json", "--heatmap", ward / "maps")
        assert (code, json.loads(out)["answer"]) == (1, "lung") and "no heat map: there is not enough memory" in err
    for step in ("prepare", "ask_prepared"):
        with monkeypatch.context() as little:
            little.setattr(f"edgefl_client.scoring.asker.Asker.{step}", scarce)
            code, out, _ = asked("which organ?", "--json")
            assert (code, json.loads(out)["error"]["code"]) == (1, "too_large")
