"""A site on this machine, and a resolver."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from tests.serve.media.local_site import Names, Site


@pytest.fixture
async def site(nursery: trio.Nursery) -> Site:
    site = Site()
    [listener] = await nursery.start(partial(trio.serve_tcp, site.serve, 0, host="127.0.0.1"))
    site.port = listener.socket.getsockname()[1]
    return site


@pytest.fixture
async def names() -> Names:
    names = Names()
    trio.socket.set_custom_hostname_resolver(names)  # for as long as this test's trio.run
    return names
