"""The command line: exit codes, one sentence, JSON (docs/design.md 5), operation with and without a server."""

import asyncio
import inspect
import json
import subprocess
import sys
import threading
from typing import Any

import pytest
from click.testing import CliRunner

from edgefl_coordinator.cli import main
from edgefl_coordinator.errors import NotAllowedError, OperatorError
from edgefl_coordinator.founding import task
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.web.admin import run_operation, serve_admin
from edgefl_coordinator.web.door import Door
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_coordinator.web.service import _listen
from edgefl_protocol.records.invite import decode_invite


@pytest.fixture
def closed_home(make_coordinator) -> CoordinatorHome:
    """A home that nobody has open."""
    coordinator = make_coordinator()
    coordinator.store.close()
    return coordinator.store.home


def run(home: CoordinatorHome, *arguments: str) -> Any:
    return CliRunner().invoke(main, [*arguments, "--home", str(home.root)])


def test_help_and_server_load_no_trainer() -> None:
    """docs/security.md, decision 7: the process that serves imports the protocol only; `--help` not even that much."""
    code = (
        "import sys, edgefl_coordinator.cli; early = set(sys.modules);"
        "import edgefl_coordinator.web.service, edgefl_coordinator.web.operations;"
        "print(sorted({'sqlalchemy', 'uvicorn', 'numpy'} & early),"
        " sorted(name for name in sys.modules if name.split('.')[0] in"
        " {'torch', 'timm', 'edgefl_trainer', 'edgefl_client', 'edgefl_export', 'onnxruntime'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0].endswith("[]")
    assert "sqlalchemy" not in done.stdout and "uvicorn" not in done.stdout


@pytest.mark.slow
def test_init_loads_no_more_of_the_trainer_than_it_tries() -> None:
    """It waited for plotting, statistics and the whole run: a third of its time. PyTorch alone takes long enough."""
    code = (
        "import sys, edgefl_coordinator.founding.task, edgefl_coordinator.rounds.worker;"
        "import edgefl_trainer.engine.settings;"
        "print(*sorted({'matplotlib', 'scipy', 'sklearn', 'edgefl_trainer.engine.run'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    assert "edgefl_trainer.engine.run" not in inspect.getsource(task)  # in functions, which the above does not call


def test_status_and_invite(closed_home) -> None:
    shown = run(closed_home, "status")
    assert shown.exit_code == 0 and "waiting" in shown.stdout
    facts = json.loads(run(closed_home, "status", "--json").stdout)
    assert {"federation", "state", "round", "rounds", "members", "bundles", "quorum_min", "journal_mode"} <= set(facts)
    invited = run(closed_home, "invite", "--role", "device", "dermatoscope-1")
    invite = decode_invite(invited.stdout, 1_790_000_000_000)
    assert (invite.name, invite.role, invite.federation) == ("dermatoscope-1", "device", "skin")
    assert "once" not in invited.stdout and "valid until" in invited.stderr


def test_an_invite_in_a_file(closed_home, tmp_path) -> None:
    """A secret of mode 0600, and nowhere else; no file is replaced."""
    file = tmp_path / "clinic-1.invite"
    made = run(closed_home, "invite", "--role", "device", "clinic-1", "-o", str(file))
    assert made.exit_code == 0 and made.stdout == f"{file}\n" and file.stat().st_mode & 0o777 == 0o600
    assert decode_invite(file.read_text(), 1_790_000_000_000).name == "clinic-1"
    assert "efl1-" not in made.stderr and "counts no more" not in made.stderr
    nowhere = tmp_path / "nowhere"
    renewed = f"{file} exists already; delete it first"
    for taken, told in ((file, renewed), (nowhere / "x", f"the folder {nowhere} does not exist")):
        refused = run(closed_home, "invite", "--role", "device", "clinic-1", "-o", str(taken))
        assert refused.exit_code == 2 and told in refused.stderr and "name another file" in refused.stderr
        assert (taken is file) is ("a new invite for clinic-1 withdraws the earlier one" in refused.stderr)
    as_json = run(closed_home, "invite", "--role", "device", "other", "-o", str(tmp_path / "2"), "--json")
    assert json.loads(as_json.stdout)["file"] == str(tmp_path / "2") and "efl1-" not in as_json.stdout


def test_a_bad_name_is_told_in_words(closed_home) -> None:
    refused = run(closed_home, "invite", "--role", "device", "Clinic A")
    assert (
        refused.exit_code == 1 and "letters a to z and A to Z, digits" in refused.stderr and "{" not in refused.stderr
    )


def test_an_invite_that_replaces_another_says_so(make_coordinator, tools) -> None:
    """The device that holds the earlier one could not enrol, or has to enrol again."""
    coordinator = make_coordinator()
    invite = {"name": "clinic-a", "role": "site", "hours": 1.0}
    assert OPERATIONS["invite"](coordinator, invite)["replaced"] is None
    coordinator.clock.now_ms += 1
    home = coordinator.store.home
    tools.Member(coordinator, "clinic-a").enrol(tools.token_of(coordinator, "clinic-a"))
    coordinator.store.close()
    pending = run(home, "invite", "--role", "site", "clinic-a")
    assert "clinic-a had enrolled and was not approved; it has to enrol again, with this invite" in pending.stderr
    again = run(home, "invite", "--role", "site", "clinic-a")
    assert "the earlier invite for clinic-a counts no more" in again.stderr


def test_who_comes_after_the_last_round_is_told_of(make_coordinator, tools) -> None:
    """Such a site learned in no round; its table and bundle would else be taken for the federation's."""
    coordinator = make_coordinator(rounds={"quorum_min": 1, "quorum_target": 1})
    member = tools.approved_member(coordinator, "clinic-1")
    tools.start_rounds(coordinator)
    home = coordinator.store.home
    said = "all rounds of this federation are over: late can fetch its model, and learns in no round"
    assert OPERATIONS["invite"](coordinator, {"name": "other", "role": "site", "hours": 1.0})["over"] is False
    for number in (1, 2, 3):
        member.reply(number)
        assert step(coordinator, tools.toy_worker)
    newcomer = tools.Member(coordinator, "late")
    proof = newcomer.enrol(tools.token_of(coordinator, "late"))
    coordinator.store.close()
    assert said in run(home, "approve", "late", "--fingerprint", proof.fingerprint).stderr
    again = run(home, "invite", "--role", "device", "later")
    assert said.replace("late ", "later ") in again.stderr and again.exit_code == 0


@pytest.mark.parametrize(
    ("least", "warned"),
    [(0, "only 0 other contributors\n"), (1, "only 1 other contributor\n"), (2, None), (3, None)],
)
def test_serve_warns_of_a_small_cohort_only(make_coordinator, monkeypatch, least, warned) -> None:
    """docs/security.md, exchange policy: fewer than two others; that they are permitted is not that few."""
    coordinator = make_coordinator(rounds={"min_cohort": least, "allow_small_cohort": True})
    coordinator.store.close()
    monkeypatch.setattr("edgefl_coordinator.web.service.serve", lambda *_: None)
    served = run(coordinator.store.home, "serve")
    assert served.exit_code == 0
    assert warned in served.stderr if warned else "warning" not in served.stderr


@pytest.mark.parametrize(("number", "words"), [(1, "1 member\n"), (2, "2 members\n")])
def test_one_member_is_one_member(make_coordinator, tools, number, words) -> None:
    coordinator = make_coordinator(rounds={"quorum_min": 1})
    for index in range(number):
        tools.approved_member(coordinator, f"clinic-{index}")
    coordinator.store.close()
    assert run(coordinator.store.home, "start").stdout.endswith(f"opens with {words}")
    assert "0 replies" in run(coordinator.store.home, "status").stdout


def test_exit_codes(closed_home, tmp_path) -> None:
    """1 failed, 2 usage, 3 refused; always one sentence, never a traceback."""
    failed = run(closed_home, "approve", "nobody", "--fingerprint", "0" * 20)
    assert failed.exit_code == 1 and failed.stderr.count("\n") == 1 and "nobody" in failed.stderr
    assert run(closed_home, "approve", "nobody").exit_code == 2
    assert run(closed_home, "start").exit_code == 1
    assert run(CoordinatorHome(tmp_path / "nowhere"), "status").exit_code == 1
    broken = tmp_path / "broken.edgefl"
    broken.write_bytes(b"this is no bundle")
    refused = run(closed_home, "publish", str(broken))
    assert refused.exit_code == 3 and refused.stderr.count("\n") == 1 and "published" not in refused.stdout
    assert run(closed_home, "audit").exit_code == 0


def test_a_wrong_fingerprint_is_exit_3(make_coordinator, tools) -> None:
    coordinator = make_coordinator()
    tools.Member(coordinator, "clinic-a").enrol(tools.token_of(coordinator, "clinic-a"))
    coordinator.store.close()
    refused = run(coordinator.store.home, "approve", "clinic-a", "--fingerprint", "0" * 20)
    assert refused.exit_code == 3 and "do not approve" in refused.stderr


def test_a_world_readable_key_is_refused(closed_home) -> None:
    """docs/security.md, keys at rest."""
    (closed_home.keys / "signing.key").chmod(0o644)
    refused = run(closed_home, "status")
    assert refused.exit_code == 1 and "chmod 600" in refused.stderr


def test_operations_through_the_running_server(make_coordinator, tools) -> None:
    """The same operations over the socket, errors and refusals included; a second writer is shut out meanwhile."""
    coordinator = make_coordinator()
    member = tools.Member(coordinator, "clinic-a")
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        server = await serve_admin(coordinator)
        ready.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(10)
        home = coordinator.store.home
        assert home.socket.stat().st_mode & 0o777 == 0o600
        assert run_operation(home, "status", {})["members"] == []
        proof = member.enrol(tools.token_of(coordinator, "clinic-a"))
        with pytest.raises(NotAllowedError, match="fingerprint"):
            run_operation(home, "approve", {"name": "clinic-a", "fingerprint": "0" * 20})
        assert run_operation(home, "approve", {"name": "clinic-a", "fingerprint": proof.fingerprint})
        with pytest.raises(OperatorError, match="no member"):
            run_operation(home, "revoke", {"name": "clinic-z"})
        with pytest.raises(OperatorError, match="understands"):
            run_operation(home, "explode", {})
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def test_a_server_that_starts_is_waited_for(make_coordinator, monkeypatch) -> None:
    """docs/guides/federation.md, step 1: `serve &` and the next command at once. It has the store and does not listen
    yet; one that never listens is told after a while."""
    coordinator = make_coordinator()
    home = coordinator.store.home

    async def start_late() -> Any:
        asked = asyncio.create_task(asyncio.to_thread(run_operation, home, "status", {}))
        await asyncio.sleep(0.3)
        assert not asked.done()
        server = await serve_admin(coordinator)
        try:
            return await asked
        finally:
            server.close()

    assert asyncio.run(start_late())["federation"] == "skin"
    home.socket.unlink(missing_ok=True)
    monkeypatch.setattr("edgefl_coordinator.web.admin._PATIENCE_S", 0.2)
    with pytest.raises(OperatorError, match="another process uses"):
        run_operation(home, "status", {})


def test_a_second_server_says_why_it_waits(coordinator, monkeypatch) -> None:
    """The first may be about to stop, so it is waited for; who typed `serve` twice reads it at once. A certificate that
    members would refuse is told too."""
    home = coordinator.store.home
    monkeypatch.setattr("edgefl_coordinator.commands.operate._OTHERS_S", 0.1)

    async def start_second() -> Any:
        server = await serve_admin(coordinator)
        try:
            return await asyncio.to_thread(run, home, "serve")
        finally:
            server.close()

    assert "a server runs for this folder; waiting 0.1 s for it to stop" in asyncio.run(start_second()).stderr
    coordinator.store.close()
    home.config.write_text(home.config.read_text().replace("https://127.0.0.1", "https://fl.example.org"))
    monkeypatch.setattr("edgefl_coordinator.web.service.serve", lambda *_: None)
    alone = run(home, "serve").stderr
    assert "a server runs" not in alone and "not valid for 'fl.example.org'" in alone


def test_a_socket_left_by_a_killed_server_is_no_obstacle(closed_home) -> None:
    closed_home.socket.write_bytes(b"")
    closed_home.socket.unlink()
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(closed_home.socket))
    assert run(closed_home, "status").exit_code == 0


def test_a_home_with_a_long_path(make_coordinator) -> None:
    """A Unix address has 108 bytes; a home may be deeper."""
    coordinator = make_coordinator("a" * 90)

    async def check() -> Any:
        server = await serve_admin(coordinator)
        try:
            return await asyncio.to_thread(run_operation, coordinator.store.home, "status", {})
        finally:
            server.close()

    assert asyncio.run(check())["federation"] == "skin"


def test_init_asks_for_classes(tmp_path) -> None:
    result = CliRunner().invoke(main, ["init", str(tmp_path / "new"), "--federation", "skin"])
    assert result.exit_code == 2 and "--classes" in result.stderr
    assert not (tmp_path / "new").exists()


def test_init_never_overwrites(closed_home) -> None:
    from edgefl_coordinator.founding.folder import make_home

    before = {path: path.read_bytes() for path in closed_home.root.rglob("*") if path.is_file()}
    with pytest.raises(OperatorError, match="already"):
        make_home(closed_home, {})
    assert before == {path: path.read_bytes() for path in closed_home.root.rglob("*") if path.is_file()}


def test_init_takes_no_folder_with_something_else(tools, tmp_path) -> None:
    from edgefl_coordinator.founding.folder import make_home
    from edgefl_coordinator.settings import CoordinatorHome

    (tmp_path / "letter.txt").write_text("x")
    with pytest.raises(OperatorError, match=r"holds letter.txt; choose a new or empty folder"):
        make_home(CoordinatorHome(tmp_path), tools.settings_table())
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


# fmt: off
EARLY = [
    (["--federation", "Skin Cancer"],                 "federation 'Skin Cancer' must be 1 to 32 lower-case letters"),
    (["--url", "http://fl.example.org"],              "must begin with https://"),
    (["--url", "https://[::1"],                       "no host and port that can be read: write it as https://HOST"),
    (["--members", "2"],                              "with 2 members the contribution of each could be told apart: "
                                                      "you need at least 3, or --allow-small-cohort"),
    (["--members", "5", "--quorum-min", "2"],         "with a quorum of 2 the contribution of each"),
    (["--members", "3", "--quorum-min", "4", "--quorum-target", "4"], "3 members cannot give them; lower --quorum-min"),
    (["--quorum-min", "2", "--min-cohort", "3"],      "give --quorum-min 4 or more, or --min-cohort 1 or less with "
                                                      "--allow-small-cohort\n"),
    (["--members", "2", "--quorum-min", "2", "--min-cohort", "1"], "told apart"),
    (["--host", "0.0.0.0"],                           "but members need one to call: give --url https://NAME:8443"),
    (["--host", "::", "--port", "443"],               "give --url https://NAME:443"),
    (["--task", "Big Task"],                          "task name and line must be"),
    (["--classes", "MEL"],                            "classes must hold at least two names"),
    (["taken"],                                       "holds letter.txt; choose a new or empty folder"),
]
# fmt: on


@pytest.mark.parametrize(("words", "told"), EARLY)
def test_init_refuses_before_it_loads_the_trainer(words, told, tmp_path, monkeypatch) -> None:
    """What needs no trainer is checked first, for to load PyTorch takes many seconds."""

    def loaded(_: object) -> None:
        raise AssertionError("the trainer would be loaded now")

    monkeypatch.setattr("edgefl_coordinator.commands.init._task", loaded)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "letter.txt").write_text("x")
    folder = tmp_path / (words.pop() if words == ["taken"] else "new")
    usual = ["--federation", "skin", "--classes", "MEL,NV"]
    refused = CliRunner().invoke(main, ["init", str(folder), *usual, *words])
    assert refused.exit_code in (1, 2) and told in refused.stderr, refused.output
    assert refused.stderr.count("\n") == 1 and not (tmp_path / "new").exists()


