"""The units in examples/systemd and the table of examples/cron: what systemd says, and what of ours they start.

Source: docs/guides/device.md; docs/reference/coordinator.md.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from edgefl_client.cli import cli
from edgefl_client.commands.failures import exit_code
from edgefl_coordinator.cli import main as coordinator
from edgefl_protocol.errors import StorageError

PROGRAMS = {"edgefl": (cli, "EDGEFL_HOME"), "edgefl-coordinator": (coordinator, "EDGEFL_COORDINATOR_HOME")}
UNITS = Path(__file__).parents[3] / "examples/systemd"
SERVICES = sorted(UNITS.glob("*.service"))
NAMES = sorted(path.name for path in UNITS.iterdir())
HARDENED = {
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "ProtectSystem": "strict",
    "PrivateTmp": "yes",
    "PrivateDevices": "yes",
    "UMask": "0077",
    "StateDirectoryMode": "0700",
    "SystemCallFilter": "@system-service",
    "RestrictSUIDSGID": "yes",
    "RestrictNamespaces": "yes",
}
analyze = shutil.which("systemd-analyze")


def parsed(path):
    """Sections to their settings, of which each may come once here."""
    found, section = {}, None
    for line in path.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), {})
            continue
        key, _, value = line.partition("=")
        assert key.isalpha() and key not in section, f"{path.name}: {line}"
        section[key] = value
    return found


def test_the_units_are_these():
    assert NAMES == ["edgefl-coordinator.service", "edgefl-sync.service", "edgefl-sync.timer", "edgefl-watch.service"]


@pytest.mark.skipif(analyze is None, reason="no systemd-analyze on this machine")
def test_systemd_accepts_them(tmp_path):
    """Its own verdict, every unit together; the program is the one of this installation."""
    program = Path(sys.executable).with_name("edgefl")
    for path in UNITS.iterdir():
        text = path.read_text().replace("/usr/local/bin/edgefl", str(program))
        (tmp_path / path.name).write_text(text)
    done = subprocess.run(
        [analyze, "verify", "--man=no", *map(str, tmp_path.iterdir())], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(analyze is None, reason="no systemd-analyze on this machine")
@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_systemd_finds_them_hardened(path):
    """Exposure by systemd's own scale, 0 to 10, where a service without any such setting has 9.6: at most 2."""
    done = subprocess.run(
        [analyze, "security", "--offline=true", "--threshold=20", "--no-pager", str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "Unknown" in done.stderr or "unrecognized" in done.stderr:
        pytest.skip("this systemd-analyze judges no file offline")
    assert done.returncode == 0, done.stdout[-200:]


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_what_they_start_is_ours(path, tmp_path):
    """Every command line is one that this version understands, and no secret stands in it."""
    service = parsed(path)["Service"]
    program, *words = service["ExecStart"].split()
    main, home = PROGRAMS[program.removeprefix("/usr/local/bin/")]
    assert "passphrase" not in service["ExecStart"]
    words = [str(tmp_path) if word == "/srv/camera" else word for word in words]
    group = click.Context(main, info_name="edgefl")
    name, command, rest = main.resolve_command(group, words)
    command.make_context(name, list(rest), parent=group)
    assert {key: service.get(key) for key in HARDENED} == HARDENED
    assert service["Environment"] == f"{home}=/var/lib/" + service["StateDirectory"]
    for folder in (word for word in words if word.startswith("/var/")):
        assert folder.startswith("/var/lib/edgefl/")  # the only place it may write


@pytest.mark.parametrize(("page", "unit"), [("guides/device.md", "sync"), ("reference/coordinator.md", "coordinator")])
def test_the_user_of_a_service_has_the_home_that_it_may_write(page, unit):
    """useradd(8): without --home-dir it is a folder of /home that nobody makes, and ProtectHome= lets none be written.
    examples/gate.py keeps pictures in ~/.cache, and PostgreSQL's driver reads ~/.pgpass."""
    service = parsed(UNITS / f"edgefl-{unit}.service")["Service"]
    [made] = re.findall(r"^(?:sudo )?useradd --system (.*)$", (UNITS.parents[1] / "docs" / page).read_text(), re.M)
    home, *_, user = made.removeprefix("--home-dir ").split()
    assert (home, user) == ("/var/lib/" + service["StateDirectory"], service["User"])


def test_the_page_installs_the_units_that_it_starts_and_makes_the_watched_folder():
    """The units of a device, not the coordinator's; each command of a page names one folder of the camera."""
    pages = {
        name: (UNITS.parents[1] / f"docs/guides/{name}.md").read_text() for name in ("device", "learn-on-a-device")
    }
    [copied] = re.findall(r"^cp (.*) /etc/systemd/system/$", pages["device"], re.M)
    [started] = re.findall(r"^systemctl enable --now (.*)$", pages["device"], re.M)
    names = {path.name for one in copied.split() for path in UNITS.glob(Path(one).name)}
    assert names == {*started.split(), "edgefl-sync.service"}
    watch = parsed(UNITS / "edgefl-watch.service")
    folder = watch["Service"]["ExecStart"].split()[2]
    assert folder == watch["Unit"]["RequiresMountsFor"] and f"\ninstall -d {folder}\n" in pages["device"]
    assert {*re.findall(r"/\S*/camera\b", "".join(pages.values()))} == {folder}


def test_a_missing_folder_ends_the_watch_for_good(tmp_path):
    """systemd.service(5): a status of RestartPreventExitStatus= is not tried again, as every ten seconds it was."""
    done = CliRunner().invoke(cli, ["watch", str(tmp_path / "camera"), "--home", str(tmp_path)])
    watch = parsed(UNITS / "edgefl-watch.service")["Service"]
    assert done.exit_code == int(watch["RestartPreventExitStatus"])
    assert done.exit_code == exit_code(StorageError("none are kept, as --weights personal needs", "no_personal"))


def test_a_watch_whose_values_are_out_of_use_is_started_again():
    """systemd.service(5), Restart=on-failure: after any status but 0 and those of RestartPreventExitStatus=."""
    watch = parsed(UNITS / "edgefl-watch.service")["Service"]
    ended = exit_code(StorageError("the values are no longer in use", "other_values"))
    assert watch["Restart"] == "on-failure" and str(ended) not in ("0", *watch["RestartPreventExitStatus"].split())


def test_the_timer_starts_the_sync():
    timer = parsed(UNITS / "edgefl-sync.timer")
    assert (UNITS / "edgefl-sync.timer").with_suffix(".service") in SERVICES
    assert timer["Install"]["WantedBy"] == "timers.target" and timer["Timer"]["Persistent"] == "yes"
    assert "Install" not in parsed(UNITS / "edgefl-sync.service")  # the timer alone starts it
    assert parsed(UNITS / "edgefl-watch.service")["Service"]["PrivateNetwork"] == "yes"


CRON = UNITS.parent / "cron/edgefl"


def cron_lines():
    """Settings, the line of sync and the line of watch."""
    *settings, sync, watch = [
        line for line in CRON.read_text().splitlines() if line and not line.startswith("#")
    ]  # fmt: skip
    return settings, sync, watch


def test_the_table_of_cron_does_what_the_units_do():
    """Five fields, a user who is not root, and the commands of the units; sync at most once an hour, watch --once."""
    settings, sync, watch = cron_lines()
    service, watching = (parsed(UNITS / f"edgefl-{name}.service")["Service"] for name in ("sync", "watch"))
    assert service["Environment"] in settings and watching["Environment"] in settings
    minute, *rest, user, command = sync.split(maxsplit=6)
    assert (rest, user) == (["*"] * 4, service["User"]) and 0 <= int(minute) < 60
    assert f" {service['ExecStart']} " in command
    minute, *rest, user, command = watch.split(maxsplit=6)
    assert (minute, rest, user) == ("*/5", ["*"] * 4, watching["User"])
    assert f" {watching['ExecStart']} " in command.replace(" --once ", " ") and " --once " in command
    assert "%" not in sync + watch  # which cron reads as the end of a line
    assert CRON.read_text().endswith("\n")  # or cron leaves the last line out


@pytest.mark.parametrize("line", cron_lines()[1:], ids=["sync", "watch"])
@pytest.mark.parametrize("code", [0, 3])
def test_cron_tells_an_exit_code_that_is_not_0(line, code, tmp_path):
    """docs/reference/scores.md: a pipe alone would give logger's. Here two programs of the test stand in."""
    for name, does in (("edgefl", f"echo said; exit {code}"), ("logger", "cat")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    command = line.split(maxsplit=6)[6].replace("/usr/local/bin/edgefl", str(tmp_path / "edgefl"))
    done = subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, text=True, check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stdout == "said\n" + (f"exit code {code}\n" if code else "")
