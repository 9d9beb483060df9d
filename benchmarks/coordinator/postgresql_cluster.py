"""A PostgreSQL server of one's own, for tests and benchmarks: its cluster in a folder, reached by a socket there alone.

It runs with the server's own settings: what it acknowledges is on the disk. Its programs are looked for in PATH and in
the folder of Debian's packages.
"""

import contextlib
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

_FOLDERS = "/usr/lib/postgresql/*/bin"
_USER = "postgres"  # of the cluster, and whose processes they are where root runs the tests: the server refuses root


def programs() -> Path | None:
    """The folder with `initdb` and `pg_ctl`, or None."""
    found = [Path(one).parent for one in (shutil.which("initdb"),) if one]
    found += sorted(Path("/").glob(_FOLDERS[1:]), reverse=True)
    return next((folder for folder in found if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None)


class Cluster:
    """A server that is started, stopped and killed."""

    def __init__(self, folder: Path, found: Path) -> None:
        self.folder, self._programs = folder, found
        self._user: str | None = None
        if os.geteuid() == 0:
            known = {one.pw_name for one in pwd.getpwall()}
            self._user = next(name for name in (_USER, "nobody") if name in known)
            shutil.chown(folder, self._user)
        self._numbers = itertools.count(1)
        data = ["--pgdata", str(folder / "data")]
        self._run("initdb", *data, "--username", _USER, "--auth", "trust", "--encoding", "UTF8", "--locale", "C.UTF-8")
        self.start()

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        done = subprocess.run(command, user=self._user, cwd=self.folder, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False)  # fmt: skip
        assert done.returncode == 0, done.stdout

    def start(self, more: str = "") -> None:
        """Begin it; `more` are options of the server."""
        options = f"-c listen_addresses='' -c unix_socket_directories='{self.folder}' -c max_connections=200"
        self._control("--log", str(self.folder / "log"), "--options", f"{options} {more}", "start")

    def stop(self, how: str = "fast") -> None:
        """End it; "immediate" is as if it were killed: it recovers when it starts."""
        self._control("--mode", how, "stop")

    def _control(self, *arguments: str) -> None:
        self._run("pg_ctl", "--pgdata", str(self.folder / "data"), "--wait", *arguments)

    def database(self) -> str:
        """Make an empty schema, which is quicker than a database, and return the URL with it."""
        schema = f"store{next(self._numbers)}"
        self.run(f"CREATE SCHEMA {schema}")
        return f"{self.url}&options=-csearch_path%3D{schema}"

    def processor_s(self) -> float:
        """Processor time of the server's processes so far, without those that have ended."""
        first = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        spent = 0.0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                name, fields = path.parent.name, path.read_text().rpartition(")")[2].split()
                if first in (int(name), int(fields[1])):
                    spent += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return spent

    def drop(self, url: str) -> None:
        """Remove what `database` made."""
        self.run(f"DROP SCHEMA {url.rpartition('%3D')[2]} CASCADE")

    def run(self, statement: str, url: str = "") -> list[tuple[Any, ...]]:
        """Run one statement from beside, and return its rows."""
        with psycopg.connect(url or self.url, autocommit=True) as connection:
            done = connection.execute(statement.encode())
            return done.fetchall() if done.description else []

    @property
    def url(self) -> str:
        """Names the server's own database."""
        return f"postgresql:///postgres?host={self.folder}&user={_USER}"


@contextlib.contextmanager
def running(parent: Path | None = None) -> Iterator[Cluster]:
    """Begin a server below a folder, or below TMPDIR, and remove it at the end; the path of a socket is short."""
    found = programs()
    assert found is not None, "PostgreSQL's initdb and pg_ctl are not installed (apt-get install postgresql)"
    with tempfile.TemporaryDirectory(dir=parent, prefix="pg-") as folder:
        cluster = Cluster(Path(folder), found)
        yield cluster
        cluster.stop("immediate")
