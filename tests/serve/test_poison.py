"""Clients that repeat a request that crashes its worker, beside clients that ask normally."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai

from tests.support.http_server import WATCHDOG_S, Server, Start

POISONERS, OTHERS, ROUNDS = 50, 8, 5
POISON = "a deadly word"


def speak(client: openai.OpenAI, text: str) -> int:
    return len(client.audio.speech.create(model="studio", voice="any", input=text, response_format="pcm").content)


def send_poison(server: Server) -> openai.APIStatusError | None:
    """Send the poison with the client's default retries. Return the error that the client gets."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=2 * WATCHDOG_S) as client:
        try:
            speak(client, POISON)
        except openai.APIStatusError as error:
            return error
    return None


def ask_normally(server: Server, number: int) -> list[int]:
    with server.openai() as client:
        return [speak(client, " ".join(["word"] * (1 + number))) for _ in range(ROUNDS)]


def test_fifty_clients_that_send_poison_cost_other_clients_no_answer(start: Start) -> None:
    with (
        start("-s", "stages.mouth.options.step_s=0.01", "-s", "stages.mouth.deterministic=true") as server,
        ThreadPoolExecutor(POISONERS + OTHERS) as pool,
    ):
        with server.openai() as client:
            sizes = [speak(client, " ".join(["word"] * (1 + number))) for number in range(OTHERS)]
        poisoners = [pool.submit(send_poison, server) for _ in range(POISONERS)]
        others = [pool.submit(ask_normally, server, number) for number in range(OTHERS)]
        for number, each in enumerate(others):
            assert each.result(2 * WATCHDOG_S) == [sizes[number]] * ROUNDS
        errors = [each.result(2 * WATCHDOG_S) for each in poisoners]
        for error in errors:
            assert error is not None
            assert (error.status_code, error.response.headers["x-should-retry"]) == (422, "false")
            assert error.code in ("stage_crashed", "quarantined")
        server.wait(lambda: server.status() == "ready", "the last restart")
        restarts = server.http.get("/health").json()["stages"]["mouth"][0]["restarts"]
        assert restarts <= 4, "fifty equal requests cost the deaths of one"
        with server.openai() as client:
            assert speak(client, "word") == sizes[0]
        error = send_poison(server)
        assert error is not None
        assert error.code == "quarantined"
        assert server.http.get("/health").json()["stages"]["mouth"][0]["restarts"] == restarts
