"""What a member believes of its coordinator: its keys and its clock, both only as far as they are signed.

* The signing key is pinned by the invite, until the federation's root set lists others: then it is one of those, and
  the pinned one counts only where it stands among them. So a coordinator that was taken over is left without asking
  any member to enrol again; what the thief had signed (numbers of records, times of an index) binds nobody.
* The sealing key comes from a key record signed by the signing key, whose number never goes down, and which is fetched
  anew after 24 hours, with the root set before it.
* A wrong clock corrects itself by the coordinator's signed answer to a fresh nonce, at most 48 hours in either
  direction, and only when the round trip took at most 10 seconds on the monotonic clock.

Source: docs/security.md, replay window (signed time), rotation and root; checks 20, 23 and 26.
"""

import logging
import secrets
import time
from collections.abc import Callable

from edgefl_exchange.errors import ExchangeError, Unavailable
from edgefl_exchange.transport import Request, Transport
from edgefl_protocol.envelopes.keys import PublicSealingKey, PublicSigningKey
from edgefl_protocol.errors import RecordError
from edgefl_protocol.records.coordinator_records import MAX_RECORD_BYTES, KeyRecord, verify_key_record, verify_time
from edgefl_protocol.records.root import MAX_CHAIN_BYTES, Root, check_current, newest_root, split_chain

MAX_CORRECTION_MS = 48 * 3_600_000
MAX_ROUND_TRIP_S = 10.0
OLDER = "older_coordinator"  # code: it counts lower than it did
REFRESH_AFTER_MS = 24 * 3_600_000
LEAST_CORRECTION_MS = 1_000
_LOG = logging.getLogger("edgefl.exchange")


def wall_clock_ms() -> int:
    """Return Unix milliseconds by this machine's clock."""
    return time.time_ns() // 1_000_000


