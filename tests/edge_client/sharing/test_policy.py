"""`policy.toml`: what may leave. Source: docs/reference/sharing.md; docs/security.md, assets A2 and A5."""

import datetime
import errno
import json
import subprocess
import sys
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_client.home import Home, write_json
from edgefl_client.sharing.policy import (
    PASSES,
    Limits,
    Policy,
    PolicyError,
    Spent,
    load_policy,
    policy_text,
    save_policy,
)
from edgefl_client.sharing.spending import DAY_MS, MAX_ENTRIES, note_spent, permit, read_spent
from edgefl_exchange.outbox import WorkItem
from edgefl_protocol.envelopes.blob import BlobReference
from edgefl_protocol.errors import StorageError
from edgefl_protocol.payload import Payload
from edgefl_protocol.rules.travels import KINDS, travels_of
from edgefl_protocol.strict_json import MAX_JSON_BYTES

NOW_MS = 1_790_000_000_000  # 2026-09-21, 13:33:20 UTC
TODAY = datetime.date(2026, 9, 21)
DAY = datetime.timedelta(days=1)
OPEN = Policy(allowed={"maps": None})


def refused(policy, travels=("maps",), size=100, **spent):
    with pytest.raises(PolicyError) as error:
        policy.check(travels, size, Spent(now_ms=NOW_MS, **spent))
    assert str(error.value).count(". ") == 0 and "edgefl" in str(error.value)
    return error.value.code


def test_at_first_nothing_may_leave():
    """An owner who was never asked has said no: to each kind, and to a reply of numbers alone."""
    for kind in KINDS:
        assert refused(Policy(), (kind,)) == "not_allowed"
    assert refused(Policy(), ()) == "not_allowed"
    assert refused(OPEN, ("maps", "features")) == "not_allowed"
    OPEN.check(("maps",), 1, Spent(now_ms=NOW_MS))
    OPEN.check((), 1, Spent(now_ms=NOW_MS))


@pytest.mark.parametrize(("last", "code"), [(TODAY - DAY, "consent_expired"), (TODAY, None), (TODAY + DAY, None)])
def test_consent_ends_with_its_last_day(last, code):
    """The last day is the owner's own, in UTC, to its end."""
    policy = Policy(allowed={"maps": last})
    if code:
        assert refused(policy) == code
        assert refused(policy, ()) == "not_allowed"
        return
    policy.check(("maps",), 1, Spent(now_ms=NOW_MS))
    midnight = int(datetime.datetime(last.year, last.month, last.day, tzinfo=datetime.UTC).timestamp() * 1000) + DAY_MS
    policy.check(("maps",), 1, Spent(now_ms=midnight - 1))
    with pytest.raises(PolicyError, match="ended on"):
        policy.check(("maps",), 1, Spent(now_ms=midnight))


@given(
    st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 100), st.integers(0, 2**40), st.integers(0, 2**40),
    st.integers(0, 100),
)  # fmt: skip
def test_limits_hold_exactly(size, spent, rounds, a_round, a_day, most):
    """What would exceed one of the three limits is refused, and nothing else is: three comparisons."""
    limits = Limits(bytes_per_round=a_round, bytes_per_day=a_day, rounds_per_day=most)
    policy = Policy(allowed={"maps": None}, limits=limits)
    may = size <= a_round and spent + size <= a_day and rounds < most
    try:
        policy.check(("maps",), size, Spent(now_ms=NOW_MS, bytes=spent, rounds=rounds))
    except PolicyError as error:
        assert not may and error.code in ("round_too_large", "day_too_large", "too_many_rounds")
        # Only a limit of the owner's that is 0 is told to pass with time where it never does: it is meant to stop.
        assert error.code not in PASSES or 0 in (a_day, most) or size <= min(a_round, a_day)
    else:
        assert may


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (["maps.0", "maps.7"], ("maps",)),
        (["features"], ("features",)),
        (["prototypes.3"], ("prototypes",)),
        (["outputs.3", "counts.3"], ("logits", "weights")),
        (["moments.cls", "moments.mean"], ("features",)),
        (["keys", "selections", "prompts.g"], ("prompts",)),
        (["conv1.weight", "features", "layer1.0.bn1.bias"], ("features", "weights")),
        (["prompts.b", "head.weight"], ("prompts", "weights")),
        (["mapsy", "weights.x"], ("weights",)),
        ([], ()),
    ],
)
def test_content_is_named_by_its_arrays(names, kinds):
    """docs/design.md, section 4: the kinds a method may share; whatever has no name of its own counts as weights."""
    assert travels_of(names) == kinds


