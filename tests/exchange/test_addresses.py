"""Which addresses a coordinator may have."""

import pytest

from edgefl_exchange.errors import TlsRefused
from edgefl_exchange.https import HttpsTransport


@pytest.mark.parametrize("address", ["ftp://a", "https://", "https://user:pw@a", "https://a?b=c", "a", "https://a#b"])
def test_addresses_of_another_form(address):
    with pytest.raises(TlsRefused):
        HttpsTransport(address)
