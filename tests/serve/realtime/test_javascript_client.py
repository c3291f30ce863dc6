"""OpenAI's own JavaScript client, unchanged. It always uses TLS. Needs node and npm; npm installs the client."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.http_server import WATCHDOG_S, Start

PACKAGES = ("openai@6.49.0", "ws@8.23.0")
CERTIFICATE = Path(__file__).parent.parent / "http" / "certificates" / "server.pem"
PROGRAM = Path(__file__).parent / "client.mjs"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_the_javascript_client_gets_a_spoken_answer(start: Start, tmp_path: Path) -> None:
    install = ["npm", "install", "--no-audit", "--no-fund", "--silent", *PACKAGES]
    subprocess.run(install, cwd=tmp_path, check=True, timeout=WATCHDOG_S)
    shutil.copy(PROGRAM, tmp_path)
    with start("--ssl-certfile", str(CERTIFICATE)) as server:
        ran = subprocess.run(
            ["node", PROGRAM.name, f"{server.url}/v1", "none", "studio"],
            cwd=tmp_path,
            env={**os.environ, "NODE_EXTRA_CA_CERTS": str(CERTIFICATE)},
            capture_output=True,
            text=True,
            timeout=WATCHDOG_S,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {"status": "completed", "transcript": "hello" * 3, "samples": 7200}
