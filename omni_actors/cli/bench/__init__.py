"""``omni-actors bench``: load on an OpenAI-compatible server, and what its clients notice.

Rules
1. With arrival rates, a request is sent when its time has come, however many are in progress. Its times count from the
   moment at which it was due: so a server, or a generator, that falls behind cannot hide it.
2. The generator measures itself in each run: how late it sent requests, and its CPU time. ``--self-test`` measures what
   it adds to each event.
3. The order of prompts and the times of arrivals follow from the seed.
4. A request that fails counts as an error of one kind, and in no percentile.
"""
