"""A server on the loopback interface that speaks TLS and behaves as a test says; certificates for it."""

import datetime
import hashlib
import http.server
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from edgefl_exchange.https import Deadlines
from edgefl_exchange.transport import Request

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


def url(server):
    return f"https://127.0.0.1:{server.server_address[1]}"


def post(transport):
    return transport.send(Request(method="POST", path="/v1/task", body=b"sealed", max_answer_bytes=1000))
