"""Clients that repeat a request that crashes its worker, beside clients that ask normally."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.support.http_server import NO_TLS, WATCHDOG_S, Server, Start

POISON = "a deadly word"


def speak(client: openai.OpenAI, text: str) -> int:
    return len(client.audio.speech.create(model="studio", voice="any", input=text, response_format="pcm").content)


def send_poison(server: Server) -> openai.APIStatusError | None:
    """Send the poison with the client's default retries. Return the error that the client gets."""
    http = openai.DefaultHttpxClient(verify=NO_TLS)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=2 * WATCHDOG_S, http_client=http) as client:
        try:
            speak(client, POISON)
        except openai.APIStatusError as error:
            return error
    return None


def ask_normally(server: Server, number: int, rounds: int) -> list[int]:
    with server.openai() as client:
        return [speak(client, " ".join(["word"] * (1 + number))) for _ in range(rounds)]


@pytest.mark.parametrize(
    ("poisoners", "others", "rounds"), [(10, 4, 2), pytest.param(50, 8, 5, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_clients_that_send_poison_cost_other_clients_no_answer(
    start: Start, poisoners: int, others: int, rounds: int
) -> None:
    with (
        start("-s", "stages.mouth.options.step_s=0.01", "-s", "stages.mouth.deterministic=true") as server,
        ThreadPoolExecutor(poisoners + others) as pool,
    ):
        with server.openai() as client:
            sizes = [speak(client, " ".join(["word"] * (1 + number))) for number in range(others)]
        poisoning = [pool.submit(send_poison, server) for _ in range(poisoners)]
        asking = [pool.submit(ask_normally, server, number, rounds) for number in range(others)]
        for number, each in enumerate(asking):
            assert each.result(2 * WATCHDOG_S) == [sizes[number]] * rounds
        errors = [each.result(2 * WATCHDOG_S) for each in poisoning]
        for error in errors:
            assert error is not None
            assert (error.status_code, error.response.headers["x-should-retry"]) == (422, "false")
            assert error.code in ("stage_crashed", "quarantined")
        server.wait(lambda: server.status() == "ready", "the last restart")
        restarts = server.http.get("/health").json()["stages"]["mouth"][0]["restarts"]
        assert restarts <= 4, "equal requests cost the deaths of one"
        with server.openai() as client:
            assert speak(client, "word") == sizes[0]
        error = send_poison(server)
        assert error is not None
        assert error.code == "quarantined"
        assert server.http.get("/health").json()["stages"]["mouth"][0]["restarts"] == restarts
