"""The fault harness: injects faults into a running pipeline, and compares its outputs with those of a run without
faults.

A run has four parts, each in a file of its own:

``schedule``  what happens, as data: requests, aborts, faults, waits. Its text is JSON, so a command can repeat it.
``search``    draws schedules with Hypothesis, and shrinks a schedule that fails.
``driver``    carries a schedule out on a system of its own, with ``faults``, and compares with ``oracle``.
``judge``     the rules for requests, deaths and leftovers (``leaks``). Pure functions.

``simulation`` does the same without processes: the same system on simulated workers, in virtual time and from a seed
alone. It is fast, and every failure can be repeated.

``report`` counts, ``soak`` is the long run under load, and ``command`` is ``python -m omni_actors.stress``.
"""
