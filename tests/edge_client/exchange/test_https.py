"""HTTPS on the loopback interface: what is refused, what is ignored, what ends in time."""

import datetime
import hashlib
import http.server
import ipaddress
import logging
import socket
import ssl
import threading
import time
import warnings

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from edgefl_exchange import Request, TlsRefused, Unavailable, tls
from edgefl_exchange.https import Deadlines, HttpsTransport
from edgefl_exchange.tls import pinned_certificate

TODAY = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)
QUICK = Deadlines(connect_s=2, read_s=1, total_s=3)


def certificate(folder, name, *, host="127.0.0.1", issuer=None, start=-1, end=30, ca=False):
    """A certificate and its key as PEM files; signed by `issuer` (name, key) or by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    signer = (subject, key) if issuer is None else issuer
    try:
        alternative = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        alternative = x509.DNSName(host)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer[0])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(TODAY + start * DAY)
        .not_valid_after(TODAY + end * DAY)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        .sign(signer[1], hashes.SHA256())
    )
    pem = folder / f"{name}.pem"
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private = folder / f"{name}.key"
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return pem, private, (subject, key), hashlib.sha256(made.public_bytes(serialization.Encoding.DER)).digest()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        size = int(self.headers.get("Content-Length", 0))
        self.server.seen.append((self.path, dict(self.headers), self.rfile.read(size)))
        self.server.behave(self)

    do_GET = do_POST

    def log_message(self, *_):
        pass


def good(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "4")
    handler.end_headers()
    handler.wfile.write(b"good")


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    behave = staticmethod(good)

    def handle_error(self, request, client_address):
        pass  # a client that hangs up is what these tests are about


@pytest.fixture
def serve():
    running = []

    def start(pem=None, key=None, behave=good, newest=None):
        server = Server(("127.0.0.1", 0), Handler)
        server.seen, server.behave = [], behave
        if pem is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(pem, key)
            if newest is not None:
                context.set_ciphers("ALL:@SECLEVEL=0")
                with pytest.warns(DeprecationWarning):
                    context.minimum_version = ssl.TLSVersion.TLSv1_1
                    context.maximum_version = newest
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def url(server):
    return f"https://127.0.0.1:{server.server_address[1]}"


def post(transport):
    return transport.send(Request(method="POST", path="/v1/task", body=b"sealed", max_answer_bytes=1000))


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pki")
    ca_pem, _, ca, ca_pin = certificate(folder, "authority", ca=True)
    pem, key, _, pin = certificate(folder, "server", issuer=ca)
    return {"folder": folder, "ca": ca_pem, "issuer": ca, "ca_pin": ca_pin, "pem": pem, "key": key, "pin": pin}


def test_own_authority_and_pinned_leaf_are_accepted(serve, pki):
    """docs/security.md, enrolment step 1: a private CA needs no switch for verification; a leaf may be pinned too."""
    server = serve(pki["pem"], pki["key"])
    for trusted in (pki["ca"], pki["pem"]):
        answer = post(HttpsTransport(url(server), trusted, deadlines=QUICK))
        assert (answer.status, answer.body) == (200, b"good")
    path, headers, body = server.seen[0]
    assert (path, body) == ("/v1/task", b"sealed")
    assert headers["Accept-Encoding"] == "identity"


def test_base_path_is_kept(serve, pki):
    server = serve(pki["pem"], pki["key"])
    post(HttpsTransport(url(server) + "/hospital/", pki["ca"], deadlines=QUICK))
    assert server.seen[0][0] == "/hospital/v1/task"


def test_self_signed_is_refused_before_anything_is_sent(serve, pki):
    """docs/security.md, check 43: self-signed."""
    pem, key, _, _ = certificate(pki["folder"], "alone")
    server = serve(pem, key)
    for trusted in (None, pki["ca"]):
        with pytest.raises(TlsRefused, match="certificate") as error:
            post(HttpsTransport(url(server), trusted, deadlines=QUICK))
        assert error.value.code == "certificate_refused"
    assert server.seen == []


def test_wrong_host_is_refused(serve, pki):
    """docs/security.md, check 43: wrong host."""
    pem, key, _, _ = certificate(pki["folder"], "elsewhere", host="coordinator.example", issuer=pki["issuer"])
    server = serve(pem, key)
    with pytest.raises(TlsRefused):
        post(HttpsTransport(url(server), pki["ca"], deadlines=QUICK))
    assert server.seen == []


def test_expired_is_refused(serve, pki):
    """docs/security.md, check 43: expired."""
    pem, key, _, _ = certificate(pki["folder"], "old", issuer=pki["issuer"], start=-10, end=-1)
    server = serve(pem, key)
    with pytest.raises(TlsRefused, match="expired"):
        post(HttpsTransport(url(server), pki["ca"], deadlines=QUICK))
    assert server.seen == []


class LaxSsl:
    """The module `ssl` of a system whose contexts would still speak TLS 1.0."""

    def __getattr__(self, name):
        return getattr(ssl, name)

    @staticmethod
    def SSLContext(protocol):
        context = ssl.SSLContext(protocol)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = ssl.TLSVersion.TLSv1
        return context


def test_the_devices_context_states_its_oldest_version(pki, monkeypatch):
    """docs/security.md, check 43: TLS 1.2 and a checked host name, whatever the interpreter's default is, and in the
    connection that is used."""
    monkeypatch.setattr(tls, "ssl", LaxSsl())
    assert tls.ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).minimum_version == ssl.TLSVersion.TLSv1  # the test can fail
    for trusted in (None, pki["ca"]):
        pools = HttpsTransport("https://coordinator.example", trusted)._connection.get_adapter("https://x").poolmanager
        used = pools.connection_from_host("coordinator.example", scheme="https").conn_kw["ssl_context"]
        for context in (tls.tls_context(trusted), used):
            assert context.minimum_version == ssl.TLSVersion.TLSv1_2
            assert context.check_hostname and context.verify_mode == ssl.CERT_REQUIRED


def test_tls_1_1_is_refused(serve, pki):
    """docs/security.md, check 43: TLS 1.1."""
    server = serve(pki["pem"], pki["key"], newest=ssl.TLSVersion.TLSv1_1)
    with pytest.raises((TlsRefused, Unavailable)):
        post(HttpsTransport(url(server), pki["ca"], deadlines=QUICK))
    assert server.seen == []


def test_plain_http_is_no_address_and_a_redirect_to_it_is_not_followed(serve, pki):
    """docs/security.md, check 43: plain-http redirect."""
    plain = serve()
    with pytest.raises(TlsRefused, match="https"):
        HttpsTransport(f"http://127.0.0.1:{plain.server_address[1]}")

    def redirect(handler):
        handler.send_response(307)
        handler.send_header("Location", f"http://127.0.0.1:{plain.server_address[1]}/v1/task")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    server = serve(pki["pem"], pki["key"], behave=redirect)
    with pytest.raises(Unavailable, match="redirect"):
        post(HttpsTransport(url(server), pki["ca"], deadlines=QUICK))
    assert plain.seen == []


def test_environment_is_not_read(serve, pki, monkeypatch, tmp_path):
    """docs/security.md, check 43: proxy variables, .netrc and CA variables of the environment are ignored."""
    trap = serve()
    address = f"http://127.0.0.1:{trap.server_address[1]}"
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "HTTP_PROXY"):
        monkeypatch.setenv(name, address)
    monkeypatch.setenv("NO_PROXY", "")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login canary password canary\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    alone, key, _, _ = certificate(pki["folder"], "bundle")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(alone))
    monkeypatch.setenv("SSL_CERT_FILE", str(alone))
    server = serve(pki["pem"], pki["key"])
    assert post(HttpsTransport(url(server), pki["ca"], deadlines=QUICK)).status == 200
    assert trap.seen == []
    assert "Authorization" not in server.seen[0][1]
    with pytest.raises(TlsRefused):
        post(HttpsTransport(url(serve(alone, key)), None, deadlines=QUICK))


def test_a_named_proxy_is_used(serve, pki):
    trap = serve(behave=lambda handler: handler.send_error(502))
    Handler.do_CONNECT = Handler.do_POST
    transport = HttpsTransport(
        "https://coordinator.example", pki["ca"], f"http://127.0.0.1:{trap.server_address[1]}", QUICK
    )
    with pytest.raises(Unavailable, match="proxy"):
        post(transport)
    assert trap.seen[0][0] == "coordinator.example:443"


@pytest.mark.parametrize("user", ["CANARY-USER:CANARY-WORD@", "CANARY:CANARY%40x@", "CANARY@CANARY:CANARY@"])
def test_the_proxys_password_is_in_no_error_and_no_log(serve, pki, caplog, user):
    """docs/security.md, check 14: of a proxy only host and port are said."""
    caplog.set_level(logging.DEBUG)
    trap = serve(behave=lambda handler: handler.send_error(407))
    Handler.do_CONNECT = Handler.do_POST
    address = f"127.0.0.1:{trap.server_address[1]}"
    transport = HttpsTransport("https://coordinator.example", pki["ca"], f"http://{user}{address}", QUICK)
    with pytest.raises(Unavailable) as error:
        post(transport)
    assert address in str(error.value)
    assert "CANARY" not in str(error.value) + caplog.text


def test_pin_of_the_invite(pki):
    """docs/security.md, enrolment step 1: the file given must hold the pinned certificate, and only it is kept."""
    both = pki["ca"].read_bytes() + pki["pem"].read_bytes()
    kept = pinned_certificate(both, pki["ca_pin"])
    assert kept.count(b"BEGIN CERTIFICATE") == 1
    assert hashlib.sha256(ssl.PEM_cert_to_DER_cert(kept.decode())).digest() == pki["ca_pin"]
    with pytest.raises(TlsRefused, match="pins"):
        pinned_certificate(pki["pem"].read_bytes(), pki["ca_pin"])
    for rubbish in (b"", b"hello", b"-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----\n", b"\xff\xfe"):
        with pytest.raises(TlsRefused) as error:
            pinned_certificate(rubbish, pki["ca_pin"])
        assert error.value.code == "bad_ca_file"


def test_a_damaged_ca_file_is_a_sentence(tmp_path):
    path = tmp_path / "ca.pem"
    for content in (b"", b"rubbish"):
        path.write_bytes(content)
        with pytest.raises(TlsRefused) as error:
            HttpsTransport("https://127.0.0.1", path)
        assert error.value.code == "bad_ca_file"


def silent(handler):
    time.sleep(4)


def trickled_head(handler):
    for byte in b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 100:
        handler.wfile.write(bytes([byte]))
        handler.wfile.flush()
        time.sleep(0.2)


def trickled_body(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "900")
    handler.end_headers()
    for _ in range(900):
        handler.wfile.write(b"x")
        handler.wfile.flush()
        time.sleep(0.2)


def cut_body(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "900")
    handler.end_headers()
    handler.wfile.write(b"x" * 10)
    handler.close_connection = True


def too_long(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "2000000")
    handler.end_headers()
    handler.wfile.write(b"x" * 2_000_000)


def endless(handler):
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    while True:
        handler.wfile.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")


def bomb(handler):
    import gzip

    data = gzip.compress(bytes(10_000_000))
    handler.send_response(200)
    handler.send_header("Content-Encoding", "gzip")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def rubbish(handler):
    handler.wfile.write(b"\x00\x01 nothing of HTTP\r\n\r\n")
    handler.close_connection = True


def hang_up(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def huge_head(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"X-A: " + b"b" * 100_000 + b"\r\n\r\n")


@pytest.mark.parametrize(
    "fault",
    [silent, trickled_head, trickled_body, cut_body, too_long, endless, bomb, rubbish, hang_up, huge_head],
)
def test_every_network_fault_ends_typed_and_in_time(serve, pki, fault):
    """docs/security.md, check 63: a typed retriable error within the deadline; 0 hangs."""
    server = serve(pki["pem"], pki["key"], behave=fault)
    started = time.monotonic()
    with pytest.raises(Unavailable) as error:
        post(HttpsTransport(url(server), pki["ca"], deadlines=Deadlines(connect_s=1, read_s=0.5, total_s=1)))
    assert time.monotonic() - started < 2.5
    assert len(str(error.value).splitlines()) == 1


def test_nobody_listens(pki):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Unavailable, match="cannot reach") as error:
        post(HttpsTransport(f"https://127.0.0.1:{port}", pki["ca"], deadlines=QUICK))
    assert error.value.code == "unreachable"


@pytest.mark.parametrize(("text", "seconds"), [("7", 7.0), ("99999", 300.0), ("-1", None), ("soon", None), ("", None)])
def test_retry_after_is_bounded(serve, pki, text, seconds):
    def busy(handler):
        handler.send_response(503)
        handler.send_header("Retry-After", text)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    server = serve(pki["pem"], pki["key"], behave=busy)
    answer = post(HttpsTransport(url(server), pki["ca"], deadlines=QUICK))
    assert (answer.status, answer.retry_after_s) == (503, seconds)