class CoordinatorView:
    """Keys and time of one coordinator.

    Args:
        key_id: pinned key id of its signing key.
        record: its newest signed key record, or None at first contact.
        on_keys: called with this view after each fetched key record, to keep it.
        root_key_id: key id of the root key that the invite pins, or None where there is none.
        on_root: called with the record of each new root set, to keep it.

    Raises:
        Unavailable: at first contact, no usable key record could be fetched; later, an older one came (`OLDER`).
        RecordError: the record is not the pinned coordinator's.
        ExchangeError: the clock is off by more than 48 hours.
    """

    def __init__(
        self,
        transport: Transport,
        key_id: str,
        federation: str,
        *,
        record: bytes | None = None,
        fetched_ms: int = 0,
        clock_ms: Callable[[], int] = wall_clock_ms,
        on_keys: "Callable[[CoordinatorView], None] | None" = None,
        root_key_id: str | None = None,
        root: Root | None = None,
        on_root: Callable[[bytes], None] | None = None,
    ) -> None:
        self._transport = transport
        self.key_id = key_id  # of the signing key that counts
        self.root = root
        self._root_key_id = root_key_id
        self._on_root = on_root
        self._federation = federation
        self._clock_ms = clock_ms
        self._on_keys = on_keys
        self._offset_ms = 0
        if record is None:
            self._refresh_root()
        self.record = record if record is not None else self._fetch()  # as received
        self.fetched_ms = fetched_ms  # when that was, Unix ms
        # The pin vouches for the signing key whatever the date, and only that key can tell the date.
        try:
            self._keys = (
                self._verified(self.record, now_ms=0)
                if record is None
                else verify_key_record(self.record, key_id, federation, now_ms=0)
            )
            self.key_id = self._keys.signing.key_id
        except RecordError as error:
            if record is not None or error.code != "bad_record":
                raise
            # Nothing that anybody signed: a page of a proxy, a busy or a wrong server.
            raise Unavailable(
                "the server at the coordinator's address sent no key record; try again later, or check the address",
                code="no_record",
            ) from error
        if record is None:
            self._correct_clock()
            self._adopt(self.record)
        elif self._is_old() or not self._counts(key_id):
            self._refresh_at_start()

    @property
    def signing(self) -> PublicSigningKey:
        """The pinned key that signs every reply and record."""
        return self._keys.signing

    @property
    def sealing(self) -> PublicSealingKey:
        """The current key to seal for."""
        return self._keys.sealing

    @property
    def key_number(self) -> int:
        """Number of the key record in use."""
        return self._keys.number

    @property
    def offset_ms(self) -> int:
        """How far this machine's clock is behind the coordinator's, as corrected."""
        return self._offset_ms

    def now_ms(self) -> int:
        """Return Unix milliseconds by the corrected clock."""
        return self._clock_ms() + self._offset_ms

    def renew(self) -> bool:
        """Fetch time and key record anew; True where one of them changed, False also where neither could be had.

        Raises:
            Unavailable: the coordinator is older than this member has seen it (`OLDER`).
        """
        try:
            before = self._keys.number, self.key_id
            self._refresh_root()  # first: the time too is signed by a key that it may have changed
            corrected = self._counts(self.key_id) and self._correct_clock()
            self._refresh_keys()
        except (Unavailable, RecordError) as error:
            if error.code == OLDER:
                raise
            return False
        return corrected or (self._keys.number, self.key_id) != before

    def refresh_root(self) -> None:
        """Fetch the root set anew, and the coordinator's keys where it lists other ones.

        Raises:
            Unavailable: no answer came, or the coordinator's new keys could not be had.
            RecordError: the newest root set has expired.
        """
        self._refresh_root()
        if self.root is not None:
            check_current(self.root, self.now_ms())
        if not self._counts(self.key_id):
            self._refresh_keys()

    def _is_old(self) -> bool:
        return self.now_ms() - self.fetched_ms > REFRESH_AFTER_MS or self.now_ms() > self._keys.expires_ms

    def _counts(self, key_id: str) -> bool:
        """Whether a signing key of the coordinator counts: any does that the root set lists, else the pinned one."""
        return self.root is None or self.root.coordinator(key_id) is not None

    def _refresh_root(self) -> None:
        """Fetch the root sets and take the newest; a damaged answer is as good as none, for anybody can send one."""
        if self._root_key_id is None:
            return
        request = Request(method="GET", path="/v1/root", max_answer_bytes=MAX_CHAIN_BYTES)
        answer = self._transport.send(request)
        if answer.status != 200:
            return
        try:
            found = newest_root(split_chain(answer.body), self._federation, self._root_key_id, self.root)
        except RecordError as error:
            _LOG.warning("a root set was refused: %s", error)
            return
        if found is not None:
            self.root, record = found
            _LOG.warning("root set %d of the federation is in force", self.root.version)
            if self._on_root is not None:
                self._on_root(record)

    def _verified(self, record: bytes, now_ms: int, seen_number: int = 0) -> KeyRecord:
        """Verify a key record under the key that counts, or under another one that the root set lists."""
        if self._counts(self.key_id):
            try:
                return verify_key_record(record, self.key_id, self._federation, now_ms, seen_number)
            except RecordError as error:
                if error.code != "wrong_key" or self.root is None:
                    raise
        assert self.root is not None
        for key in self.root.coordinators:
            if key.key_id != self.key_id:
                try:
                    return verify_key_record(record, key.key_id, self._federation, now_ms)
                except RecordError as error:
                    if error.code != "wrong_key":
                        raise
        raise RecordError("the key record names a signing key that the root set does not list", "wrong_key")

    def _fetch(self) -> bytes:
        return self._transport.send(Request(method="GET", path="/v1/keys", max_answer_bytes=MAX_RECORD_BYTES)).body

    def _refresh_at_start(self) -> None:
        """Refresh, and go on with known keys that still hold where what answers is older: another may answer a call."""
        try:
            self._refresh()
        except Unavailable as error:
            if error.code != OLDER or not self._counts(self.key_id) or self.now_ms() > self._keys.expires_ms:
                raise
            _LOG.warning("%s", error)

    def _refresh(self) -> None:
        self._refresh_root()
        self._refresh_keys()

    def _refresh_keys(self) -> None:
        try:
            self._adopt(self._fetch())
        except RecordError as error:
            if error.code == "rolled_back":
                raise Unavailable(
                    f"this coordinator is older than this member knows it ({error}): perhaps an old copy or backup is "
                    "served; nothing was changed; tell the operator, who serves the newest copy instead, or, where "
                    f"that is lost, runs edgefl-coordinator rotate until the number is above {self._keys.number}",
                    OLDER,
                ) from error
            if self.now_ms() > self._keys.expires_ms:
                self._correct_clock()  # our clock may be what is wrong
            if not self._counts(self.key_id):
                raise Unavailable(
                    "the federation's root set lists a new signing key of the coordinator, which does not use it yet; "
                    "try again later, and tell the operator",
                    code="key_not_changed",
                ) from error
            if self.now_ms() > self._keys.expires_ms:
                raise Unavailable(
                    "the coordinator's key record has expired, and no newer one came that it signed; try again later",
                    code="keys_expired",
                ) from error
            _LOG.warning("a key record was refused: %s", error)

    def _adopt(self, record: bytes) -> None:
        now_ms = self.now_ms()
        found = self._verified(record, now_ms, self._keys.number)
        if found.signing.key_id != self.key_id:
            _LOG.warning("the coordinator's signing key is %s now, as the root set says", found.signing.key_id)
        self.key_id = found.signing.key_id
        self._keys, self.record, self.fetched_ms = found, record, now_ms
        if self._on_keys is not None:
            self._on_keys(self)

    def _correct_clock(self) -> bool:
        """Ask the coordinator for the time; True where the clock was corrected."""
        nonce = secrets.token_urlsafe(24)
        started = time.monotonic()
        answer = self._transport.send(
            Request(method="GET", path="/v1/time", query=f"nonce={nonce}", max_answer_bytes=MAX_RECORD_BYTES)
        )
        trip_s = time.monotonic() - started
        try:
            signed = verify_time(answer.body, self.signing, nonce)
        except RecordError as error:
            raise Unavailable(
                "the time that was received is not signed by the coordinator; try again later", "not_signed"
            ) from error
        if trip_s > MAX_ROUND_TRIP_S:
            raise Unavailable(
                f"the signed time took {trip_s:.0f} s to arrive, which is too long to use it; try again later", "slow"
            )
        offset_ms = signed.now_ms + round(trip_s * 500) - self._clock_ms()
        if abs(offset_ms) > MAX_CORRECTION_MS:
            raise ExchangeError(
                f"this clock is {abs(offset_ms) / 3_600_000:.0f} hours off, and at most 48 are corrected; set the "
                "clock",
                code="clock_too_far",
            )
        if abs(offset_ms - self._offset_ms) < LEAST_CORRECTION_MS:
            return False
        _LOG.warning("clock corrected by %+.1f s, as the coordinator signed", (offset_ms - self._offset_ms) / 1000)
        self._offset_ms = offset_ms
        return True