def test_every_kind_has_words_for_its_owner():
    """docs/security.md, exchange policy: `edgefl policy show` tells of each kind, in the order of the rule."""
    told = policy_text(Policy(), Spent(now_ms=NOW_MS)).splitlines()
    assert [line.partition(" ")[0] for line in told[: len(KINDS)]] == list(KINDS)


@given(
    st.dictionaries(st.sampled_from(sorted(KINDS)), st.none() | st.dates()),
    st.integers(0, 2**60),
    st.integers(0, 2**60),
    st.integers(0, 2**31),
)
def test_what_is_written_is_read(tmp_path_factory, allowed, a_round, a_day, rounds):
    """Round trip through the file, and the standard library's own reader sees the same dates and numbers."""
    home = Home(tmp_path_factory.mktemp("home"))
    limits = Limits(bytes_per_round=a_round, bytes_per_day=a_day, rounds_per_day=rounds)
    policy = Policy(allowed=allowed, limits=limits)
    save_policy(home, policy)
    assert load_policy(home) == policy
    record = tomllib.loads(home.policy_file.read_text())
    assert record["limits"]["bytes_per_day"] == a_day
    assert {kind: None if day == "always" else day for kind, day in record["allowed"].items()} == allowed
    assert home.policy_file.stat().st_mode & 0o777 == 0o600


def test_a_policy_that_was_cut_off_allows_less_and_never_more(tmp_path):
    """docs/security.md, check 60: cut at every byte, it is refused, or allows what it allowed under the same limits."""
    home = Home(tmp_path / "home")
    whole = Policy(allowed={"maps": TODAY, "features": None, "weights": TODAY + 30 * DAY},
                   limits=Limits(rounds_per_day=1, bytes_per_day=2_000_000, bytes_per_round=1_000_000))  # fmt: skip
    save_policy(home, whole)
    content, read = home.policy_file.read_bytes(), 0
    for keep in range(len(content)):
        home.policy_file.write_bytes(content[:keep])
        try:
            found = load_policy(home)
        except PolicyError:
            continue
        assert found.allowed.items() <= whole.allowed.items()
        assert found.limits == whole.limits or not found.allowed
        read += 1
    assert read > 3


BROKEN = {
    "no toml": "allowed = [",
    "no text": b"\xff\xfe",
    "no format": "[allowed]\nmaps = 2027-01-01\n",
    "newer format": "format = 2\n",
    "a bool for the format": "format = true\n",
    "unknown table": "format = 1\n[allow]\nmaps = 2027-01-01\n",
    "unknown kind": "format = 1\n[allowed]\nmap = 2027-01-01\n",
    "unknown limit": "format = 1\n[limits]\nbytes_a_day = 0\n",
    "negative limit": "format = 1\n[limits]\nbytes_per_day = -1\n",
    "a bool for a limit": "format = 1\n[limits]\nbytes_per_day = true\n",
    "a float for a limit": "format = 1\n[limits]\nbytes_per_day = 1e9\n",
    "infinity": "format = 1\n[limits]\nbytes_per_day = inf\n",
    "yes for a day": "format = 1\n[allowed]\nmaps = true\n",
    "text for a day": 'format = 1\n[allowed]\nmaps = "2027-01-01"\n',
    "a time for a day": "format = 1\n[allowed]\nmaps = 2027-01-01T10:00:00Z\n",
    "no table": "format = 1\nallowed = 3\n",
    "too long": "#" * 70_000,
}


@pytest.mark.parametrize("why", BROKEN)
def test_a_policy_that_is_not_understood_lets_nothing_leave(why, run, tmp_path):
    """One sentence and exit 3 at every command that asks it, and never a default in place of a misspelt word."""
    text = BROKEN[why]
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "policy.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises((PolicyError, StorageError)):
        load_policy(Home(home))
    for command in (("policy", "show"), ("policy", "allow", "maps")):
        code, out, err = run(*command)
        assert (code, out) == (1 if why == "too long" else 3, "")
        assert len(err.splitlines()) == 1 and str(home / "policy.toml") in err
    before = (home / "policy.toml").read_bytes()
    assert before == (text if isinstance(text, bytes) else text.encode())


