"""HTTPS to the coordinator with `requests`, bounded in size and time.

* Only https; the certificate is always verified (`tls`), at least TLS 1.2; redirects are never followed.
* The environment is not read: no proxy variables, no .netrc. A proxy is used only when the caller names one.
* The answer is asked for and read uncompressed, in pieces, up to the request's cap.
* Time limits: connecting and each piece that is written, each silence while reading, and the whole request. The last
  one holds even against a server that sends one byte at a time, because the request runs in a thread of its own that
  is left behind.

Source: docs/security.md, attack list 12 and 13, checks 43 and 63.
"""

import io
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError

from edgefl_exchange.errors import TlsRefused, Unavailable
from edgefl_exchange.tls import tls_context
from edgefl_exchange.transport import Answer, Request
from edgefl_protocol.distribution import require
from edgefl_protocol.records.invite import names_host

require("requests", requests.__version__)

_PIECE_BYTES = 64 * 2**10
_MAX_RETRY_AFTER_S = 300.0
_BY_THE_CLOCK = frozenset({9, 10})  # X509_V_ERR_CERT_NOT_YET_VALID and _CERT_HAS_EXPIRED of OpenSSL
# Reasons of OpenSSL: the server speaks TLS, but no version that we take; and what came is no record of TLS.
_OLD_TLS = frozenset({"UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION"})
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"})


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Time limits of one request, in seconds."""

    connect_s: float = 10.0  # for each write, too
    read_s: float = 30.0
    total_s: float = 120.0


class _TlsAdapter(HTTPAdapter):
    """Uses our TLS context, towards the server and through a proxy; retries are made above, with new envelopes."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        super().__init__(max_retries=0)

    def init_poolmanager(self, connections: int, maxsize: int, block: bool = False, **kwargs: Any) -> None:
        super().init_poolmanager(connections, maxsize, block, ssl_context=self._context, **kwargs)

    def proxy_manager_for(self, proxy: str, **kwargs: Any) -> Any:
        return super().proxy_manager_for(proxy, ssl_context=self._context, **kwargs)


