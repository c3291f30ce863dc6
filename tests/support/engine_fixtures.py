"""Fixtures of the tests of engines. A ``conftest.py`` imports those that its directory uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from omni_actors.stages.base import StageEngine
from tests.support.clear_choices import patched_choices
from tests.support.engine_driver import Driver


@pytest.fixture
def drive(shared_engines: Callable[[str], StageEngine]) -> Iterator[Callable[[str | StageEngine], Driver]]:
    """(engine, or the name of a shared one) -> Driver. Fails a test that leaves a request in an engine."""
    drivers = []

    def new(engine: str | StageEngine) -> Driver:
        drivers.append(Driver(shared_engines(engine) if isinstance(engine, str) else engine))
        return drivers[-1]

    yield new
    left = {request_id for driver in drivers for request_id in driver.live}
    for driver in drivers:
        for request_id in list(driver.live):
            driver.abort(request_id)
    assert not left, f"requests left in the engine: {left}"


@pytest.fixture
def clear_choices() -> Iterator[None]:
    """No token depends on rounding: see ``tests.support.clear_choices``. An unclear choice fails the test."""
    with patched_choices():
        yield


@pytest.fixture
def lenient_choices() -> Iterator[None]:
    """As ``clear_choices``, but unclear choices pass: for requests whose tokens no test compares."""
    with patched_choices(strict=False):
        yield
