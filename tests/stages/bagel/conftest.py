"""A tiny BAGEL, loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stages.bagel.driving import Bagel, context


@pytest.fixture(scope="session")
def tiny_bagel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_models import bagel

    return bagel.save(tmp_path_factory.mktemp("bagel"))


@pytest.fixture(scope="session")
def bagel(tiny_bagel: Path) -> Bagel:
    from omni_actors.stages.bagel.context import ContextEngine
    from omni_actors.stages.bagel.denoiser import DenoiserEngine

    return Bagel(ContextEngine(context(tiny_bagel, "context")), DenoiserEngine(context(tiny_bagel, "denoiser")))
