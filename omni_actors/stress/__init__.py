"""A pipeline under fire: real processes, real signals, and answers that must equal those of a quiet day.

A run has four parts, each in a file of its own:

``schedule``  what happens, as data: requests, aborts, faults, waits. A JSON text, so that a command line can repeat it.
``machine``   makes schedules: Hypothesis's rule-based state machine. A failing one is shrunk.
``driver``    carries a schedule out on a system of its own, with ``faults``, and compares with ``oracle``.
``judge``     the rules: what may become of a request, and what may be left behind (``leaks``). Pure functions.

``simulation`` does the like without processes: the same system over ``simulated`` workers, on pipelines of its own
(``worlds``), in virtual time and from a seed alone, so that it is fast and any failure comes again.

``report`` counts; ``soak`` is the long run under load; ``command`` is ``python -m omni_actors.stress``.
"""
