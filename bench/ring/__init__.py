"""`python -m bench.ring`: the ring beside what else moves bytes between two processes of one machine.

__main__    the command: repetitions, options, exit status
measure     one transport at one size: two pinned processes, one stream, one paced series
transports  ours, the standard library's, and memcpy as the limit
peers       pyzmq, iceoryx2, vllm-omni's connector, Ray's object store
checks      round trips at 64 B, idleness, a long run
report      tables, targets, plot
"""

from __future__ import annotations
