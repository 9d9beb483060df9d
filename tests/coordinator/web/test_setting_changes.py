"""`edgefl-coordinator set`: what may change, when it counts, and what is refused.

Source: docs/reference/coordinator.md.
"""

import datetime
import json
import re
import tomllib

import msgspec
import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.verification import PolicyBuilder, Store
from tests.coordinator.conftest import settings_table

from edgefl_coordinator.cli import main
from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.settings import (
    CoordinatorSettings,
    LimitSettings,
    ProtectionSettings,
    RoundSettings,
    TaskSettings,
    agreed,
    load_settings,
    settings_from_table,
)
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_coordinator.web.setting_changes import AT_ONCE, AT_RESTART
from edgefl_coordinator.web.tls import make_development_certificate
from edgefl_protocol import Payload
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.messages.requests import TaskReply

FINISHABLE = {"quorum_min": 3, "quorum_target": 3, "min_cohort": 2}
AGREED = {  # with the members, or of the keys: they never change
    "federation", "suite", "root_key_id", "database", "payloads", "rounds.count",
    *(f"task.{field.name}" for field in msgspec.structs.fields(TaskSettings) if field.name != "max_samples"),
}  # fmt: skip


def made(**changes: object) -> CoordinatorSettings:
    return settings_from_table(settings_table(**changes))


def change(coordinator, **changes: str) -> dict[str, object]:
    return OPERATIONS["set"](coordinator, {"changes": {key.replace("__", "."): text for key, text in changes.items()}})


def test_every_setting_is_known_to_change_or_not() -> None:
    """A new setting has to be put in one of the three lists."""
    nested = {"task": TaskSettings, "rounds": RoundSettings, "protection": ProtectionSettings, "limits": LimitSettings}
    plain = {field.name for field in msgspec.structs.fields(CoordinatorSettings)} - set(nested)
    inner = {f"{name}.{field.name}" for name, kind in nested.items() for field in msgspec.structs.fields(kind)}
    assert plain | inner == {*AT_ONCE, *AT_RESTART} | AGREED
    assert len(AT_ONCE) + len(AT_RESTART) + len(AGREED) == len(plain | inner)
    table = {**settings_table()["task"], "settings": {"lr": 0.1}}
    found = {re.sub(r"(task\.(backbone|settings))\..*", r"\1", one) for one in agreed(made(task=table))}
    assert found == AGREED - {"database", "payloads"}  # `restore` may put the store elsewhere


def test_a_change_counts_for_the_next_request_and_the_next_start(make_coordinator, tools) -> None:
    """Members read the new quorum at once; the file has it, readable by the owner alone; the audit log names it."""
    coordinator = make_coordinator(rounds=FINISHABLE)
    member = tools.approved_member(coordinator, "clinic-a")
    told = change(coordinator, rounds__quorum_target="5", rounds__deadline_s="7200")
    late = "a round needs 3 replies, and 1 member is approved, so none can close"
    assert told == {"changed": {"rounds.quorum_target": 5, "rounds.deadline_s": 7200}, "restart": [], "warning": late}
    assert TaskReply.from_payload(member.call("task", Payload())).quorum_target == 5
    home = coordinator.store.home
    assert load_settings(home) == coordinator.settings
    assert home.config.stat().st_mode & 0o777 == 0o600
    rows = OPERATIONS["log"](coordinator, {"from_ms": 0, "most": 2})["shown"]
    assert [(row["event"], row["subject"], row["detail"]) for row in rows] == [
        ("setting", "rounds.quorum_target", {"value": 5}), ("setting", "rounds.deadline_s", {"value": 7200}),
    ]  # fmt: skip


def test_a_port_that_members_do_not_call(coordinator) -> None:
    """Members call `public_url`: another port alone leaves them at the old one; behind a proxy it never was theirs."""
    warning = change(coordinator, port="8448")["warning"]
    assert "calling https://127.0.0.1:8443;" in str(warning) and "set public_url https://127.0.0.1:8448." in str(
        warning
    )
    assert change(coordinator, port="8449")["warning"] is None  # told before
    assert change(coordinator, port="8450", public_url="https://127.0.0.1:8450")["warning"] is None
    change(coordinator, public_url="https://127.0.0.1")
    assert change(coordinator, port="8451")["warning"] is None


