"""The program that kills: a process of its own, since a death must not happen here.

Killed by the process that is to see the death, a worker is taken down on that one's core as often as not, in the
middle of its call: milliseconds in which nobody else runs there. Whoever dies for other reasons dies elsewhere.

Run by path, without the package: ``python -I -S hand.py FD``. On the SEQPACKET socket FD comes a packet for each deed:
the signal's number, one byte, with the pidfds of those it is for. The answer, in turn, once it is done, is the
CLOCK_MONOTONIC time just before it, eight bytes.
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
"""Victims of a deed, at the most."""
BREATH_S = 0.0005
"""For who has sent the packet, to go back to sleep."""


def main() -> None:
    """Until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the whole foreground group
    with suppress(BrokenPipeError, ConnectionResetError), socket.socket(fileno=int(sys.argv[1])) as sock:
        while True:
            packet, pidfds, _, _ = socket.recv_fds(sock, 1, AT_ONCE)
            if not packet:
                return
            time.sleep(BREATH_S)
            at = time.monotonic()
            for pidfd in pidfds:
                with suppress(ProcessLookupError):  # somebody was faster
                    signal.pidfd_send_signal(pidfd, packet[0])
            sock.send(struct.pack("d", at))
            for pidfd in pidfds:
                os.close(pidfd)


if __name__ == "__main__":
    main()
