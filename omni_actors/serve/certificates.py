"""The server's certificate and key, and the certificates that its clients must have. They can be loaded again."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from omni_actors.errors import ConfigError
from omni_actors.serve.settings import ServerSettings

log = logging.getLogger("omni_actors.serve")


class Certificates:
    """The TLS context of a server, from the files that its settings name. Raises ConfigError.

    context: for new connections. Those that are open keep theirs.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.context = self._load()

    def reload(self) -> None:
        """Read the files again, for connections from now on. If that fails, the error is logged and nothing changes."""
        try:
            self.context = self._load()
        except ConfigError as error:
            log.error("the certificate was not loaded again: %s", error)  # noqa: TRY400 - it has no cause to show
        else:
            log.warning("the certificate was loaded again")

    def _load(self) -> ssl.SSLContext:
        settings = self._settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 or newer
        context.set_alpn_protocols(["http/1.1"])
        certfile, keyfile = str(settings.ssl_certfile), settings.ssl_keyfile
        for path in (certfile, keyfile):
            if path is not None:
                _require_file(path)
        try:
            # Without a password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(certfile, keyfile, password=settings.ssl_keyfile_password or "")
        except (OSError, ValueError) as error:
            accepted = (
                f"a PEM file with a certificate, its private key and, if that is encrypted, its password ({error})"
            )
            raise ConfigError(certfile, "ssl", keyfile or certfile, accepted) from error
        if settings.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(settings.ssl_ca_certs)
            except (OSError, ValueError) as error:
                accepted = f"a PEM file with certificates ({error})"
                raise ConfigError(settings.ssl_ca_certs, "ssl", settings.ssl_ca_certs, accepted) from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _require_file(path: str) -> None:
    """Raises ConfigError if there is no such file, or if this process may not look for it."""
    try:
        if Path(path).is_file():
            return
    except (OSError, ValueError) as error:
        raise ConfigError(path, "ssl", path, f"a file ({error})") from error
    raise ConfigError(path, "ssl", path, "a file")
