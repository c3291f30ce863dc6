"""The faults of the page in a headless Chromium, with more than one page."""

from __future__ import annotations

import json

import psutil
import pytest

from tests.serve.page.test_browser import in_stage
from tests.support.chromium import EXECUTABLE, open_page
from tests.support.http_server import Start

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="there is no Chromium on this machine")


@pytest.mark.slow
def test_a_frozen_worker_is_thawed_from_a_page_that_did_not_freeze_it(start: Start) -> None:
    thaw, freeze = (in_stage("mouth", f"[data-fault={fault}]") for fault in ("thaw", "freeze"))
    with start("--chaos") as server, open_page() as one, open_page() as other:
        worker = psutil.Process(server.pid_of("mouth"))
        for page in (one, other):
            page.resize(1280, 900)
            page.open(server.url)
        one.click(freeze)
        other.wait(f"document.querySelector({json.dumps(thaw)})")
        one.open(f"{server.url}/?again")
        one.wait(f"document.querySelector({json.dumps(thaw)})")
        other.click(thaw)
        one.wait(f"document.querySelector({json.dumps(freeze)})")
        server.wait(lambda: worker.status() != psutil.STATUS_STOPPED, "the worker to run again")
        assert server.pid_of("mouth") == worker.pid
        assert [*one.errors, *other.errors] == []
