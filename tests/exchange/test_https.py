"""HTTPS on the loopback interface: which server is trusted, what is refused, what is ignored."""

import hashlib
import logging
import ssl
import warnings

import pytest
from tests.exchange.tls_server import QUICK, Handler, certificate, post, url

from edgefl_exchange import tls
from edgefl_exchange.errors import TlsRefused, Unavailable
from edgefl_exchange.https import HttpsTransport
from edgefl_exchange.tls import pinned_certificate


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
    with pytest.raises(TlsRefused, match=r"expired.*clock says .* UTC: set the clock if that is wrong"):
        post(HttpsTransport(url(server), pki["ca"], deadlines=QUICK))
    assert server.seen == []


def test_a_certificate_that_begins_later_is_told_to_hang_on_the_clock(serve, pki):
    """A device whose clock is behind was told to give --ca, which its command does not have."""
    pem, key, _, _ = certificate(pki["folder"], "early", issuer=pki["issuer"], start=1, end=10)
    server = serve(pem, key)
    with pytest.raises(TlsRefused, match=r"not yet valid.*clock says .* UTC: set the clock if that is wrong") as error:
        post(HttpsTransport(url(server), pki["ca"], deadlines=QUICK))
    assert "--ca" not in str(error.value) and server.seen == []


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
    with pytest.raises(TlsRefused, match="that the invite names"):
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
