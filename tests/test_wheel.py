"""The wheel, built from the sdist: it collides with no package ``ringbuf``, and it works beside one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in ``cwd``, with ``path`` before all that is installed, and return what it wrote."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the build backend that pyproject.toml names."""
    place = tmp_path_factory.mktemp("backend")
    requires = tomllib.loads((SOURCE / "pyproject.toml").read_text())["build-system"]["requires"]
    installed = run("-m", "pip", "install", "--quiet", "--target", place, *requires, cwd=place, path=place)
    assert installed.returncode == 0, installed.stderr
    return place


@pytest.fixture(scope="module")
def unpacked_sdist(backend: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sdist")
    built = run("-m", "hatchling", "build", "-t", "sdist", "-d", place, cwd=SOURCE, path=backend)
    assert built.returncode == 0, built.stderr
    [archive] = place.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(place, filter="data")
    return place / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def site(backend: Path, unpacked_sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the unpacked wheel, and an unrelated package ``ringbuf`` beside it."""
    built = run("-m", "hatchling", "build", "-t", "wheel", cwd=unpacked_sdist, path=backend)
    assert built.returncode == 0, built.stderr
    [wheel] = (unpacked_sdist / "dist").glob("*.whl")
    place = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as file:
        assert {name.partition("/")[0] for name in file.namelist()} == {
            "omni_actors",
            wheel.name.partition("-py3")[0] + ".dist-info",
        }
        file.extractall(place)
    (place / "ringbuf").mkdir()
    (place / "ringbuf" / "__init__.py").write_text("UNRELATED = True\n")
    return place


def test_the_wheel_contains_every_module_of_both_packages(site: Path) -> None:
    expected = {path.relative_to(SOURCE) for path in (SOURCE / "omni_actors").rglob("*.py")}
    expected |= {"omni_actors" / path.relative_to(SOURCE) for path in (SOURCE / "ringbuf").rglob("*.py")}
    assert {path.relative_to(site) for path in (site / "omni_actors").rglob("*.py")} == expected
    assert (site / "omni_actors" / "ringbuf" / "py.typed").exists()
    static = [path for path in (SOURCE / "omni_actors" / "serve" / "page" / "static").rglob("*") if path.is_file()]
    assert {path.name for path in static} >= {"index.html", "preact.LICENSE"}
    assert [path for path in static if not (site / path.relative_to(SOURCE)).exists()] == []


def test_both_packages_import_beside_an_unrelated_ringbuf(site: Path, tmp_path: Path) -> None:
    program = (
        "import omni_actors, omni_actors.ringbuf, ringbuf\n"
        "assert ringbuf.UNRELATED\n"
        "print(omni_actors.__file__, omni_actors.ringbuf.Ring.__module__)"
    )
    done = run("-c", program, cwd=tmp_path, path=site)
    assert done.stdout.split() == [str(site / "omni_actors/__init__.py"), "omni_actors.ringbuf._ring"], done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("ask", "--config", "echo", "hello"), id="workers"),
        pytest.param(("stress", "--simulate", "3", "--seed", "1"), id="simulated workers"),
    ],
)
def test_a_command_runs_beside_an_unrelated_ringbuf(arguments: tuple[str, ...], site: Path, tmp_path: Path) -> None:
    done = run("-m", "omni_actors", *arguments, cwd=tmp_path, path=site)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("statement", ["import ringbuf as rings", "import os, ringbuf", "import ringbuf._ring"])
def test_an_import_that_cannot_be_rewritten_fails_the_build(
    statement: str, backend: Path, unpacked_sdist: Path, tmp_path: Path
) -> None:
    tree = shutil.copytree(unpacked_sdist, tmp_path / "tree")
    (tree / "omni_actors" / "odd.py").write_text(f"\n{statement}\n")
    built = run("-m", "hatchling", "build", "-t", "wheel", cwd=tree, path=backend)
    assert built.returncode != 0
    assert "omni_actors/odd.py:2: this import of ringbuf cannot be rewritten" in built.stderr
