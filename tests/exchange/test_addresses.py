"""Which addresses a coordinator may have."""

import pytest

from edgefl_exchange.errors import TlsRefused
from edgefl_exchange.https import HttpsTransport


def refusal_of(address: str) -> str | None:
    """The code by which an address is refused, or None where it is taken."""
    try:
        HttpsTransport(address)
    except TlsRefused as error:
        return error.code
    return None


@pytest.mark.parametrize(
    "address",
    [
        "ftp://a", "https://", "https://user:pw@a", "https://a?b=c", "a", "https://a#b",
        "https://[::1", "https://a]", "https://a:65536", "https://a:b:c",  # RFC 3986 3.2.2 and 3.2.3
    ],
)  # fmt: skip
def test_addresses_of_another_form(address):
    assert refusal_of(address) == "not_https"


@pytest.mark.parametrize("address", ["https://[::1]:8443/skin", "https://a:65535", "https://a:", "https://127.0.0.1"])
def test_addresses_of_this_form(address):
    assert refusal_of(address) is None
