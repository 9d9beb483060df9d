"""A large reply through the coordinator, and a large broadcast back, against a plain HTTPS upload of the same bytes.

Starts the coordinator's HTTP process and a plain TLS server, both over loopback with the same certificate. In turn, a
fresh process delivers a reply of random weights from its outbox (encrypted at rest, sealed pieces, each durable before
it is acknowledged, verified and stored as a whole), a fresh process fetches the broadcast of the same size, and a fresh
process uploads the same bytes with one plain POST that the server writes to a file and flushes. Prints median seconds,
the ratios, and the peak memory of every process, above what it holds before the transfer.

    python -m benchmarks.coordinator.blob_transfer [--megabytes N] [--repeats N] [--json]
"""

import http.server
import json
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

MIB = 2**20
PIECE = 2**16
WEIGHTS = "backbone.weights"
CNN = {
    "name": "timm:resnet18", "architecture": "resnet18", "image_px": 72, "width": 512, "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5], "self_supervised": False, "sha256": "0" * 64,
}  # fmt: skip


def weights(megabytes: int) -> Any:
    import numpy as np

    return np.random.default_rng(0).normal(size=megabytes * 10**6 // 4).astype(np.float32)


def peak_mib(process: int | str = "self") -> float:
    """Peak memory of a process so far, MiB."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def work(folder: Path, megabytes: int) -> None:
    """The worker's part without a trainer: everybody gets the weights again, whatever the replies."""
    from edgefl_coordinator.rounds.jobs import JobResult, read_job, write_result
    from edgefl_protocol import Payload

    job = read_job(folder)
    state = Payload({WEIGHTS: weights(megabytes)}, {})
    made = Payload(state.arrays, {"phase": "train", "round": 1, "rounds": 9}).to_bytes()
    left = b"" if job.kind == "broadcast" else state.to_bytes()
    write_result(folder, JobResult(left, ("train",) * 9, dict.fromkeys(job.sites, made)))


def serve(home: Path, megabytes: int) -> None:
    """The coordinator's HTTP process; its worker is another process, as always."""
    from edgefl_coordinator.settings import CoordinatorHome
    from edgefl_coordinator.store.coordinator import open_coordinator
    from edgefl_coordinator.web import service

    def worker(folder: Path, _: float) -> None:
        subprocess.run([sys.executable, __file__, "--role", "work", str(folder), str(megabytes)], check=True)

    coordinator = open_coordinator(CoordinatorHome(home))
    service.serve(coordinator, lambda port: tell(port=port, idle_mib=peak_mib()), worker)
    tell(peak_mib=peak_mib())


def serve_plainly(home: Path) -> None:
    """A TLS server that writes a body to a file and flushes it."""
    from edgefl_coordinator.web.tls import server_context

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            left = int(self.headers["Content-Length"])
            with (home / "uploaded").open("wb") as file:
                while left:
                    piece = self.rfile.read(min(PIECE, left))
                    file.write(piece)
                    left -= len(piece)
                file.flush()
                os.fsync(file.fileno())
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    context = server_context(home / "tls" / "server.pem", home / "tls" / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    tell(port=server.server_address[1], idle_mib=peak_mib())
    server.serve_forever()


def member_of(folder: Path) -> Any:
    from edgefl_exchange.https import HttpsTransport
    from edgefl_exchange.member import Member
    from edgefl_exchange.membership import ca_file

    return Member(folder, lambda found: HttpsTransport(found.url, ca_file(folder, found)))


def send(folder: Path, megabytes: int) -> None:
    """Deliver a reply from the outbox."""
    from edgefl_exchange.outbox import Outbox
    from edgefl_protocol import Payload

    content = Payload({WEIGHTS: weights(megabytes)}, {"site_sha256": "0" * 64, "n_train": 100}).to_bytes()
    with member_of(folder) as member, Outbox(folder / "outbox.sqlite3", bytes(32)) as outbox:
        started = time.perf_counter()
        outbox.put(member.membership.federation, "reply", content, member.now_ms())
        put_s = time.perf_counter() - started
        del content
    tell(put_s=put_s)


def deliver(folder: Path) -> None:
    """Send what waits, as `edgefl sync` does: this process never holds the reply as a whole."""
    from edgefl_exchange.outbox import Outbox

    with member_of(folder) as member, Outbox(folder / "outbox.sqlite3", bytes(32)) as outbox:
        task, idle = member.task(), peak_mib()
        started = time.perf_counter()
        (done,) = member.deliver(outbox, task)
        seconds = time.perf_counter() - started
    assert done.outcome == "accepted", done
    tell(seconds=seconds, bytes=done.bytes, idle_mib=idle, peak_mib=peak_mib())


def fetch(folder: Path) -> None:
    """Fetch the broadcast of the open round."""
    with member_of(folder) as member:
        number, idle = member.task().round, peak_mib()
        started = time.perf_counter()
        size = member.broadcast(number).arrays[WEIGHTS].nbytes
        seconds = time.perf_counter() - started
    tell(seconds=seconds, bytes=size, idle_mib=idle, peak_mib=peak_mib())


def upload(home: Path, port: str) -> None:
    """One plain POST of a file."""
    import requests

    with requests.Session() as session, (home / "plain").open("rb") as file:
        session.trust_env = False
        idle, started = peak_mib(), time.perf_counter()
        answer = session.post(f"https://127.0.0.1:{port}/", data=file, verify=str(home / "tls" / "ca.pem"))
        seconds = time.perf_counter() - started
    assert answer.status_code == 200
    tell(seconds=seconds, idle_mib=idle, peak_mib=peak_mib())


def run(*arguments: object) -> Any:
    """A role in a process of its own; gives what it tells."""
    command = [sys.executable, __file__, "--role", *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def begin(*arguments: object) -> Any:
    """A server in a process of its own, and what it tells at the start."""
    command = [sys.executable, __file__, "--role", *map(str, arguments)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, json.loads(server.stdout.readline())


def make(root: Path, megabytes: int, members: int) -> tuple[Path, list[Path], Any, int]:
    """A coordinator that serves, with approved members in the first round."""
    from edgefl_coordinator.founding.folder import make_home
    from edgefl_coordinator.settings import CoordinatorHome
    from edgefl_coordinator.web.admin import run_operation
    from edgefl_exchange.enrolment import enrol, trust_certificate
    from edgefl_exchange.https import HttpsTransport
    from edgefl_exchange.membership import read_ca
    from edgefl_protocol.records.invite import decode_invite

    home = CoordinatorHome(root / "home")
    port = free_port()
    make_home(home, {
        "federation": "bench", "public_url": f"https://127.0.0.1:{port}", "port": port,
        "task": {"method": "fedclf", "name": "pixels", "classes": ["a", "b"], "shares_maps": False, "backbone": CNN},
        "rounds": {"count": 9, "quorum_target": members + 1, "start": "manual"},
        "limits": {"reply_bytes": 2 * megabytes * MIB},
    })  # fmt: skip
    server, told = begin("serve", home.root, megabytes)
    folders = []
    for number in range(members):
        folder = root / f"member-{number}"
        folder.mkdir(mode=0o700)
        text = run_operation(home, "invite", {"name": folder.name, "role": "site", "hours": 1})["invite"]
        invite = decode_invite(text, time.time_ns() // 10**6)
        own_ca = trust_certificate(folder, invite, read_ca(home.tls / "ca.pem"))
        found = enrol(folder, invite, HttpsTransport(invite.url, folder / "ca.pem"), own_ca=own_ca)
        run_operation(home, "approve", {"name": folder.name, "fingerprint": found.fingerprint})
        folders.append(folder)
    run_operation(home, "start", {})
    while run_operation(home, "status", {})["round"] != 1:
        time.sleep(0.2)
    return home.root, folders, server, told["idle_mib"]


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def measure(root: Path, megabytes: int, repeats: int) -> dict[str, Any]:
    home, folders, server, idle_mib = make(root, megabytes, repeats)
    (home / "plain").write_bytes(weights(megabytes).tobytes())
    plain, told = begin("plain", home)
    sent, fetched, uploaded, put = [], [], [], []
    try:
        for folder in folders:
            fetched.append(run("fetch", folder))
            put.append(run("put", folder, megabytes)["put_s"])
            sent.append(run("deliver", folder))
            uploaded.append(run("upload", home, told["port"]))
        peak = peak_mib(server.pid)
    finally:
        server.terminate()
        plain.terminate()
        server.wait()
        plain.wait()

    def median(rows: list[Any]) -> float:
        return float(statistics.median(row["seconds"] for row in rows))

    def above(rows: list[Any]) -> float:
        return float(max(row["peak_mib"] - row["idle_mib"] for row in rows))

    return {
        "megabytes": megabytes, "deliver_s": median(sent), "fetch_s": median(fetched), "plain_s": median(uploaded),
        "deliver_ratio": median(sent) / median(uploaded), "fetch_ratio": median(fetched) / median(uploaded),
        "outbox_put_s": statistics.median(put), "sender_mib": above(sent), "receiver_mib": above(fetched),
        "coordinator_mib": peak - idle_mib, "coordinator_idle_mib": idle_mib, "plain_sender_mib": above(uploaded),
    }  # fmt: skip


ROLES: dict[str, Callable[..., object]] = {
    "serve": lambda home, megabytes: serve(Path(home), int(megabytes)),
    "work": lambda folder, megabytes: work(Path(folder), int(megabytes)),
    "plain": lambda home: serve_plainly(Path(home)),
    "put": lambda folder, megabytes: send(Path(folder), int(megabytes)),
    "deliver": lambda folder: deliver(Path(folder)),
    "fetch": lambda folder: fetch(Path(folder)),
    "upload": lambda home, port: upload(Path(home), port),
}


@click.command()
@click.option("--megabytes", metavar="MB", default=50, show_default=True, help="Size of reply and broadcast.")
@click.option("--repeats", metavar="N", default=3, show_default=True, help="Turns; medians are printed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(megabytes: int, repeats: int, as_json: bool) -> None:
    """Measure a large reply and broadcast through the coordinator against a plain HTTPS upload."""
    with tempfile.TemporaryDirectory() as root:
        found = measure(Path(root), megabytes, repeats)
    if as_json:
        tell(**found)
        return
    print(f"{megabytes} MB over loopback TLS, {os.cpu_count()} cores, {ssl.OPENSSL_VERSION}, medians of {repeats}")
    print(f"deliver {found['deliver_s']:.2f} s, fetch {found['fetch_s']:.2f} s, plain upload {found['plain_s']:.2f} s")
    print(f"ratio to the plain upload: deliver {found['deliver_ratio']:.2f}, fetch {found['fetch_ratio']:.2f}")
    print(f"into the outbox: {found['outbox_put_s']:.2f} s")
    print(f"peak memory above idle: sender {found['sender_mib']:.0f}, receiver {found['receiver_mib']:.0f}, "
          f"coordinator {found['coordinator_mib']:.0f} MiB")  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--role"]:
        ROLES[sys.argv[2]](*sys.argv[3:])
    else:
        main()
