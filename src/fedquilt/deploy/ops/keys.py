"""Keys and certificates of a federation: a private authority, the server's certificate, one key a client."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_AUTHORITY_DAYS = 3650
_SERVER_DAYS = 820  # some TLS clients refuse server certificates that live longer than 825 days
_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


def write_private(path: Path, content: bytes) -> None:
    """Writes a new file that only its owner can read; one that is there already is never overwritten.

    >>> import tempfile
    >>> p = Path(tempfile.mkdtemp()) / "key"
    >>> write_private(p, b"secret"); oct(p.stat().st_mode)[-3:]
    '600'
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def make_authority(folder: Path) -> None:
    """Writes `ca.key` and `ca.crt`: the private authority that vouches for the server."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _certificate("fedquilt authority", "fedquilt authority", key.public_key(), _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_private(folder / "ca.key", _pem(key))
    (folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def make_server_certificate(authority: Path, folder: Path, hosts: Sequence[str]) -> None:
    """Writes `server.key` and `server.crt`, valid for the given host names and addresses."""
    signer = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _certificate(hosts[0], "fedquilt authority", key.public_key(), _SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    write_private(folder / "server.key", _pem(key))
    (folder / "server.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def check_certificate(path: Path, project: Path) -> dt.timedelta:
    """How long a server's certificate still holds; one that has run out is refused with what to do."""
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    left = certificate.not_valid_after_utc - dt.datetime.now(dt.UTC)
    if left < dt.timedelta():
        raise ValueError(
            f"the server's certificate ran out on {certificate.not_valid_after_utc:%Y-%m-%d}, so no client would talk "
            f"to it; make a new one with `fedquilt deploy renew --dir {project}`"
        )
    return left


def make_node_key(folder: Path) -> None:
    """Writes `node.key` and `node.pub` in OpenSSH format: what a client proves its name with."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    write_private(folder / "node.key", private)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / "node.pub").write_bytes(public)


def _certificate(subject: str, issuer: str, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))  # clocks of devices differ
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{usage: usage in allowed for usage in _USAGES})


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