def test_private_files(closed_home) -> None:
    """docs/security.md, keys at rest: 0600 in 0700."""
    private = [path for path in closed_home.keys.iterdir() if path.suffix != ".pub"]
    assert len(private) == 4
    for path in [*private, closed_home.tls / "server.key", closed_home.database, closed_home.config]:
        assert path.stat().st_mode & 0o077 == 0, path
    for path in (closed_home.root, closed_home.keys, closed_home.blobs, closed_home.jobs):
        assert path.stat().st_mode & 0o777 == 0o700, path


def test_a_passphrase_file(folder, tools, tmp_path, monkeypatch) -> None:
    """docs/security.md 2.6, keys at rest: a file open to others is refused; one line end is no part of it."""
    from edgefl_coordinator.founding.folder import make_home

    home, file = CoordinatorHome(folder / "locked"), tmp_path / "pass"
    make_home(home, tools.settings_table(), b"correct horse\n")
    file.write_bytes(b"correct horse\n\n")
    file.chmod(0o644)
    refused = run(home, "status", "--passphrase-file", str(file))
    assert refused.exit_code == 1 and "chmod 600" in refused.stderr and refused.stderr.count("\n") == 1
    file.chmod(0o600)
    assert run(home, "status", "--passphrase-file", str(file)).exit_code == 0
    assert run(home, "status").exit_code == 1
    monkeypatch.setenv("EDGEFL_KEY_PASSPHRASE", "correct horse\n")
    assert run(home, "status").exit_code == 0


def test_a_busy_port_is_named_once() -> None:
    """One sentence of ours, not Python's with the address again."""
    with _listen("127.0.0.1", 0, Door(10, 5)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(OperatorError) as refused:
            _listen("127.0.0.1", port, Door(10, 5))
    told = "; for another port: edgefl-coordinator set port PORT public_url https://HOST:PORT, with the --home of this"
    assert str(refused.value).startswith(f"cannot listen on 127.0.0.1 port {port}: Address already in use{told}")
