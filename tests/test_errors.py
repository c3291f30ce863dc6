"""Errors as data: copies of an error, and one that comes from another process, have its type, text and facts."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import omni_actors
from omni_actors import errors
from omni_actors.errors import Death, OmniError, WorkerExit
from omni_actors.protocol.messages import Address

ROOT = Path(__file__).parent.parent
EXIT = WorkerExit(pid=1, signal="SIGKILL", exit_code=None, stderr_tail=("last line",))
FAILED = errors.StageFailed("llm", 0, "why", [Death(generation=1, at=0.0, exit=EXIT)])
EACH = [
    errors.ConfigError("file:1", "name", 1, "text"),
    errors.NoPlace("llm", 0, {"node": "full"}),
    errors.ClusterUnavailable({"node": "gone"}),
    errors.RayUnavailable("10.0.0.1:6379", "why"),
    errors.StartTimedOut(1.0, {("llm", 0): "loading"}),
    errors.SystemClosed("why"),
    errors.InvalidRequest("wrong", param="seed", code="code"),
    errors.InvalidAdapter("directory", "why", misfit=True),
    errors.Unsupported("llm", "sleep", "why"),
    errors.InputFailed("script", ValueError("why")),
    errors.Overloaded(64, 2.0, "llm"),
    errors.TemporarilyRefused("why", code="code", retry_after_s=3.0),
    errors.DeadlineExceeded(1.0),
    errors.SlowConsumer("output_bytes", 1.0, 2, 3.0, 4.0),
    errors.Aborted("why"),
    errors.StageCrashed("llm", 0, 1, EXIT, "why", retryable=False),
    errors.Quarantined("llm", 1.0),
    errors.StageAsleep("llm"),
    errors.StageUnavailable(FAILED, 1.0),
    errors.CallTimedOut("llm", 0, "sleep", 1.0),
    errors.TooManyCalls("llm", 0, "sleep", 16),
    errors.WorkerLost("llm", 0, "sleep", EXIT, raised=True, had_worker=True),
    errors.WorkerLost("llm", None, "tokenize", None),
    FAILED,
]


@pytest.mark.parametrize("error", EACH, ids=lambda error: type(error).__name__)
def test_an_error_can_be_pickled_and_copied(error: OmniError) -> None:
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(same) is type(error)
        assert str(same) == str(error)
        assert {name: repr(fact) for name, fact in vars(same).items()} == {
            name: repr(fact) for name, fact in vars(error).items()
        }


def test_each_error_that_can_be_raised_is_among_them() -> None:
    found = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, OmniError)}
    bases = {base for each in found for base in each.__bases__}
    assert found - bases == {type(error) for error in EACH} - bases


def test_an_error_names_a_replica_as_its_address_does() -> None:
    late = errors.StartTimedOut(1.0, {("llm", 0): "loading"})
    assert str(late) == f"not ready within 1 s (start_timeout_s): {Address('llm', 0)} (loading)"


@pytest.mark.parametrize("retry_after_s", [None, 30.0])
def test_a_request_for_a_failed_stage_is_retryable_if_the_stage_is_tried_again(retry_after_s: float | None) -> None:
    error = errors.StageUnavailable(FAILED, retry_after_s)
    assert error.retryable == ("is tried again" in str(error)) == (retry_after_s is not None)


def test_the_page_about_requests_has_the_tree_of_errors_and_a_program_that_catches_them() -> None:
    page = (ROOT / "docs" / "requests.md").read_text(encoding="utf-8")
    [section] = re.findall(r"^## Errors\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    tree, program = re.findall(r"^```\w+\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert tree.strip() in str(errors.__doc__)
    assert tree.startswith("OmniError\n")
    assert "└── StageFailed" in tree
    [exported] = re.findall(r"package exports(.*?)The others", section, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", exported)) == {name for name in omni_actors.__all__ if hasattr(errors, name)}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"hello\ninvalid_value: deadline_s.*\n", done.stdout)
