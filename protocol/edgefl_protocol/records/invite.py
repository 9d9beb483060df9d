"""The invite: one string that holds all a newcomer needs, and pins whom it talks to.

`efl1-` + base64url(canonical JSON record || 4 checksum bytes). Guarantees: `decode_invite` returns a record in which
every field has its form, whose checksum holds (so a mistyped or cut string is told apart) and which has not expired;
else `InviteError`. The coordinator's key is pinned, so first contact needs no trust on first use, and a private
certificate authority needs no way to switch verification off: the invite carries the certificate, one, in its DER
form, of at most 2,048 bytes. Of a larger one, and in invites of version 0.1.0, it holds the SHA-256 alone, and the
newcomer is handed the file too. What an invite may decide, and what not: docs/security.md 2.6.1. The token is a secret:
it never appears in `repr`, and the coordinator keeps only `token_sha256`. `name` is ours, so that the newcomer enrols
under the name that the operator chose.
"""

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from edgefl_protocol.envelopes.header import MAX_SAFE_INT
from edgefl_protocol.errors import InviteError
from edgefl_protocol.pae import pae
from edgefl_protocol.routes import ROLES
from edgefl_protocol.strict_json import parse_integers, write_json

PREFIX: Final = "efl1-"
MAX_INVITE_CHARS: Final = 6144
MAX_CERTIFICATE_BYTES: Final = 2048  # DER; a larger one is named by its hash
MAX_VALID_MS: Final = 72 * 3600 * 1000
TOKEN_BYTES: Final = 32

