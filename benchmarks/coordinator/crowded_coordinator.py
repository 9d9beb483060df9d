"""A coordinator's folder whose members are in the store from the start, and their sealed replies; for benchmarks."""

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CNN = {
    "name": "timm:resnet18", "architecture": "resnet18", "image_px": 72, "width": 512, "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5], "self_supervised": False, "sha256": "0" * 64,
}  # fmt: skip


class Federation:
    """A coordinator's folder with approved members, and their keys."""

    def __init__(
        self, root: Path, members: int, suite: int, values: int, database: str, payloads: str, port: int
    ) -> None:
        from edgefl_coordinator.founding.folder import make_home
        from edgefl_coordinator.settings import CoordinatorHome
        from edgefl_coordinator.store.coordinator import open_coordinator
        from edgefl_protocol import generate_sealing_key, generate_signing_key

        self.home = CoordinatorHome(root / "home")
        make_home(self.home, {
            "federation": "bench", "database": database, "payloads": payloads,
            "public_url": "https://127.0.0.1:8443", "port": port,
            "suite": suite,
            "task": {"method": "fedclf", "name": "pixels", "classes": ["a", "b"], "shares_maps": False,
                     "backbone": CNN},
            "rounds": {"count": 1000, "quorum_target": members + 1, "start": "manual", "deadline_s": 86_400},
            "limits": {"one_address": 1000},
        })  # fmt: skip
        self.database, self.payloads, self.values = database, payloads, values
        self.signing = [generate_signing_key() for _ in range(members)]
        self.sealing = [generate_sealing_key(suite) for _ in range(members)]
        self.round, self.sent = 0, list[str]()  # digests
        coordinator = open_coordinator(self.home)
        self.keys, now_ms = coordinator.keys, coordinator.clock()
        try:
            self._enter(coordinator.store, now_ms)
        finally:
            coordinator.store.close()

    def _enter(self, store: Any, now_ms: int) -> None:
        """Put the members into the store, with the start and a broadcast for each, so that no job is due."""
        from sqlalchemy import insert

        from edgefl_coordinator.rounds import stored_rounds
        from edgefl_coordinator.store.tables import broadcasts, members

        state, keys = store.put_blob(b"the start"), zip(self.signing, self.sealing, strict=True)
        rows = [
            {"skid": one.key_id, "name": f"device-{number}", "role": "device", "state": "approved",
             "signing_public": one.public, "sealing_suite": other.suite, "sealing_public": other.public,
             "enrolled_ms": now_ms, "approved_ms": now_ms}
            for number, (one, other) in enumerate(keys)
        ]  # fmt: skip
        with store.transaction() as connection:
            connection.execute(insert(members), rows)
            stored_rounds.commit_state(connection, now_ms, 0, state)
            stored_rounds.set_fact(connection, "phases", ["train"] * 1000)
            sent = [{"number": 1, "skid": row["skid"], "sha256": "", "others": 0} for row in rows]
            connection.execute(insert(broadcasts), sent)

    def open_round(self) -> None:
        """Open the next round by its row, from beside: the server finds it at its next look."""
        from sqlalchemy import create_engine, insert, update

        from edgefl_coordinator.store.tables import rounds

        self.round, now_ms = self.round + 1, time.time_ns() // 10**6
        file = f"sqlite:///{self.home.database}"
        engine = create_engine(self.database.replace("postgresql:", "postgresql+psycopg:") or file)
        row = {"number": self.round, "phase": "train", "state": "open", "opened_ms": now_ms,
               "deadline_ms": now_ms + 86_400_000, "tried": 0}  # fmt: skip
        with engine.begin() as connection:
            connection.execute(update(rounds).values(state="done"))
            connection.execute(insert(rounds).values(row))
        engine.dispose()

    def seal(self, count: int, times: int = 1) -> list[bytes]:
        """Replies of the open round, of one member each, so many times around each work item."""
        import numpy as np

        from edgefl_protocol import Payload, seal
        from edgefl_protocol.messages.requests import ReplyRequest

        now_ms, to, made = time.time_ns() // 10**6, self.keys.sealing.public_key, []
        for number in range(count):
            values = np.full(self.values, self.round * 10**5 + number, np.float32)
            reply = Payload({"weights": values}, {"site_sha256": "0" * 64, "n_train": 100})
            self.sent.append(hashlib.sha256(reply.to_bytes()).hexdigest())
            message = ReplyRequest(idem=f"{self.round:06}-{number:010}", reply=reply).to_payload().to_bytes()
            header = {"typ": "request", "mth": "POST", "pth": "/v1/reply", "fed": "bench", "cty": "reply",
                      "rnd": self.round, "iat": now_ms, "exp": now_ms + 600_000}  # fmt: skip
            last = self.round * times
            made += [seal(message, {**header, "seq": last - one}, self.signing[number], to) for one in range(times)]
        return made

    def floor(self, bodies: Sequence[bytes]) -> dict[str, float]:
        """Open envelopes and seal their answers; processor milliseconds of an upload."""
        from edgefl_protocol import Expected, JudgedByCaller, open_envelope, seal
        from edgefl_protocol.envelopes.replies import reply_fields
        from edgefl_protocol.messages.requests import ReplyReply

        now_ms = time.time_ns() // 10**6
        expected = Expected(pth="/v1/reply", fed="bench", typ="request", cty="reply")
        senders = {
            one.key_id: (one.public_key, to.public_key) for one, to in zip(self.signing, self.sealing, strict=True)
        }
        answer = ReplyReply(accepted=True, first_answer_ms=now_ms).to_payload().to_bytes()
        started, processor = time.perf_counter(), time.process_time()
        for body in bodies:
            opened = open_envelope(
                body, self.keys.sealing, lambda skid: senders[skid][0], expected, now_ms, JudgedByCaller()
            )
            fields = reply_fields(opened, sts=200, now_ms=now_ms)
            seal(answer, fields, self.keys.signing, senders[opened.header.skid][1])
        return {
            "floor_ms": (time.process_time() - processor) / len(bodies) * 1000,
            "floor_per_s": len(bodies) / (time.perf_counter() - started),
        }

    def check(self) -> None:
        """Find each reply that was sent in the store once, with its content, and in the audit log once."""
        from sqlalchemy import func, select

        from edgefl_coordinator.store.store import open_store
        from edgefl_coordinator.store.tables import audit, replies

        store = open_store(self.home, wait_s=20.0, url=self.database, payloads=self.payloads)
        try:
            with store.transaction() as connection:
                blobs = connection.scalars(select(replies.c.blob)).all()
                accepted = select(func.count()).select_from(audit).where(audit.c.event == "reply_accepted")
                assert connection.scalar(accepted) == len(self.sent)
            assert sorted(hashlib.sha256(store.get_blob(one)).hexdigest() for one in blobs) == sorted(self.sent)
        finally:
            store.close()
