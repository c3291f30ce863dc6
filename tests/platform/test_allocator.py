"""glibc's allocator: large blocks that are freed are used again."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys

import pytest

from omni_actors.platform.allocator import SETTINGS

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="this C library is not glibc"
)

ROUNDS = 100
PAGES = ROUNDS * 8 * 2**20 // resource.getpagesize()
COUNT_FAULTS = f"""
import ctypes, resource, sys
from omni_actors.platform.allocator import keep_freed_memory
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # a huge page is one fault
if sys.argv[1] == "keep":
    keep_freed_memory()

def fill():
    blocks = [b"x" * 2**20 for _ in range(8)]

fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({ROUNDS}):
    fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(argument: str, **settings: str) -> int:
    command = [sys.executable, "-c", COUNT_FAULTS, argument]
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS} | settings
    return int(subprocess.run(command, stdout=subprocess.PIPE, env=environment, text=True, check=True).stdout)


def test_blocks_of_a_megabyte_are_used_again() -> None:
    assert faults("keep") < PAGES / 100
    assert faults("without") > PAGES / 2, "otherwise the allocator need not be told"


def test_a_setting_of_the_environment_wins() -> None:
    assert faults("keep", MALLOC_MMAP_THRESHOLD_="65536") > PAGES / 2
