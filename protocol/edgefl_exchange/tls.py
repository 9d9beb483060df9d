"""Which certificate a site accepts: the public authorities, a CA file, or the one certificate its invite pins.

There is no way to switch verification off (docs/security.md, attack list 13). With a pin, the CA file must hold a
certificate whose DER form has that SHA-256; only this one certificate is kept and trusted from then on, whatever else
the file holds.
"""

import hashlib
import ssl
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import load_pem_x509_certificates

from edgefl_exchange.errors import TlsRefused

MAX_CA_BYTES = 256 * 2**10


def pinned_certificate(pem: bytes, pin: bytes) -> bytes:
    """Find the one certificate of a PEM file that an invite pins.

    Args:
        pin: SHA-256 of the certificate's DER form, 32 bytes.

    Returns:
        PEM of that certificate alone.

    Raises:
        TlsRefused: no certificate of the file has this hash.
    """
    for der in certificates(pem):
        if hashlib.sha256(der).digest() == pin:
            return pem_of(der)
    raise TlsRefused(
        f"the file given with --ca does not hold the certificate that the invite names (SHA-256 {pin.hex()[:16]}…); "
        "ask the operator for the file that belongs to this invite",
        code="pin_mismatch",
    )


def pem_of(der: bytes) -> bytes:
    """PEM of a certificate."""
    return ssl.DER_cert_to_PEM_cert(der).encode("ascii")


def certificates(pem: bytes) -> list[bytes]:
    """Read every certificate of a PEM file in DER form.

    Raises:
        TlsRefused: the file holds none, or is damaged.
    """
    try:
        found = [one.public_bytes(Encoding.DER) for one in load_pem_x509_certificates(pem)]
    except ValueError as error:
        raise TlsRefused("the file given with --ca holds no readable PEM certificate", code="bad_ca_file") from error
    return found


def tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """Make a context that verifies the server: TLS 1.2 or newer, host name checked.

    Args:
        ca_file: trust only the certificates of this file; None for the public authorities, which the caller adds.

    Raises:
        TlsRefused: the file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks certificate and host name by itself
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A pinned server certificate that is not self-signed is an anchor as well.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if ca_file is not None:
        try:
            context.load_verify_locations(cafile=str(ca_file))
        except (OSError, ssl.SSLError) as error:
            raise TlsRefused(f"{ca_file} is not a readable PEM certificate file", code="bad_ca_file") from error
    return context