# fmt: off
REFUSED = [
    ({"rounds__quorum_min": "2"},                        "3 or more, or rounds.min_cohort 1 or less with rounds.allow"),
    ({"rounds__quorum_min": "9"},                        r"rounds.quorum_min \(9\) must not be above rounds.quorum_"),
    ({"rounds__quorum_min": "three"},                    "rounds.quorum_min takes a whole number, not 'three'"),
    ({"rounds__quorum_min": "0"},                        "quorum_min is 0; it must be a whole number of at least 1"),
    ({"rounds__min_cohort": "1"},                        "or allow it with rounds.allow_small_cohort true"),
    ({"rounds__quorum_mn": "3"},                         "did you mean rounds.quorum_min"),
    ({"rounds__start": "later"},                         "allowed: automatic, manual"),
    ({"rounds__allow_small_cohort": "perhaps"},          "takes true or false"),
    ({"rounds__deadline_s": "0"},                        "of at least 1"),
    ({"limits__header_deadline_s": "soon"},              "takes a number"),
    ({"task__method": "fedavg"},                         "task.method cannot be changed, because members rely on it"),
    ({"rounds__count": "9"},                             "rounds.count cannot be changed"),
    ({"federation": "other"},                            "federation cannot be changed"),
    ({"task__backbone.name": "x"},                       "there is no setting task.backbone.name; "),
    ({"elsewhere__x": "9"},                              "these can be changed: ca, certificate, "),
    ({"public_url": "http://fl.example.org"},            "must begin with https"),
    ({"public_url": "https://[::1"},                     "no host and port that can be read: write it as https://HOST"),
    ({"rounds__quorum_target": "4", "host": "", "nonsense": "1"}, "there is no setting nonsense"),
]
# fmt: on


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_is_refused_changes_nothing(make_coordinator, changes, words) -> None:
    """One sentence with what is allowed; neither the file nor what counts has changed, not in part."""
    coordinator = make_coordinator(rounds=FINISHABLE)
    before, config = coordinator.settings, coordinator.store.home.config.read_bytes()
    with pytest.raises(OperatorError, match=words):
        change(coordinator, **changes)
    assert coordinator.settings == before and coordinator.store.home.config.read_bytes() == config
    assert OPERATIONS["log"](coordinator, {"from_ms": 0, "most": 9})["shown"] == []


def test_old_settings_that_cannot_finish_bar_no_other_change(make_coordinator) -> None:
    """A coordinator made with the old defaults: its deadline may change, its quorum only for one that can finish."""
    coordinator = make_coordinator(rounds={"quorum_min": 2, "quorum_target": 3, "min_cohort": 3})
    assert change(coordinator, rounds__deadline_s="60")["changed"] == {"rounds.deadline_s": 60}
    with pytest.raises(OperatorError, match="could stop for good"):
        change(coordinator, rounds__quorum_min="3")
    assert change(coordinator, rounds__quorum_min="3", rounds__min_cohort="2")["restart"] == []