class HttpsTransport:
    """The `Transport` of a real site.

    Args:
        url: the coordinator's public base, "https://host[:port][/path]".
        ca_file: trust exactly this file's certificates; None for the public authorities.
        proxy: "http://host:port" of a proxy that tunnels; None or "" for a direct connection.

    Raises:
        TlsRefused: the URL is not https, or the CA file cannot be used.
    """

    def __init__(
        self, url: str, ca_file: Path | None = None, proxy: str | None = None, deadlines: Deadlines | None = None
    ) -> None:
        if not _is_https(url):
            raise TlsRefused(
                f"the coordinator's address {url} is not of the form https://host[:port][/path]", "not_https"
            )
        self._base = url.rstrip("/")
        self._ca_file = ca_file
        self._proxy = proxy
        self._deadlines = deadlines or Deadlines()
        self._context = tls_context(ca_file)
        self._connection = self._connect()

    def send(self, request: Request) -> Answer:
        """Send a request; see `Transport.send`."""
        outcome: Future[Answer] = Future()
        threading.Thread(target=self._settle, args=(outcome, request, self._connection), daemon=True).start()
        try:
            return outcome.result(self._deadlines.total_s)
        except TimeoutError:
            self._connection = self._connect()  # the old one still belongs to the thread left behind
            total_s = self._deadlines.total_s
            raise Unavailable(
                f"{self._host} gave no whole answer within {total_s:g} s; try again later", "deadline"
            ) from None

    def close(self) -> None:
        """Close idle connections, so that a server that stops need not wait for them."""
        self._connection.close()

    @property
    def _host(self) -> str:
        return urlsplit(self._base).netloc

    def _connect(self) -> requests.Session:
        connection = requests.Session()
        connection.trust_env = False
        connection.headers.clear()
        connection.headers.update({"Accept-Encoding": "identity", "User-Agent": "edgefl"})
        if self._proxy:
            connection.proxies = {"https": self._proxy}
        connection.verify = True if self._ca_file is None else str(self._ca_file)
        connection.mount("https://", _TlsAdapter(self._context))
        return connection

    def _settle(self, outcome: "Future[Answer]", request: Request, connection: requests.Session) -> None:
        try:
            outcome.set_result(self._exchange(request, connection))
        except BaseException as error:  # noqa: BLE001 - handed to the waiting caller, nothing is swallowed
            outcome.set_exception(error)

    def _exchange(self, request: Request, connection: requests.Session) -> Answer:
        url = self._base + request.path + (f"?{request.query}" if request.query else "")
        headers = {"Content-Type": "application/octet-stream"} if request.method == "POST" else {}
        timeout = (self._deadlines.connect_s, self._deadlines.read_s)
        body = io.BytesIO(request.body) if request.body else None  # written in pieces: the limit holds for each of them
        try:
            with connection.request(
                request.method, url, data=body, headers=headers, timeout=timeout,
                allow_redirects=False, stream=True,
            ) as response:  # fmt: skip
                self._check_head(response)
                found = b"".join(self._pieces(response, request.max_answer_bytes))
                return Answer(status=response.status_code, body=found, retry_after_s=_retry_after(response))
        except (requests.RequestException, HTTPError, OSError) as error:
            raise self._mapped(error) from error

    def _check_head(self, response: requests.Response) -> None:
        if response.is_redirect or 300 <= response.status_code < 400:
            raise Unavailable(
                f"{self._host} answered with a redirect (HTTP {response.status_code}), which is never followed; "
                "check the coordinator's address or the proxy",
                code="redirected",
            )
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Unavailable(
                f"{self._host} sent a compressed answer, which is never unpacked; check the coordinator's address or "
                "the proxy",
                code="compressed",
            )

    def _pieces(self, response: requests.Response, max_bytes: int) -> Iterator[bytes]:
        expected = response.headers.get("Content-Length", "")
        received = 0
        for piece in response.raw.stream(_PIECE_BYTES, decode_content=False):
            received += len(piece)
            if received > max_bytes:
                raise Unavailable(
                    f"{self._host} answered with more than the {max_bytes} bytes allowed", code="answer_too_large"
                )
            yield piece
        if expected.isascii() and expected.isdigit() and received != int(expected):
            raise Unavailable(f"the answer of {self._host} was cut off; try again later", code="cut_off")

    def _mapped(self, error: BaseException) -> TlsRefused | Unavailable:
        for cause in _causes(error):
            if isinstance(cause, ssl.SSLCertVerificationError):
                told = f"the certificate of {self._host} is refused ({cause.verify_message.rstrip('.')})"
                return TlsRefused(f"{told}, so nothing was sent; {self._remedy(cause)}", code="certificate_refused")
            if isinstance(cause, ssl.SSLError) and cause.reason in _OLD_TLS:
                return TlsRefused(f"{self._host} offers no TLS 1.2 or newer; nothing was sent", code="old_tls")
            if isinstance(cause, ssl.SSLError) and cause.reason in _NO_TLS:  # a proxy's page, or another service
                return Unavailable(
                    f"what came from {self._host} is not TLS; check the coordinator's address and port, and the proxy",
                    code="not_tls",
                )
            if str(cause).startswith("Tunnel connection failed: 407"):
                return Unavailable(
                    f"the proxy {_address(self._proxy)} asks for a user and a password; give them to edgefl enrol or "
                    "edgefl-train join with --proxy http://USER:PASSWORD@HOST:PORT",
                    "proxy",
                )
        if isinstance(error, requests.Timeout):
            return Unavailable(f"{self._host} does not answer; try again later", code="deadline")
        if isinstance(error, requests.exceptions.ProxyError):
            return Unavailable(
                f"the proxy {_address(self._proxy)} does not connect to {self._host}; try again later", "proxy"
            )
        return Unavailable(
            f"cannot reach {self._host}: the connection failed or was cut; try again later", "unreachable"
        )

    def _remedy(self, refused: ssl.SSLCertVerificationError) -> str:
        """Say what to do about a certificate: a clock that is wrong looks like one that is."""
        if refused.verify_code in _BY_THE_CLOCK:
            clock = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
            return f"this device's clock says {clock} UTC: set the clock if that is wrong, else tell the operator"
        if self._ca_file is None:
            return "if the coordinator uses its own certificate authority, enrol with that authority's file (--ca)"
        return (
            "it is not the one that the invite or --ca names: another server may answer at that address; tell the "
            "operator, who checks it or gives a new invite"
        )


def _is_https(url: str) -> bool:
    """Whether an address has the form https://host[:port][/path]."""
    if not names_host(url):
        return False
    parts = urlsplit(url)
    return parts.scheme == "https" and not (parts.query or parts.fragment or "@" in parts.netloc)


def _address(proxy: str | None) -> str:
    """Host and port of a proxy, without the user and password that its URL may hold."""
    return (proxy or "").rpartition("@")[2].rpartition("://")[2].partition("/")[0]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and everything it wraps; `requests` and `urllib3` wrap in `args` and `reason` as well."""
    waiting, met = [error], set()
    while waiting:
        current = waiting.pop()
        if id(current) in met:
            continue
        met.add(id(current))
        yield current
        inner = [current.__cause__, current.__context__, getattr(current, "reason", None), *current.args]
        waiting.extend(part for part in inner if isinstance(part, BaseException))


def _retry_after(response: requests.Response) -> float | None:
    text = response.headers.get("Retry-After", "")
    return min(float(text), _MAX_RETRY_AFTER_S) if text.isascii() and text.isdigit() and len(text) < 7 else None
