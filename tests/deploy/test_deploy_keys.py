"""Certificates and keys: who vouches for whom, and who can read them."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedquilt.deploy.ops import keys


def test_server_certificate_is_vouched_for_and_names_its_hosts(tmp_path: Path) -> None:
    keys.make_authority(tmp_path)
    keys.make_server_certificate(tmp_path, tmp_path, ["federation.example", "10.0.0.7"])
    authority = x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((tmp_path / "server.crt").read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["federation.example"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    assert len(context.get_ca_certs()) == 1


def test_the_server_cannot_sign_certificates(tmp_path: Path) -> None:
    keys.make_authority(tmp_path)
    keys.make_server_certificate(tmp_path, tmp_path, ["localhost"])
    server = x509.load_pem_x509_certificate((tmp_path / "server.crt").read_bytes())
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


def test_private_files_are_their_owners_and_never_overwritten(tmp_path: Path) -> None:
    keys.make_authority(tmp_path)
    keys.make_server_certificate(tmp_path, tmp_path, ["localhost"])
    keys.make_node_key(tmp_path)
    for name in ("ca.key", "server.key", "node.key"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600, name
    before = (tmp_path / "node.key").read_bytes()
    with pytest.raises(FileExistsError):
        keys.make_node_key(tmp_path)
    assert (tmp_path / "node.key").read_bytes() == before


def test_a_node_key_is_a_pair(tmp_path: Path) -> None:
    keys.make_node_key(tmp_path)
    private = load_ssh_private_key((tmp_path / "node.key").read_bytes(), password=None)
    public = load_ssh_public_key((tmp_path / "node.pub").read_bytes())
    assert private.public_key() == public
