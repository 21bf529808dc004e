"""The certificate that a gateway makes for itself, and how others are recognized."""

from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from headrace.quic.certificates import make_certificate, names_of, own_identity, pinned_fingerprint


def test_it_is_made_once_and_kept(tmp_path: Path) -> None:
    identity, made = own_identity(tmp_path / "quic", ["127.0.0.1"])
    assert made
    before = identity.certificate.read_bytes()
    again, made = own_identity(tmp_path / "quic", ["127.0.0.1"])
    assert (again, made) == (identity, False)
    assert identity.certificate.read_bytes() == before


def test_it_is_made_anew_for_another_address_or_a_broken_file(tmp_path: Path) -> None:
    identity, _ = own_identity(tmp_path, [])
    assert own_identity(tmp_path, ["10.0.0.1"])[1]
    assert not own_identity(tmp_path, [])[1]  # it names more than is asked for
    identity.key.write_text("broken")
    assert own_identity(tmp_path, [])[1]
    identity.key.write_bytes(make_certificate(["localhost"])[1])  # of another certificate
    assert own_identity(tmp_path, [])[1]


def test_names_are_found(tmp_path: Path) -> None:
    pem, _ = make_certificate(["localhost", "::1", "a.example"])
    der = x509.load_pem_x509_certificate(pem).public_bytes(_der())
    assert names_of(der) == ["headrace", "localhost", "::1", "a.example"]


def test_a_servers_own_certificate_is_recognized_by_itself(tmp_path: Path) -> None:
    pem, _ = make_certificate(["localhost"])
    path = tmp_path / "one.pem"
    path.write_bytes(pem)
    digest = x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()).hex()
    assert pinned_fingerprint(path, "localhost") == digest
    assert pinned_fingerprint(path, "elsewhere") is None
    path.write_bytes(pem + make_certificate(["localhost"])[0])
    assert pinned_fingerprint(path, "localhost") is None
    path.write_text("nothing")
    assert pinned_fingerprint(path, "localhost") is None


def _der() -> object:
    from cryptography.hazmat.primitives.serialization import Encoding

    return Encoding.DER
