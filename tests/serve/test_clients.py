"""Clients that are built on OpenAI's own, used as their documentation says, with only the address changed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.support.http_server import NO_TLS, WATCHDOG_S, Server

pytestmark = pytest.mark.slow  # each of them takes seconds to import


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]
    warm: bool


@pytest.fixture
def address(writer: Server) -> dict[str, Any]:
    return {"base_url": f"http://127.0.0.1:{writer.port}/v1", "api_key": "none"}


@pytest.fixture
def arguments(address: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The address, and connections that the test closes."""
    with httpx.Client(timeout=WATCHDOG_S, verify=NO_TLS) as connections:
        yield {**address, "http_client": connections}


def langchain(arguments: dict[str, Any], **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="writer", max_tokens=200, **arguments, **more)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_an_object(arguments: dict[str, Any], method: str) -> None:
    found = langchain(arguments).with_structured_output(Weather, method=method).invoke("Is it warm in Rome?")
    assert isinstance(found, Weather)


def test_langchain_streams_with_log_probabilities(arguments: dict[str, Any]) -> None:
    chat = langchain(arguments, logprobs=True, top_logprobs=2, seed=3, temperature=1.0)
    whole = chat.invoke("Hello")
    assert len(whole.response_metadata["logprobs"]["content"]) == whole.usage_metadata["output_tokens"] == 200
    assert "".join(chunk.content for chunk in chat.stream("Hello")) == whole.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_an_object_of_the_responses_api(arguments: dict[str, Any], method: str) -> None:
    chat = langchain(arguments, use_responses_api=True)
    assert isinstance(chat.with_structured_output(Weather, method=method).invoke("Is it warm in Rome?"), Weather)


def test_langchain_streams_and_continues_a_response(arguments: dict[str, Any]) -> None:
    chat = langchain(arguments, use_responses_api=True, temperature=0.0)
    whole = chat.invoke("Hello")
    assert whole.usage_metadata["output_tokens"] == 200
    assert "".join(chunk.text for chunk in chat.stream("Hello")) == whole.text
    assert chat.invoke("Again", previous_response_id=whole.response_metadata["id"]).text


def test_langchain_embeds(arguments: dict[str, Any]) -> None:
    """It sends token ids of OpenAI's tokenizer unless it is told not to."""
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(model="writer", check_embedding_ctx_length=False, **arguments)
    first, second = embeddings.embed_documents(["the sea", "the fox"])
    assert len(first) == len(second) == 32
    assert embeddings.embed_query("the sea") == pytest.approx(first, abs=1e-5)


@pytest.mark.parametrize("output", ["tool", "native"])
def test_pydantic_ai_gets_an_object(address: dict[str, Any], output: str) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def ask() -> Any:
        async with openai.AsyncOpenAI(**address) as client:
            model = OpenAIChatModel("writer", provider=OpenAIProvider(openai_client=client))
            agent: Any = Agent(model, output_type=ToolOutput(Weather) if output == "tool" else NativeOutput(Weather))
            return await agent.run("Is it warm in Rome?", model_settings={"max_tokens": 200})

    result = asyncio.run(ask())
    assert isinstance(result.output, Weather)
    assert result.usage.output_tokens > 0


@pytest.mark.parametrize("output", ["tool", "native"])
def test_pydantic_ai_gets_an_object_of_the_responses_api(address: dict[str, Any], output: str) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def ask() -> Any:
        async with openai.AsyncOpenAI(**address) as client:
            model = OpenAIResponsesModel("writer", provider=OpenAIProvider(openai_client=client))
            agent: Any = Agent(model, output_type=ToolOutput(Weather) if output == "tool" else NativeOutput(Weather))
            return await agent.run("Is it warm in Rome?", model_settings={"max_tokens": 200})

    assert isinstance(asyncio.run(ask()).output, Weather)
