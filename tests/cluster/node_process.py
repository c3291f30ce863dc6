"""A node as a process: a pump, and a ring whose records it makes or takes. It ends when it is killed.

python -m tests.cluster.node_process send HOST PORT    sends records on link 7
python -m tests.cluster.node_process receive           prints its port, then "1" for each record of link 7
"""

from __future__ import annotations

import sys

from omni_actors.cluster.pump import Pump
from ringbuf import Ring
from tests.cluster.linked_rings import LONG_S, SECRET


def main(action: str, host: str = "127.0.0.1", port: str = "0") -> None:

    def report(link_id: int, why: str) -> None:
        print(f"lost {link_id}: {why}", file=sys.stderr)

    pump = Pump(SECRET, "127.0.0.1", report, silent_s=LONG_S)
    with Ring.create(1 << 16) as ring:
        if action == "send":
            producer = ring.claim_producer()
            pump.send(7, ring.claim_consumer(), (host, int(port)))
            while True:
                producer.send(bytes(2000))
        consumer = ring.claim_consumer()
        pump.receive(7, ring.claim_producer())
        print(pump.address[1], flush=True)
        while True:
            consumer.recv().release()
            print("1", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
