"""A service with a certificate of its own: the client sends it nothing until the user says that it is trusted."""

import os
import ssl
import subprocess
import sys

import pytest

from hone_tinker.connection import Connection, ServiceFailed
from tests.service.conftest import Server

TRUSTING = (
    "import sys; from hone_tinker.connection import Connection; "
    "print(Connection(sys.argv[1], sys.argv[2], 60).session_id)"
)
TIMEOUT_S = 3600.0  # a certificate that is refused is not tried again until then


def certificate(folder, address):
    """Files of a self-signed certificate for an address, and of its key."""
    made, key = folder / f"{address}.pem", folder / f"{address}.key"
    kind = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=hone", "-addext", f"subjectAltName=IP:{address}", "-days", "2"]
    subprocess.run([*kind, "-keyout", key, "-out", made, *names], check=True, capture_output=True, timeout=60)
    return made, key


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    folder = tmp_path_factory.mktemp("private")
    made, key = certificate(folder, "127.0.0.1")
    server = Server(folder, listen={"port": 0, "tls_certificate": str(made), "tls_key": str(key)})
    yield server, made
    server.close()


def connected(url, key, trusted):
    """The output and errors of a process that opens a session and trusts one more certificate."""
    done = subprocess.run(
        [sys.executable, "-c", TRUSTING, url, key],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "SSL_CERT_FILE": str(trusted), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.stdout.strip(), done.stderr


def test_a_self_signed_certificate_is_refused_and_named_and_served_once_it_is_trusted(private, tmp_path):
    server, made = private
    assert server.url.startswith("https://")
    with pytest.raises(ServiceFailed, match=r"certificate cannot be verified .*self-signed.*SSL_CERT_FILE") as refused:
        Connection(server.url, server.key, TIMEOUT_S)
    assert isinstance(refused.value.__cause__.certificate_error, ssl.SSLCertVerificationError)
    session, _ = connected(server.url, server.key, made)
    assert session.startswith("session-")
    _, refusal = connected(server.url.replace("127.0.0.1", "localhost"), server.key, made)  # not its name
    assert "Hostname mismatch" in refusal
    assert "certificate cannot be verified" in refusal