_CHECKSUM_BYTES: Final = 4
_URL: Final = re.compile(r"https://[A-Za-z0-9.\[\]:-]{1,255}(/[A-Za-z0-9._~-]{1,64}){0,8}")
_WORD: Final = re.compile(r"[a-z0-9-]{1,32}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_HEX64: Final = re.compile(r"[0-9a-f]{64}")


def names_host(url: str) -> bool:
    """Tell whether a coordinator's address names a host, and a port, if any, that can be read."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # a bracket without its other one, or no number of a port
        return False
    return bool(parts.hostname)


@dataclass(frozen=True, kw_only=True)
class Invite:
    """What the operator hands to one newcomer.

    Raises:
        InviteError: a field has not its form.
    """

    url: str  # the coordinator's public base, https, without a slash at its end
    federation: str  # name
    coordinator_key_id: str  # key id (SHA-256) of the coordinator's signing key: the pin
    root_key_id: str | None  # key id of the federation's offline root key, or None
    # SHA-256 (hex, of the DER form) of the server's certificate or its authority's, or None for the system's
    # authorities
    tls_sha256: str | None
    certificate: bytes | None = None  # the certificate of that hash, DER, where the invite carries it
    token: bytes = field(repr=False)  # 32 secret bytes, used once
    name: str  # the newcomer's name in the federation
    role: str  # "site" or "device"
    expires_ms: int  # Unix ms, at most 72 h after issue

    def __post_init__(self) -> None:
        if type(self.name) is not str or not _NAME.fullmatch(self.name):
            raise InviteError(
                "the name of a member has 1 to 64 characters: letters a to z and A to Z, digits, and after the first "
                "one also . _ -"
            )
        forms = (("url", self.url, _URL), ("federation", self.federation, _WORD))
        pins = (
            ("coordinator_key_id", self.coordinator_key_id, _HEX64),
            ("root_key_id", "0" * 64 if self.root_key_id is None else self.root_key_id, _HEX64),
            ("tls_sha256", "0" * 64 if self.tls_sha256 is None else self.tls_sha256, _HEX64),
        )
        for name, value, form in (*forms, *pins):
            if type(value) is not str or not form.fullmatch(value):
                raise InviteError(f"invite field {name} does not have the form {form.pattern}")
        if not names_host(self.url):
            raise InviteError(
                f"the invite's url {self.url} has no host and port that can be read; the operator corrects public_url "
                "and makes a new invite"
            )
        if self.certificate is not None:
            self._check_certificate(self.certificate)
        if type(self.token) is not bytes or len(self.token) != TOKEN_BYTES:
            raise InviteError(f"an invite's token has {TOKEN_BYTES} bytes")
        if self.role not in ROLES:
            raise InviteError(f"an invite's role is one of: {', '.join(ROLES)}")
        if type(self.expires_ms) is not int or not 0 <= self.expires_ms <= MAX_SAFE_INT:
            raise InviteError("an invite's expires_ms is a time in Unix milliseconds")

    def _check_certificate(self, der: bytes) -> None:
        from cryptography.x509 import load_der_x509_certificate  # most invites are never read; this takes its time

        if not 0 < len(der) <= MAX_CERTIFICATE_BYTES:
            raise InviteError(f"an invite's certificate has at most {MAX_CERTIFICATE_BYTES} bytes, not {len(der)}")
        if self.tls_sha256 != hashlib.sha256(der).hexdigest():
            raise InviteError("the invite's certificate is not the one that the invite names")
        try:
            load_der_x509_certificate(der)
        except ValueError:
            raise InviteError("the invite's certificate is not an X.509 certificate") from None

    @property
    def token_sha256(self) -> str:
        """What the coordinator keeps of the token, hex."""
        return hashlib.sha256(self.token).hexdigest()


def encode_invite(invite: Invite, now_ms: int) -> str:
    """Return the string to hand over, on a channel that the newcomer trusts.

    Raises:
        InviteError: it would be valid for more than 72 hours, or is expired.
    """
    if not now_ms < invite.expires_ms <= now_ms + MAX_VALID_MS:
        raise InviteError("an invite is valid for at most 72 hours", "bad_expiry")
    record = write_json(
        {
            "url": invite.url,
            "federation": invite.federation,
            "coordinator": invite.coordinator_key_id,
            "root": invite.root_key_id,
            **_certificate_field(invite),
            "token": invite.token.hex(),
            "name": invite.name,
            "role": invite.role,
            "expires_ms": invite.expires_ms,
        }
    )
    text = base64.urlsafe_b64encode(record + _checksum(record)).rstrip(b"=").decode("ascii")
    return PREFIX + text


def _certificate_field(invite: Invite) -> dict[str, str | None]:
    if invite.certificate is None:
        return {"tls": invite.tls_sha256}
    return {"certificate": base64.urlsafe_b64encode(invite.certificate).decode("ascii")}


def decode_invite(text: str, now_ms: int) -> Invite:
    """Read an invite.

    Args:
        text: the string; white space around it and line breaks within it are ignored.

    Raises:
        InviteError: damaged (`bad_invite`), or past its expiry (`expired`).
    """
    compact = "".join(text[: 2 * MAX_INVITE_CHARS].split())
    if len(compact) > MAX_INVITE_CHARS or not compact.startswith(PREFIX) or not compact.isascii():
        told = f"an invite starts with {PREFIX} and has at most {MAX_INVITE_CHARS} characters"
        raise InviteError(f"{told}; copy the whole invite again")
    encoded = compact[len(PREFIX) :].encode("ascii")
    if not re.fullmatch(rb"[A-Za-z0-9_-]+", encoded):
        raise InviteError("the invite holds characters that do not belong in an invite; copy the whole invite again")
    try:
        data = base64.urlsafe_b64decode(encoded + b"=" * (-len(encoded) % 4))
    except binascii.Error:
        raise InviteError("the invite is cut short; copy the whole invite again") from None
    record, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if checksum != _checksum(record) or base64.urlsafe_b64encode(data).rstrip(b"=") != encoded:
        raise InviteError("the invite is damaged (its checksum is wrong); copy the whole invite again")
    invite = _read(record)
    if now_ms > invite.expires_ms:
        raise InviteError("the invite has expired; ask for a new one, and check this clock", "expired")
    return invite


def _read(record: bytes) -> Invite:
    try:
        fields = parse_integers(record.decode("ascii"))
        known = {"url", "federation", "coordinator", "root", "token", "name", "role", "expires_ms"}
        forms = (known | {"tls"}, known | {"certificate"})
        if type(fields) is not dict or fields.keys() not in forms or write_json(fields) != record:
            raise InviteError("the invite is of another version; update edgefl-derm")
        carried = _carried(fields["certificate"]) if "certificate" in fields else None
        token = bytes.fromhex(fields["token"]) if isinstance(fields["token"], str) else b""
    except ValueError:
        raise InviteError("the invite's record is not strict JSON") from None
    return Invite(
        url=fields["url"],
        federation=fields["federation"],
        coordinator_key_id=fields["coordinator"],
        root_key_id=fields["root"],
        tls_sha256=fields["tls"] if carried is None else hashlib.sha256(carried).hexdigest(),
        certificate=carried,
        token=token,
        name=fields["name"],
        role=fields["role"],
        expires_ms=fields["expires_ms"],
    )


def _carried(text: object) -> bytes:
    """The certificate of a record, from the one form of base64 that it is written in."""
    encoded = text.encode("ascii") if isinstance(text, str) else b""
    try:
        der = base64.b64decode(encoded, altchars=b"-_", validate=True)
    except binascii.Error:
        der = b""
    if not der or base64.urlsafe_b64encode(der) != encoded:
        raise InviteError("the invite's certificate is not written in the canonical form")
    return der


def _checksum(record: bytes) -> bytes:
    return hashlib.sha256(pae(b"efl1/invite", record)).digest()[:_CHECKSUM_BYTES]
