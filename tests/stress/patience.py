"""Timeouts for the harness's runs."""

from __future__ import annotations

PATIENT = {
    f"stages.{stage}.{timeout}": seconds
    for stage in ("first", "second")
    for timeout, seconds in (("load_timeout_s", 60.0), ("step_timeout_s", 5.0))
}
"""With these, no worker is taken for one that hangs, however busy the machine is with other tests."""