def test_the_command_changes_what_it_names(run, tmp_path):
    """docs/reference/sharing.md: show, allow, deny, limit."""
    assert json.loads(run("policy", "show", "--json")[1])["allowed"] == {}
    assert not (tmp_path / "home").exists()  # nothing is created by looking
    before = datetime.datetime.now(datetime.UTC).date()
    a_year = json.loads(run("policy", "allow", "maps", "weights", "--json")[1])["allowed"]["maps"]
    after = datetime.datetime.now(datetime.UTC).date()
    assert before <= datetime.date.fromisoformat(a_year) - 365 * DAY <= after
    found = json.loads(run("policy", "allow", "features", "--until", "always", "--json")[1])
    assert found["allowed"] == {"maps": a_year, "features": "always", "weights": a_year}
    found = json.loads(run("policy", "deny", "weights", "prompts", "--json")[1])
    assert found["allowed"] == {"maps": a_year, "features": "always"}
    found = json.loads(run("policy", "limit", "--bytes-per-day", "1000", "--rounds-per-day", "0", "--json")[1])
    assert found["limits"]["bytes_per_day"] == 1000 and found["limits"]["rounds_per_day"] == 0
    code, out, _ = run("policy", "show")
    assert code == 0
    assert "maps (attention maps of pictures): may leave until " + a_year in out
    assert "weights (learned weights of the network): stays here" in out
    for wrong in (("allow", "photos"), ("allow",), ("limit",), ("limit", "--bytes-per-day", "-1"),
                  ("allow", "maps", "--until", "soon"), ("allow", "maps", "--until", "2020-01-01")):  # fmt: skip
        assert run("policy", *wrong)[0] == 2


def noted(home, idem, round_number, at_ms, size=100):
    note_spent(home, at_ms, federation="skin", round_number=round_number, idem=idem, travels=("maps",), size=size)


def test_a_day_is_the_last_24_hours(tmp_path):
    """An entry counts for 24 hours to the millisecond; a retry counts once; another round of it counts again."""
    home = Home(tmp_path / "home")
    assert read_spent(home, NOW_MS) == Spent(now_ms=NOW_MS)
    noted(home, "a", 1, NOW_MS)
    noted(home, "a", 1, NOW_MS + 5)  # the same item, sent again
    noted(home, "b", 2, NOW_MS + 10)
    assert read_spent(home, NOW_MS + 20) == Spent(now_ms=NOW_MS + 20, rounds=2, bytes=200)
    own = read_spent(home, NOW_MS + 20, federation="skin", round_number=2, idem="b")
    assert (own.rounds, own.bytes) == (1, 100)
    assert read_spent(home, NOW_MS + DAY_MS + 4).bytes == 200
    assert read_spent(home, NOW_MS + DAY_MS + 5).bytes == 100
    assert read_spent(home, NOW_MS + DAY_MS + 10).bytes == 0


def item(idem="b", content="0", blob=None):
    payload = Payload({}, {"site_sha256": content * 64}).to_bytes()
    return WorkItem(
        idem=idem, federation="skin", kind="reply", round=None, created_ms=0, attempts=0, size=len(payload),
        content=lambda: payload, blob=blob,
    )  # fmt: skip


@pytest.mark.parametrize("large", [False, True])
def test_what_is_learned_again_under_its_key_counts_again(large, tmp_path):
    """docs/security.md, exchange policy: both left. The key follows from the round, the content from the learning; the
    same content, sent again, counts once. What was noted counts against the limit of the day."""
    home = Home(tmp_path / "home")
    first, second, third = (
        item(content=one, blob=BlobReference(blob=one * 32, size=99, sha256=one * 64, key=bytes(32)) if large else None)
        for one in "123"
    )
    size = first.size
    twice = Policy(allowed={"maps": None}, limits=Limits(bytes_per_day=2 * size))
    ask = permit(home, twice, lambda: NOW_MS)
    for one, bytes_ in ((first, size), (first, size), (second, 2 * size), (second, 2 * size), (first, 2 * size)):
        assert ask(one, 3) is None and read_spent(home, NOW_MS).bytes == bytes_
    assert ask(third, 3).code == "day_too_large" and read_spent(home, NOW_MS).rounds == 1


