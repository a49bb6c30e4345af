"""The daemon's certificate, key and authorities: read from files that may be replaced while it runs. Shell.

Every handshake of a server, and every dial, looks whether the files have changed. New ones are taken if they fit
together; else the old ones stay, and the log says why.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from dataclasses import dataclass

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.config.values import ConfigError

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
LOOK_SECONDS = 10.0
SOON_SECONDS = 3 * 86400.0  # before its end, from which on the log says so
SAY_AGAIN_SECONDS = 3600.0


# What cryptography raises of a certificate that it can parse, only when something of it is looked at.
_UNUSABLE = (
    ValueError,
    UnsupportedAlgorithm,
    x509.UnsupportedGeneralNameType,
    x509.DuplicateExtension,
    x509.InvalidVersion,
)


class TlsError(ValueError):
    """A file cannot be read, or the files do not fit together; names the setting and the file."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    cert: str
    key: str
    ca: str


@dataclass(frozen=True, slots=True)
class Identity:
    """The contents of the files at one moment. `expires`: seconds since 1970, of what is sent whatever ends first."""

    chain: bytes
    key: bytes
    authorities: bytes
    names: tuple[str, ...]  # the certificate's alternative names
    expires: float


def files_of(config: DaemonConfig) -> TlsFiles | None:
    return TlsFiles(config.tls_cert, config.tls_key, config.tls_ca) if config.tls_cert else None


def read_identity(files: TlsFiles, now: float) -> Identity:
    """Reads the files: TlsError where the three cannot be used together at `now`, seconds since 1970."""
    try:
        return _read_identity(files, now)
    except TlsError:
        raise
    except _UNUSABLE as error:
        raise TlsError(
            f"--tls-cert {files.cert}, --tls-ca {files.ca}: what is in them cannot be used: "
            f"{type(error).__name__}: {error}"
        ) from error


def _read_identity(files: TlsFiles, now: float) -> Identity:
    chain, key, authorities = (
        _read("--tls-cert", files.cert),
        _read("--tls-key", files.key),
        _read("--tls-ca", files.ca),
    )
    own, roots = _certificates("--tls-cert", files.cert, chain), _certificates("--tls-ca", files.ca, authorities)
    try:
        private = load_pem_private_key(key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise TlsError(f"--tls-key {files.key} is no private key in PEM without a passphrase: {error}") from error
    if not isinstance(private, RSAPrivateKey | EllipticCurvePrivateKey):
        raise TlsError(f"--tls-key {files.key} is a {type(private).__name__}; gRPC takes RSA and elliptic curves")
    if own[0].public_key() != private.public_key():
        raise TlsError(f"--tls-key {files.key} is not the key of the first certificate of --tls-cert {files.cert}")
    for certificate in own:
        _check_time("--tls-cert", files.cert, certificate, now)
    if all(root.not_valid_after_utc.timestamp() <= now for root in roots):
        raise TlsError(f"--tls-ca {files.ca}: every certificate in it has expired")
    return Identity(chain, key, authorities, names_of(own[0]), min(one.not_valid_after_utc.timestamp() for one in own))


def _read(flag: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            found = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TlsError(f"{flag} {path}: {error.strerror or error}") from error
    if len(found) > MAX_FILE_BYTES:
        raise TlsError(f"{flag} {path} has more than {MAX_FILE_BYTES} bytes")
    return found


def _certificates(flag: str, path: str, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise TlsError(f"{flag} {path} holds no certificates in PEM: {error}") from error


def _check_time(flag: str, path: str, certificate: x509.Certificate, now: float) -> None:
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if end.timestamp() <= now:
        raise TlsError(f"{flag} {path} expired at {end:%Y-%m-%d %H:%M:%S} UTC")
    if begin.timestamp() > now:
        raise TlsError(f"{flag} {path} is valid from {begin:%Y-%m-%d %H:%M:%S} UTC on; is this machine's clock right?")


def names_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """Names of DNS, URIs and addresses, as they are written."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return ()
    names = [*found.get_values_for_type(x509.DNSName), *found.get_values_for_type(x509.UniformResourceIdentifier)]
    return (*names, *(str(address) for address in found.get_values_for_type(x509.IPAddress)))


_Marks = tuple[tuple[int, int, int, int] | None, ...]


class TlsWatch:
    """The files' identity. `current` may be called by any thread: gRPC does, at each handshake."""

    def __init__(self, files: TlsFiles) -> None:
        """ConfigError where the files do not fit: at the start there are no old ones to keep."""
        self._files = files
        self._lock = threading.Lock()
        self._marks = self._look()
        try:
            self._identity = read_identity(files, time.time())
        except TlsError as error:
            raise ConfigError(str(error)) from error
        self.broken = ""  # why the files, as they are now, are not used
        self._said_at = 0.0

    def current(self) -> Identity:
        """The identity as of the files. Never fails: files that do not fit change nothing but `broken`."""
        with self._lock:
            marks = self._look()
            if marks != self._marks:
                self._marks = marks  # read after it: what changes in between is seen the next time
                self._take()
            return self._identity

    def read_again(self) -> Identity:
        """Whether or not the files look changed: time, or rights, may have made good what did not fit."""
        with self._lock:
            self._marks = self._look()
            self._take()
            return self._identity

    def _take(self) -> None:
        try:
            found = read_identity(self._files, time.time())
        except TlsError as error:
            if str(error) != self.broken:
                log.warning("what lies there for TLS does not fit, and what is in use stays in use: %s", error)
            self.broken = str(error)
            return
        self.broken = ""
        if found != self._identity:
            self._identity = found
            log.info("new certificate: %s, until %s", ", ".join(found.names) or "no names", utc(found.expires))

    def _look(self) -> _Marks:
        return tuple(_mark(path) for path in (self._files.cert, self._files.key, self._files.ca))

    # -- what gRPC takes -----------------------------------------------------------------------------------------

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a server, whose clients need a certificate of the authorities, too."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._configuration, require_client_authentication=True
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        identity = self.current()
        return grpc.ssl_server_certificate_configuration(
            [(identity.key, identity.chain)], root_certificates=identity.authorities
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of the files as they are now: made anew for each dial."""
        identity = self.current()
        return grpc.ssl_channel_credentials(identity.authorities, identity.key, identity.chain)

    async def run(self) -> None:
        """Watches until cancelled: sees new files though nobody dials, and warns before the certificate ends."""
        while True:
            left = self.read_again().expires - time.time()
            if left < SOON_SECONDS and time.monotonic() - self._said_at >= SAY_AGAIN_SECONDS:
                self._said_at = time.monotonic()
                log.warning(
                    "the certificate %s %s: %s",
                    *(self._files.cert, "ends soon" if left > 0 else "has expired", utc(self._identity.expires)),
                )
            await asyncio.sleep(LOOK_SECONDS)


def _mark(path: str) -> tuple[int, int, int, int] | None:
    """A mark that changes when the file does; None where there is none. Follows links, as a mounted Secret has them."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
