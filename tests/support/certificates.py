"""Certificates for tests: authorities, and what they sign, in the layout of cert-manager (tls.crt, tls.key, ca.crt)."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    encoding, format_ = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, format_, serialization.NoEncryption())


def alternative_name(text: str) -> x509.GeneralName:
    """A URI, an address or a name of DNS."""
    if "://" in text:
        return x509.UniformResourceIdentifier(text)
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


@dataclass(frozen=True, slots=True)
class Signed:
    chain: bytes
    key: bytes


class Authority:
    def __init__(self, name: str = "kvferry test CA") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self._name, self._key, _now() - DAY, _now() + 30 * DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.pem = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def sign(self, names: Sequence[str], *, begins: float = -1.0, ends: float = 7.0) -> Signed:
        """For these alternative names; `begins`, `ends`: days from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvferry")])
        builder = self._builder(subject, key, _now() + begins * DAY, _now() + ends * DAY)
        if names:
            alternatives = x509.SubjectAlternativeName([alternative_name(name) for name in names])
            builder = builder.add_extension(alternatives, critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        return Signed(signed.public_bytes(serialization.Encoding.PEM), key_pem(key))

    def _builder(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        begin: datetime.datetime,
        end: datetime.datetime,
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
        )


@dataclass(frozen=True, slots=True)
class Folder:
    """Where one daemon's or client's files are; `put` replaces them all at once, as a mounted Secret is."""

    path: Path

    def put(self, signed: Signed, *authorities: Authority) -> Folder:
        version = self.path / f"..{os.urandom(4).hex()}"
        version.mkdir(parents=True)
        (version / "tls.crt").write_bytes(signed.chain)
        (version / "tls.key").write_bytes(signed.key)
        (version / "tls.key").chmod(0o600)
        (version / "ca.crt").write_bytes(b"".join(authority.pem for authority in authorities))
        link = self.path / "..new"
        link.symlink_to(version.name)
        link.rename(self.path / "..data")
        for name in ("tls.crt", "tls.key", "ca.crt"):
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(f"..data/{name}")
        return self

    @property
    def cert(self) -> str:
        return str(self.path / "tls.crt")

    @property
    def key(self) -> str:
        return str(self.path / "tls.key")

    @property
    def ca(self) -> str:
        return str(self.path / "ca.crt")

    @property
    def flags(self) -> list[str]:
        return ["--tls-cert", self.cert, "--tls-key", self.key, "--tls-ca", self.ca]
