"""The process that sends signals. A worker that the parent kills itself often dies on the parent's core, in the middle
of the parent's call, which adds milliseconds to the measured detection. Other causes of death do not.

Run by path, without the package: ``python -I -S kill_helper.py FD``. Each packet on the SEQPACKET socket FD is an
order: one byte with the signal's number, and the pidfds of its victims. The answer, in order, is the CLOCK_MONOTONIC
time just before the signals were sent, eight bytes.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
from contextlib import suppress

AT_ONCE = 64
"""Most victims of one order."""
DELAY_S = 0.0005
"""Lets the sender of the order go back to sleep first."""


def main() -> None:
    """Serve orders until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the whole foreground group
    with suppress(BrokenPipeError, ConnectionResetError), socket.socket(fileno=int(sys.argv[1])) as sock:
        while True:
            packet, pidfds, _, _ = socket.recv_fds(sock, 1, AT_ONCE)
            if not packet:
                return
            time.sleep(DELAY_S)
            at = time.monotonic()
            for pidfd in pidfds:
                with suppress(ProcessLookupError):  # it is dead already
                    signal.pidfd_send_signal(pidfd, packet[0])
            sock.send(struct.pack("d", at))
            for pidfd in pidfds:
                os.close(pidfd)


if __name__ == "__main__":
    main()
