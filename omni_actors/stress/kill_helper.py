"""The process that sends signals. A worker that the parent kills itself often dies on the parent's core, in the middle
of the parent's call, which adds milliseconds to the measured detection. Other causes of death do not.

Run by path, without the package: ``python -I -S kill_helper.py FD``. Each packet on the SEQPACKET socket FD is an
order: one byte with the signal's number, and the pidfds of its victims. The answer, in order, is the CLOCK_MONOTONIC
time just before the signals were sent, eight bytes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import struct
import sys
import time
from contextlib import suppress

PIDFD_SEND_SIGNAL = 424
"""Linux's number on x86-64 (see ``ringbuf.syscalls``, which this process cannot import)."""
AT_ONCE = 64
"""Most victims of one order."""
DELAY_S = 0.0005
"""Lets the sender of the order go back to sleep first."""


def main() -> None:
    """Serve orders until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the whole foreground group
    libc = ctypes.CDLL(None, use_errno=True)
    with suppress(BrokenPipeError, ConnectionResetError), socket.socket(fileno=int(sys.argv[1])) as sock:
        while True:
            packet, pidfds, _, _ = socket.recv_fds(sock, 1, AT_ONCE)
            if not packet:
                return
            time.sleep(DELAY_S)
            at = time.monotonic()
            for pidfd in pidfds:
                failed = libc.syscall(PIDFD_SEND_SIGNAL, pidfd, packet[0], None, 0) < 0
                if failed and (number := ctypes.get_errno()) != errno.ESRCH:  # ESRCH: it is dead already
                    raise OSError(number, os.strerror(number))
            sock.send(struct.pack("d", at))
            for pidfd in pidfds:
                os.close(pidfd)


if __name__ == "__main__":
    main()
