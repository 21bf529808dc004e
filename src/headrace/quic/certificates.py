"""The certificate that a gateway makes for itself, and the names in other certificates."""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headrace import limits
from headrace.quic.engine import Identity

COMMON_NAME = "headrace"


def own_identity(directory: Path, hosts: Sequence[str]) -> tuple[Identity, bool]:
    """The self-signed certificate in a directory, and whether it was made now: because there was none, it has ended, or
    it does not name all of the hosts."""
    identity = Identity(directory / "certificate.pem", directory / "key.pem")
    if _good(identity, hosts):
        return identity, False
    directory.mkdir(parents=True, exist_ok=True)
    certificate, key = make_certificate(["localhost", *hosts])
    # The key first: a certificate without its key would be taken for a good one.
    _write(identity.key, key, 0o600)
    _write(identity.certificate, certificate, 0o644)
    return identity, True


def make_certificate(hosts: Sequence[str]) -> tuple[bytes, bytes]:
    """A self-signed leaf certificate for these names and addresses, and its key, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, COMMON_NAME)])
    now = datetime.datetime.now(datetime.UTC)
    # An hour back, for clients whose clocks are.
    begin, end = (
        now - datetime.timedelta(hours=1),
        now + datetime.timedelta(days=limits.QUIC_CERTIFICATE_DAYS),
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(
            x509.SubjectAlternativeName([_general_name(host) for host in dict.fromkeys(hosts)]), False
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private


def names_of(der: bytes) -> list[str]:
    """The common names and alternative names of a certificate."""
    certificate = x509.load_der_x509_certificate(der)
    names = [str(one.value) for one in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    try:
        others = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return names
    for other in list(others)[: limits.QUIC_CERTIFICATE_NAMES]:
        if isinstance(
            other, x509.DNSName | x509.RFC822Name | x509.UniformResourceIdentifier | x509.IPAddress
        ):
            names.append(str(other.value))
    return names


def pinned_fingerprint(path: Path, server_name: str) -> str | None:
    """Of a file with a server's own certificate, and no authority: its SHA-256, if it is valid and has this name."""
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError:
        return None
    if len(found) != 1 or found[0].not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        return None
    try:
        if found[0].extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            return None
        names = list(found[0].extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return None
    return found[0].fingerprint(hashes.SHA256()).hex() if _general_name(server_name) in names else None


def _good(identity: Identity, hosts: Sequence[str]) -> bool:
    try:
        certificate = x509.load_pem_x509_certificate(identity.certificate.read_bytes())
        key = serialization.load_pem_private_key(identity.key.read_bytes(), None)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    return (
        certificate.not_valid_after_utc > datetime.datetime.now(datetime.UTC)
        and certificate.public_key() == key.public_key()
        and all(_general_name(host) in list(names) for host in ["localhost", *hosts])
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, content: bytes, mode: int) -> None:
    fresh = path.with_suffix(".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    fresh.replace(path)
