"""`python -m bench.link`: a link between two nodes, beside bare TCP, ZMQ, Ray's objects, and iperf3 if it is installed.

The nodes are two network namespaces of this machine with a cable between them, so it needs root. Every transport sends
the same messages. Ours is used as a cluster uses it: on each node, one process has the rings, and another one the pump.

Rule 1: one run measures everything. Rounds alternate between the transports, and a figure is the median of the rounds'
ratios to bare TCP in the same round.
Rule 2: CPU time is that of all processes of both nodes, the kernel's work for them included.
Rule 3: a stream's clock runs from before the first send until the far side has said that it checked the last message.
"""
