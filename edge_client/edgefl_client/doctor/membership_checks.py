"""Checks of `edgefl doctor` on the membership: keys, rounds, certificate, coordinator, clock.

The keys' lock is not taken, so a sync may go on meanwhile. One question goes out, for the signed time, and only where
the caller asks for it.
"""

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from edgefl_client.doctor.findings import DAY_MS, SOON_DAYS, Finding
from edgefl_client.sharing.enrolled_device import Device
from edgefl_client.sharing.silent import why_silent
from edgefl_exchange.coordinator_keys import MAX_CORRECTION_MS
from edgefl_exchange.errors import TlsRefused
from edgefl_exchange.key_change import load_keys
from edgefl_exchange.membership import Membership, ca_file, load_membership, load_task
from edgefl_exchange.transport import Request
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.records.coordinator_records import MAX_RECORD_BYTES, verify_key_record, verify_time
from edgefl_protocol.sentences import counted, expiry

CLOCK_OFF_S = 60


def check_keys(device: Device, now_ms: int) -> Iterator[Finding]:
    """Check that both keys open, that the operator approved them, and that the coordinator knows them still."""
    membership = load_membership(device.home.member)
    who = f"{membership.name} ({membership.role}) of {membership.federation}"
    if membership.state == "joining":
        yield Finding(
            check="keys", state="warn", found=f"{who}; the enrolment is not finished",
            advice="run edgefl enrol again with the same invite",
        )  # fmt: skip
        return
    try:
        load_keys(device.home.member, device.passphrase)
    except EdgeflError as error:
        if error.code != "passphrase_needed":
            raise
        yield Finding(
            check="keys", state="warn", found=f"{who}; the keys are encrypted and were not opened",
            advice="give the passphrase with --passphrase-file to look at them",
        )  # fmt: skip
        return
    if membership.state == "pending":
        yield Finding(
            check="keys", state="warn", found=f"{who}, waits for the operator's approval",
            advice=f"tell the operator this fingerprint: {membership.fingerprint}",
        )  # fmt: skip
        return
    if membership.unknown_ms:
        ago = counted(max(now_ms - membership.unknown_ms, 0) // DAY_MS, "day")
        yield Finding(
            check="keys", state="warn",
            found=f"{who}; {ago} ago the coordinator did not know these keys, and it has not answered them since",
            advice="ask its operator whether this device was shut out, or was sent a newer invite; where it was shut "
                   f"out, move the folder {device.home.member} away and enrol with a new invite",
        )  # fmt: skip
        return
    age = f", {counted((now_ms - membership.keys_made_ms) // DAY_MS, 'day')} old" if membership.keys_made_ms else ""
    encrypted = "encrypted" if device.passphrase else "not encrypted"
    yield Finding(check="keys", state="ok", found=f"{who}; both keys open, {encrypted}{age}")


def check_rounds(device: Device, now_ms: int) -> Iterator[Finding]:
    """Warn where a device that could learn replies to no round; of the others say how they give."""
    task = load_task(device.home.member)  # as last told
    silent = None if task is None else why_silent(device.home, task, now_ms)
    if silent is None:
        return
    if silent.learner:
        yield Finding(check="rounds", state="warn", found=silent.why, advice=silent.advice)
    else:
        yield Finding(check="rounds", state="ok", found=str(silent))


def check_certificate(device: Device, now_ms: int) -> Iterator[Finding]:
    """Check that the coordinator's certificate and key record do not expire unnoticed."""
    membership = load_membership(device.home.member)
    path = ca_file(device.home.member, membership)
    if path is None:
        yield Finding(
            check="certificate",
            state="ok",
            found=f"the certificate of {membership.url} is checked against the public certificate authorities",
        )
    else:
        yield _own_certificate(path, now_ms)
    record = verify_key_record(membership.key_record, membership.coordinator_key_id, membership.federation, now_ms=0)
    left_ms = record.expires_ms - now_ms
    said = f"key record {record.number} of the coordinator {expiry(left_ms)}"
    advice = None if left_ms > 0 else "the next edgefl sync fetches a newer one"
    yield Finding(check="certificate", state="ok" if left_ms > 0 else "warn", found=said, advice=advice)


def _own_certificate(path: Path, now_ms: int) -> Finding:
    from cryptography.x509 import load_pem_x509_certificates

    try:
        chain = load_pem_x509_certificates(read_bounded(path, MAX_RECORD_BYTES * 4))
    except ValueError:
        return Finding(
            check="certificate", state="fail", found=f"{path} holds no readable certificate",
            advice="ask the operator for the certificate file and put it there",
        )  # fmt: skip
    ends = min(chain, key=lambda one: one.not_valid_after_utc).not_valid_after_utc
    left_ms = ends.timestamp() * 1000 - now_ms
    state = "fail" if left_ms <= 0 else "warn" if left_ms < SOON_DAYS * DAY_MS else "ok"
    advice = None if state == "ok" else "ask the operator for the next certificate, and put it in this file"
    found = f"{path} is valid until {ends.date().isoformat()}: it {expiry(left_ms)}"
    return Finding(check="certificate", state=state, found=found, advice=advice)


def check_coordinator(device: Device, *, online: bool) -> Iterator[Finding]:
    """Check that the coordinator answers, and compare this clock with its signed time."""
    membership = load_membership(device.home.member)
    if not online:
        yield Finding(check="coordinator", state="ok", found="not asked")
        return
    try:
        offset_ms, trip_ms = _signed_time(device, membership)
    except TlsRefused as error:
        advice = None if error.code == "certificate_refused" else "tell the operator before you change anything"
        yield Finding(check="coordinator", state="fail", found=str(error), advice=advice)  # a certificate's has advice
        return
    except EdgeflError as error:
        yield Finding(
            check="coordinator", state="warn", found=str(error), advice="scoring works without the coordinator"
        )
        return
    yield Finding(check="coordinator", state="ok", found=f"{membership.url} gave a signed answer in {trip_ms:.0f} ms")
    off_s = abs(offset_ms) / 1000
    side = "behind" if offset_ms > 0 else "ahead"
    if abs(offset_ms) > MAX_CORRECTION_MS:
        yield Finding(
            check="clock", state="fail", found=f"{off_s / 3600:.1f} hours {side}, and at most 48 are corrected",
            advice="set the clock; until then nothing can be exchanged",
        )  # fmt: skip
    elif off_s > CLOCK_OFF_S:
        yield Finding(
            check="clock", state="warn", found=f"{off_s:.0f} s {side}; corrected by the coordinator's signed time",
            advice="set the clock, or let the system keep it (NTP)",
        )  # fmt: skip
    else:
        yield Finding(check="clock", state="ok", found=f"{off_s:.1f} s {side}")


def _signed_time(device: Device, membership: Membership) -> tuple[int, float]:
    """Measure how far this clock is behind the coordinator's, in ms, and how long the question took, in ms."""
    signing = verify_key_record(
        membership.key_record, membership.coordinator_key_id, membership.federation, now_ms=0
    ).signing
    transport = device.connect(device.home.member, membership)
    nonce = secrets.token_urlsafe(24)
    started = time.monotonic()
    answer = transport.send(
        Request(method="GET", path="/v1/time", query=f"nonce={nonce}", max_answer_bytes=MAX_RECORD_BYTES)
    )
    trip_ms = (time.monotonic() - started) * 1e3
    signed = verify_time(answer.body, signing, nonce)
    return signed.now_ms + round(trip_ms / 2) - device.clock_ms(), trip_ms
