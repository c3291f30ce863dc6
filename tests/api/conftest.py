from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-api", action="store_true", help="Store what test_capabilities finds in matrix.json.")