def test_at_the_command_line(make_coordinator) -> None:
    """Exit 0, 2 for what cannot be had; what needs a restart says so."""
    coordinator = make_coordinator(rounds=FINISHABLE)
    coordinator.store.close()
    home = coordinator.store.home

    def run(*words: str):
        return CliRunner().invoke(main, ["set", *words, "--home", str(home.root)])

    moved = home.root / "fullchain.pem"
    moved.write_bytes((home.tls / "server.pem").read_bytes())
    done = run("rounds.quorum_target", "4", "port", "9443", "certificate", str(moved))
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "rounds.quorum_target is now 4",
        "port is now 9443; it takes effect when `serve` is restarted",
        f"certificate is now {moved}; it takes effect when `serve` is restarted",
    ]
    assert run("rounds.allow_small_cohort", "true").stdout == "rounds.allow_small_cohort is now true\n"
    assert run("proxy_ends_tls", "true").stdout.endswith("by address as before until `serve` is restarted\n")
    kept = "the open round keeps its own"
    assert (
        run("rounds.deadline_s", "60").stdout
        == f"rounds.deadline_s is now 60; it counts from the next deadline, and {kept}\n"
    )
    log = CliRunner().invoke(main, ["log", "--home", str(home.root)]).stdout
    assert "the setting rounds.allow_small_cohort is now true" in log  # in the words of `set`
    below = run("rounds.deadline_s", "-5")
    assert below.exit_code == 2 and "rounds.deadline_s is -5; it must be a whole number of at least 1" in below.stderr
    assert tomllib.loads(home.config.read_text())["port"] == 9443
    facts = json.loads(run("rounds.min_cohort", "2", "--json").stdout)
    assert facts == {"changed": {"rounds.min_cohort": 2}, "restart": [], "warning": None}
    joined = run("rounds.quorum_min=2")
    assert joined.exit_code == 2 and "leave a space between KEY and VALUE: set rounds.quorum_min 2" in joined.stderr
    least = run("rounds.quorum_min", "1").stderr  # fewer than none cannot be given
    assert "or rounds.min_cohort 0" in least
    assert "0 or less" not in least
    for words in (("rounds.quorum_min",), ("rounds.quorum_min", "2"), ("nonsense", "1")):
        refused = run(*words)
        assert refused.exit_code == 2 and refused.stdout == "" and "Traceback" not in refused.stderr


def test_a_clock_that_members_correct_does_not_keep_them_from_the_first_answer() -> None:
    """docs/security.md 2.5: up to 48 hours. A verifier that is not ours takes the certificate at either end of them."""
    now = datetime.datetime(2026, 5, 1, 12, tzinfo=datetime.UTC)
    made = make_development_certificate(["fl.example.org"], now)
    server, authority = x509.load_pem_x509_certificates(made.chain)
    for hours in (-48, 0, 48):
        seen = now + datetime.timedelta(hours=hours)
        asked = PolicyBuilder().store(Store([authority])).time(seen)
        assert asked.build_server_verifier(x509.DNSName("fl.example.org")).verify(server, []) == [server, authority]
    lasts = server.not_valid_after_utc - server.not_valid_before_utc
    assert lasts <= datetime.timedelta(days=398)


def pem_files(folder) -> None:
    """What an operator may name by mistake; `other.pem` and `other.key` fit each other."""
    now = datetime.datetime.now(datetime.UTC)
    made = make_development_certificate(["fl.example.org"], now)
    (folder / "other.pem").write_bytes(made.chain)
    (folder / "other.key").write_bytes(made.key)
    (folder / "authority.pem").write_bytes(made.ca)
    old = make_development_certificate([], now - datetime.timedelta(days=500))
    (folder / "old.pem").write_bytes(old.chain)
    (folder / "old.key").write_bytes(old.key)
    (folder / "notes.txt").write_text("this is no certificate\n")
    key = serialization.load_pem_private_key(made.key, None)
    locked = serialization.BestAvailableEncryption(b"secret")
    forms = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "locked.key").write_bytes(key.private_bytes(*forms, locked))
    of_another_kind = rsa.generate_private_key(65537, 2048)
    (folder / "rsa.key").write_bytes(of_another_kind.private_bytes(*forms, serialization.NoEncryption()))


