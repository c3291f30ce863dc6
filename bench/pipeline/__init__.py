"""`python -m bench.pipeline`: what a request costs that three processes do nothing for.

__main__    the command: repetitions, options, exit status
load        requests in flight in a closed loop, their latencies, and the CPU time that they take
ours        the request through three ``echo`` stages
peers       the same through multiprocessing.Queue, ZMQ with an asyncio parent, and Ray actors
report      tables and bounds
trace       when one request passes each point of its path
"""

from __future__ import annotations
