"""A development certificate, and the TLS side of the server.

Guarantees: the server speaks TLS 1.2 or newer only. The development CA signs exactly one server certificate and its
private key is then thrown away: nobody can make a second certificate that members would trust.
"""

import datetime
import ipaddress
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edgefl_coordinator.errors import USAGE, OperatorError
from edgefl_coordinator.settings import CoordinatorHome, CoordinatorSettings
from edgefl_protocol.durable import read_bounded

_MAX_CA_BYTES = 256 * 2**10
_NO_PAIR = ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED")  # of one kind of key; of two, such as RSA and EC
_UNKNOWN_AUTHORITY = frozenset({18, 19, 20, 21})  # X509_V_ERR_… of OpenSSL: self-signed, no issuer, one link alone
BACKDATED = datetime.timedelta(days=3)
VALID_DAYS = 394  # after that; browsers and urllib3 accept no server certificate of more than 398 days


@dataclass(frozen=True)
class DevelopmentCertificate:
    """PEM bytes of a new CA certificate and of the server's chain and key."""

    ca: bytes
    chain: bytes
    key: bytes


def make_development_certificate(hosts: list[str], now: datetime.datetime) -> DevelopmentCertificate:
    """Make a CA and a server certificate signed by it, valid from three days before `now`.

    Members correct a clock that is up to 48 hours off (docs/security.md 2.5), which takes an answer of the coordinator.
    `hosts` are DNS names and IP addresses of the server; localhost, 127.0.0.1 and ::1 are always added.
    """
    start, end = now - BACKDATED, now + datetime.timedelta(days=VALID_DAYS)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "EdgeFL development CA")])
    ca = (
        _builder(ca_name, ca_name, ca_key.public_key(), start, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "EdgeFL coordinator")])
    server = (
        _builder(name, ca_name, key.public_key(), start, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(_names(hosts)), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    ca_pem = ca.public_bytes(serialization.Encoding.PEM)
    return DevelopmentCertificate(
        ca=ca_pem,
        chain=server.public_bytes(serialization.Encoding.PEM) + ca_pem,
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def first_certificate(file: Path) -> bytes:
    """Return the first certificate of a PEM file in its DER form.

    An `OperatorError` where it holds none; a `StorageError` where it cannot be read.
    """
    pem = read_bounded(file, _MAX_CA_BYTES)
    try:
        return x509.load_pem_x509_certificates(pem)[0].public_bytes(serialization.Encoding.DER)
    except ValueError as error:
        raise OperatorError(
            f"{file} holds no certificate in PEM form; choose another with edgefl-coordinator set ca FILE", USAGE
        ) from error


def server_context(chain: Path, key: Path) -> ssl.SSLContext:
    """Return the server's TLS context.

    An `OperatorError` where a file cannot be used, the key is encrypted, or the two do not belong together.
    """

    def encrypted() -> bytes:
        raise OperatorError(f"{key} is encrypted, and nobody is asked for its passphrase; give one that is not", USAGE)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(chain, key, encrypted)
    except ssl.SSLError as error:
        if error.reason in _NO_PAIR:
            raise OperatorError(
                f"the key {key} does not belong to the certificate {chain}: give both, edgefl-coordinator set "
                "certificate FILE certificate_key FILE",
                USAGE,
            ) from error
        raise OperatorError(
            f"{chain} and {key} are not a PEM certificate and its PEM private key ({error.reason or error})", USAGE
        ) from error
    except OSError as error:
        found = next((file for file in (chain, key) if not os.access(file, os.R_OK)), chain)
        raise OperatorError(f"{found} cannot be read: {error.strerror}", USAGE) from error
    return context


def refused_by_members(home: CoordinatorHome, settings: CoordinatorSettings) -> str:
    """Say in one sentence why members that call the public address would refuse the certificate; "" where they take it.

    They are not asked where a proxy has the certificate that they meet. An `OperatorError` or `StorageError` where a
    file cannot be used.
    """
    if settings.proxy_ends_tls:
        return ""
    chain, key = home.root / settings.certificate, home.root / settings.certificate_key
    trusted = first_certificate(home.root / settings.ca if settings.ca else chain)  # public authorities are not asked
    member = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    member.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as members do: what an invite pins is an anchor
    member.load_verify_locations(cadata=trusted)
    why = _refusal(member, server_context(chain, key), urlsplit(settings.public_url).hostname or "")
    return why and (
        f"members that call {settings.public_url} refuse the certificate {chain} ({why}): set one that is valid for "
        "this address, with the authority that signed it (edgefl-coordinator set certificate FILE certificate_key FILE "
        "ca FILE), or, where a reverse proxy has the certificate that members meet, proxy_ends_tls true"
    )


def _refusal(member: ssl.SSLContext, server: ssl.SSLContext, host: str) -> str:
    """Let the two shake hands in memory; return why the member refuses, or ""."""
    to_server, to_member = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = member.wrap_bio(to_member, to_server, server_hostname=host)
    answering = server.wrap_bio(to_server, to_member, server_side=True)
    for side in (asking, answering, asking):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            unknown = error.verify_code in _UNKNOWN_AUTHORITY
            return "the authority that ca names did not sign it" if unknown else error.verify_message.rstrip(".")
    return ""


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    start: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _names(hosts: list[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(["localhost", "127.0.0.1", "::1", *hosts]):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return names