# fmt: off
FILES = [
    ({"certificate": "other.pem"},                                "set certificate FILE certificate_key FILE"),
    ({"certificate_key": "other.key"},                            "other.key does not belong to the certificate"),
    ({"certificate_key": "rsa.key"},                              "rsa.key does not belong to the certificate .*give"),
    ({"certificate": "notes.txt"},                                "are not a PEM certificate and its PEM private key"),
    ({"certificate": "nowhere.pem"},                              "nowhere.pem cannot be read: No such file"),
    ({"certificate": "other.pem", "certificate_key": "gone.key"}, "gone.key cannot be read"),
    ({"certificate": "other.pem", "certificate_key": "locked.key"}, "locked.key is encrypted"),
    ({"ca": "notes.txt"},                                         "notes.txt holds no certificate in PEM form"),
    ({"ca": "other.key"},                                         "holds no certificate in PEM form"),
    ({"ca": "nowhere.pem"},                                       "nowhere.pem"),
]
# fmt: on


@pytest.mark.parametrize(("changes", "words"), FILES)
def test_a_file_that_cannot_be_used_is_refused_at_once(make_coordinator, changes, words) -> None:
    """docs/reference/coordinator.md, settings: not at the next start of `serve`, nor by a traceback of `invite`."""
    coordinator = make_coordinator(rounds=FINISHABLE)
    pem_files(coordinator.store.home.root)
    before = coordinator.settings
    with pytest.raises(EdgeflError, match=words):
        change(coordinator, **changes)
    assert coordinator.settings == before
    change(coordinator, certificate="other.pem", certificate_key="other.key", ca="other.pem")
    change(coordinator, ca="")


PAIR, OLD = ({"certificate": f"{name}.pem", "certificate_key": f"{name}.key"} for name in ("other", "old"))
# fmt: off
UNMET = [
    ({"public_url": "https://fl.example.net"},                 "not valid for 'fl.example.net'"),
    ({**PAIR, "ca": "", "public_url": "https://10.0.0.1"},     "not valid for '10.0.0.1'"),
    (PAIR,                                                     "the authority that ca names did not sign it"),
    ({"ca": "authority.pem"},                                  "the authority that ca names did not sign it"),
    ({**OLD, "ca": "old.pem"},                                 "certificate has expired"),
    ({**OLD, "ca": ""},                                        "certificate has expired"),
]
# fmt: on


@pytest.mark.parametrize(("changes", "why"), UNMET)
def test_a_certificate_that_members_would_refuse(make_coordinator, changes, why) -> None:
    """Issued for another address, not signed by the pinned authority, or expired: refused where it is set, and told by
    `status --check` where the files came to lie there otherwise. A proxy that has the certificate makes it right."""
    coordinator = make_coordinator(rounds=FINISHABLE)
    pem_files(coordinator.store.home.root)
    before = coordinator.settings
    with pytest.raises(OperatorError, match=why) as refused:
        change(coordinator, **changes)
    assert "set certificate FILE certificate_key FILE ca FILE" in str(refused.value) and coordinator.settings == before
    coordinator.settings = msgspec.structs.replace(before, **changes)
    assert OPERATIONS["status"](coordinator, {})["certificate_problem"] == str(refused.value)
    coordinator.settings = before
    change(coordinator, proxy_ends_tls="true", **changes)
    assert OPERATIONS["status"](coordinator, {})["certificate_problem"] is None


def test_certificate_key_and_authority_are_one_change(make_coordinator) -> None:
    """docs/guides/own-address.md, step 2: the address of a new certificate too."""
    coordinator = make_coordinator(rounds=FINISHABLE)
    pem_files(coordinator.store.home.root)
    change(coordinator, public_url="https://fl.example.org", ca="authority.pem", **PAIR)
    assert OPERATIONS["status"](coordinator, {})["certificate_problem"] is None
    (coordinator.store.home.root / "other.key").unlink()
    assert "other.key cannot be read" in OPERATIONS["status"](coordinator, {})["certificate_problem"]


def test_an_invite_without_a_usable_certificate_is_a_sentence(make_coordinator) -> None:
    """Also where the file was damaged after it was set."""
    coordinator = make_coordinator()
    (coordinator.store.home.tls / "ca.pem").write_text("this is no certificate\n")
    with pytest.raises(OperatorError, match=r"ca.pem holds no certificate in PEM form"):
        OPERATIONS["invite"](coordinator, {"name": "clinic-a", "role": "site", "hours": 1})
