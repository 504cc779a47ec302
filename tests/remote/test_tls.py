"""A certificate that nobody vouches for: three lines, and no request is made."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from tests.remote import buckets
from tests.remote.conftest import Look
from tests.remote.proxy import proxy
from tests.remote.servers import SECRET, upload
from tests.support.tiny_run import make_run

pytestmark = pytest.mark.remote


def certified(folder: Path) -> tuple[Path, Path]:
    """A key, and a certificate of 127.0.0.1 that is signed with it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    here = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(here, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return folder / "key.pem", folder / "certificate.pem"


@pytest.mark.parametrize("words", [["status"], ["set-lr", "3e-5", "--yes"]], ids=" ".join)
def test_a_certificate_that_nobody_signed(
    words: list[str], store: Any, server: str, look: Look, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Nothing is written. What the last line names lets the command through."""
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _: None)
    upload(store, make_run(tmp_path / "run", steps=(4, 8)), "run")
    before = buckets.objects(store)
    key, certificate = certified(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with proxy(server, tls) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.address)
        found = look(*words, "-C", buckets.RUN)
        assert found.exit_code == 1 and found.stdout == "" and SECRET not in found.stderr
        lines = found.stderr.strip().splitlines()
        said = " ".join(lines)
        assert "its certificate can't be verified" in said and between.address in said
        assert "the run is exactly as it was" in said
        assert "AWS_CA_BUNDLE=FILE" in lines[-1] and "Traceback" not in said
        assert between.seen == [] and buckets.objects(store) == before
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        trusted = look(*words, "-C", buckets.RUN)
        assert trusted.exit_code == 0 and between.seen, trusted.output