def test_a_clock_that_was_ahead_counts_for_a_day_and_not_for_years(tmp_path):
    """docs/security.md, reliability table: clock jumps. What the future dated ages from the next question on."""
    home = Home(tmp_path / "home")
    once_a_day = Policy(allowed={"maps": None}, limits=Limits(rounds_per_day=1))
    noted(home, "a", 1, NOW_MS + 10_000 * DAY_MS)
    for now_ms, code in (
        (NOW_MS, "too_many_rounds"),
        (NOW_MS + DAY_MS - 1, "too_many_rounds"),
        (NOW_MS + DAY_MS, None),
    ):
        error = permit(home, once_a_day, lambda now_ms=now_ms: now_ms)(item(), 2)
        assert (error and error.code) == code


def test_a_coordinator_cannot_make_the_notes_endless(tmp_path):
    """Rounds that open and close at once, the same reply sent again under a new key: it ends, and the file is read."""
    home = Home(tmp_path / "home")
    generous = Policy(allowed={"maps": None}, limits=Limits(rounds_per_day=10**9, bytes_per_day=10**18))
    entries = [
        {
            "idem": f"{n:032x}",
            "federation": "f" * 64,
            "round": n,
            "travels": " ".join(KINDS),
            "bytes": 10**12,
            "at_ms": NOW_MS,
        }
        for n in range(MAX_ENTRIES)
    ]
    home.prepare()
    write_json(home.spent_file, {"format": 1, "left": entries[:-1]})
    assert permit(home, generous, lambda: NOW_MS)(item("a" * 32), 10**6) is None
    assert home.spent_file.stat().st_size < MAX_JSON_BYTES
    error = permit(home, generous, lambda: NOW_MS)(item("b" * 32), 10**6 + 1)
    assert error.code == "too_many_rounds"
    assert permit(home, generous, lambda: NOW_MS)(item("a" * 32), 10**6) is None  # a retry
    assert permit(home, generous, lambda: NOW_MS + DAY_MS)(item("b" * 32), 10**6 + 1) is None


def test_what_was_spent_survives_a_kill(tmp_path):
    """On the disk before anything leaves: a process that dies right after the note has spent it."""
    home = Home(tmp_path / "home")
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom edgefl_client.home import Home\n"
        "from edgefl_client.sharing.spending import note_spent\n"
        "note_spent(Home(Path(sys.argv[1])), int(sys.argv[2]), federation='skin', round_number=1, idem='a', "
        "travels=('maps',), size=7)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(home.root), str(NOW_MS)], check=False)
    assert done.returncode == -9
    assert read_spent(home, NOW_MS).bytes == 7
    assert home.spent_file.stat().st_mode & 0o777 == 0o600


def test_damaged_notes_let_nothing_leave(tmp_path):
    """docs/security.md, check 60: a damaged state file is a typed error, never a wrong number."""
    home = Home(tmp_path / "home")
    noted(home, "a", 1, NOW_MS)
    whole = home.spent_file.read_bytes()
    others = [b"[]", b"{}", b'{"format": 1, "left": [{}]}', whole.replace(b": 100", b': "100"'), b"[" * 5000]
    for damaged in [whole[:keep] for keep in range(0, len(whole) - 2, 8)] + others:
        home.spent_file.write_bytes(damaged)
        with pytest.raises(StorageError, match="damaged") as error:
            permit(home, OPEN, lambda: NOW_MS)(item(), 1)
        assert str(home.spent_file) in str(error.value)


def test_a_full_disk_lets_nothing_leave(tmp_path, monkeypatch):
    """docs/security.md, reliability table: what cannot be noted must not leave, and what was noted stays."""
    home = Home(tmp_path / "home")
    noted(home, "a", 1, NOW_MS)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("edgefl_protocol.durable.os.fsync", full)
        with pytest.raises(StorageError, match="the disk is full") as error:
            permit(home, OPEN, lambda: NOW_MS)(item(), 2)
    assert error.value.code == "disk_full"
    assert read_spent(home, NOW_MS).bytes == 100
