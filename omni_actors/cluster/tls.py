"""TLS between the nodes of one system, with a certificate that is made for it when it starts.

Rules
1. The system has one certificate and one key, as it has one secret. The parent makes them, keeps them in memory, and
   gives them to the agents together with the secret.
2. Both sides of a connection present the certificate, and accept no other one: it is the only authority they know, and
   may sign nothing. A process that has the key belongs to the system: names are not checked.
3. The handshake with the secret follows inside of TLS (``handshake``). A stranger has the time of one for both.
"""

from __future__ import annotations

import datetime
import os
import ssl
from typing import Final

import msgspec

from omni_actors.cluster.channel import Tls
from omni_actors.errors import ConfigError
from ringbuf.syscalls import memfd_create

_SINCE: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_UNTIL: Final = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)
"""The certificate ends with the system, not by its date: the clock of a node may be wrong."""
_PEM_CERTIFICATE: Final = "TLS certificate"


class Credentials(msgspec.Struct, frozen=True):
    """The certificate and the key with which one side of a connection proves its identity, as PEM."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "Credentials(…)"  # a log must not show the key

    def contexts(self) -> Tls:
        """Return the contexts for accepting and for making connections. Raises ssl.SSLError, ValueError (no PEM)."""
        return Tls(self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT))

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # rule 2
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate.decode())
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # no connection goes on where another one has ended
        fd = memfd_create(_PEM_CERTIFICATE)  # OpenSSL reads a file; this one has no name
        try:
            os.write(fd, self.certificate + self.key)
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context


def make_credentials() -> Credentials:
    """Return a new key and a certificate of its own. Raises ConfigError (the package ``cryptography`` is missing)."""
    try:
        from cryptography import x509  # of the extra "cluster"; takes 50 ms
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        accepted = f"true, with the extra installed (pip install '.[cluster]' in the clone): {error}"
        raise ConfigError("cluster", "cluster.tls", True, accepted) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "omni_actors")])
    certificate = (
        x509.CertificateBuilder(subject_name=name, issuer_name=name, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_SINCE)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Credentials(
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )
