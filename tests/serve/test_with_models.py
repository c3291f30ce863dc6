"""The server on the real pipeline, as OpenAI's own client uses it."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jiwer
import openai
import pytest
import soundfile
import transformers

from omni_actors.stages import assets

pytestmark = [pytest.mark.voice, pytest.mark.slow]

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
IN_FLIGHT = "omni_requests_in_flight"


@pytest.fixture
def client(voice: Any) -> Iterator[openai.OpenAI]:
    with voice.openai() as client:
        yield client


def chat(client: openai.OpenAI, messages: Any = FRANCE, **arguments: Any) -> Any:
    return client.chat.completions.create(**{"model": "voice", "messages": messages, **arguments})


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def seconds(wav: bytes) -> float:
    samples, rate = soundfile.read(io.BytesIO(wav))
    assert rate == 24000
    return float(len(samples) / rate)


def test_a_question_is_answered_whole_and_streamed_alike(client: openai.OpenAI) -> None:
    answer = chat(client)
    [choice] = answer.choices
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 10
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert len(deltas) > 5
    assert "".join(deltas) == choice.message.content
    assert chunks[-1].usage == answer.usage


def test_parameters_reach_the_model(client: openai.OpenAI) -> None:
    cut = chat(client, max_tokens=3)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 3)
    assert chat(client, max_completion_tokens=2).usage.completion_tokens == 2
    stopped = chat(client, stop=[" of", "Paris"]).choices[0].message.content
    assert stopped == "The capital"
    warm = {"temperature": 1.5, "top_p": 0.9, "seed": 7, "max_tokens": 6, "extra_body": {"top_k": 50}}
    assert chat(client, **warm).choices[0].message == chat(client, **warm).choices[0].message


def test_an_answer_is_spoken_whole_and_streamed(client: openai.OpenAI) -> None:
    spoken = {"modalities": ["text", "audio"], "audio": {"format": "wav", "voice": "any"}}
    message = chat(client, **spoken).choices[0].message
    assert "Paris" in message.audio.transcript
    assert 1 < seconds(base64.b64decode(message.audio.data)) < 10
    spoken["audio"] = {"format": "pcm16", "voice": "any"}
    deltas = [chunk.choices[0].delta.audio for chunk in chat(client, stream=True, **spoken)]
    assert "".join(delta.transcript or "" for delta in deltas if delta) == message.audio.transcript
    sound = b"".join(base64.b64decode(delta.data) for delta in deltas if delta and delta.data)
    assert 1 < len(sound) / 2 / 24000 < 10


def test_its_own_speech_is_transcribed_and_answered(client: openai.OpenAI) -> None:
    text = FRANCE[0]["content"]
    wav = client.audio.speech.create(model="voice", voice="any", input=text, response_format="wav").content
    transcripts = client.audio.transcriptions.create(model="voice", file=("question.wav", wav), language="en")
    assert words(transcripts.text) == words(text)
    data = base64.b64encode(wav).decode()
    parts = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]
    assert "Paris" in chat(client, [{"role": "user", "content": parts}]).choices[0].message.content


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the client deprecates translations
def test_times_of_words_lie_in_the_recording_and_subtitles_have_its_text(client: openai.OpenAI) -> None:
    text = FRANCE[0]["content"]
    wav = client.audio.speech.create(model="voice", voice="any", input=text, response_format="wav").content
    file = ("question.wav", wav)
    timed = client.audio.transcriptions.create(
        model="voice", file=file, response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    assert timed.words is not None
    assert timed.segments is not None
    assert [words(each.word) for each in timed.words] == [[word] for word in words(text)]
    assert timed.duration == pytest.approx(seconds(wav), abs=0.01)
    assert 0 <= timed.words[0].start < timed.words[-1].end <= timed.duration
    assert (timed.language, len(timed.segments)) == ("en", 1)
    assert text in client.audio.transcriptions.create(model="voice", file=file, response_format="srt")
    with pytest.raises(openai.BadRequestError, match="knows English only") as caught:
        client.audio.translations.create(model="voice", file=file)
    assert caught.value.param == "model"


def test_a_response_is_streamed_and_continued(client: openai.OpenAI) -> None:
    with client.responses.stream(model="voice", input=FRANCE[0]["content"]) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "Paris" in "".join(deltas) == final.output_text
    again = client.responses.create(model="voice", input="Say it again.", previous_response_id=final.id)
    assert again.usage is not None
    assert final.usage is not None
    assert again.usage.input_tokens > final.usage.total_tokens


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "description": "The time."}}
ROME: Any = {"role": "user", "content": "Is it warm in Rome? Look at its weather."}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("modalities", [["text"], ["text", "audio"]])
def test_a_tool_is_called_and_its_result_taken(client: openai.OpenAI, choice: Any, modalities: Any) -> None:
    """The template of the model does not know tools. A call that must be made is not read out."""
    asked: Any = {"tools": [WEATHER, CLOCK], "tool_choice": choice, "modalities": modalities}
    message = chat(client, [ROME], **asked).choices[0].message
    [call] = message.tool_calls
    assert (call.function.name, message.content, message.audio) == ("weather", None, None)
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Rome", "Oslo")
    streamed = [chunk.choices[0].delta for chunk in chat(client, [ROME], stream=True, **asked)]
    pieces = [each.function.arguments for delta in streamed for each in delta.tool_calls or ()]
    assert json.loads("".join(pieces)) == arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is 31 degrees in Rome."}
    asked |= {"tool_choice": "none", "audio": {"format": "wav", "voice": "any"}}
    answer = chat(client, [ROME, message.model_dump(exclude_none=True), result], **asked).choices[0].message
    assert "31" in (answer.content or answer.audio.transcript)
    assert (answer.audio is not None) == ("audio" in modalities)


def test_a_call_that_the_model_may_make_would_be_read_out(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="would be read out") as refused:
        chat(client, tools=[WEATHER], modalities=["text", "audio"], audio={"format": "wav", "voice": "any"})
    assert refused.value.param == "modalities"
    assert chat(client, tools=[WEATHER]).usage.prompt_tokens > chat(client).usage.prompt_tokens + 50


def test_a_response_calls_a_tool_and_takes_its_result(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "strict": False, **WEATHER["function"]}
    question = ROME["content"]
    first = client.responses.create(model="voice", input=question, tools=[tool], tool_choice="required")
    [call] = first.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "It is 31 degrees in Rome."}
    answer = client.responses.create(model="voice", input=[result], previous_response_id=first.id)
    assert "31" in answer.output_text


def test_a_prompt_without_tools_is_that_of_the_models_own_template(voice: Any) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(assets.resolve("smollm2-135m-instruct"))
    brief = {"role": "system", "content": "Be brief."}
    for messages in (FRANCE, [brief, *FRANCE], [*FRANCE, {"role": "assistant", "content": "Paris."}, ROME]):
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert voice.http.post("/tokenize", json={"messages": messages}).json()["tokens"] == expected


DICTATION = (
    """The capital of France is Paris. Please close the window before you leave the house.
    My brother bought three red apples at the market this morning.
    Water freezes at zero degrees and boils at one hundred.
    The old fisherman rowed his small boat far beyond the harbour.""",
    """She reads a long book every evening after dinner.
    We will meet again next Tuesday at the railway station.
    The children played in the garden until it was dark. Most birds can fly, but some of them prefer to swim.
    He answered the question slowly, with a gentle smile.""",
)


def test_dictation_is_transcribed(client: openai.OpenAI) -> None:
    """Word error rate: (substitutions + deletions + insertions) / words, over all of the text."""
    transcripts = []
    for text in DICTATION:
        speech = client.audio.speech.create(model="voice", voice="heart", input=text, response_format="wav")
        wav = ("speech.wav", speech.content)
        transcripts.append(client.audio.transcriptions.create(model="voice", file=wav).text)
    rate = jiwer.wer(*([" ".join(words(text)) for text in texts] for texts in (DICTATION, transcripts)))
    assert rate <= 0.10, (rate, list(zip(DICTATION, transcripts, strict=True)))


@pytest.mark.parametrize("text", ["...", "\N{GRINNING FACE}", "漢字", "مرحبا بالعالم"])
@pytest.mark.parametrize("format", ["wav", "pcm"])
def test_a_text_without_sound_is_refused_with_what_the_voice_reads(
    client: openai.OpenAI, text: str, format: Any
) -> None:
    with pytest.raises(openai.BadRequestError, match="the voice reads English words") as caught:
        client.audio.speech.create(model="voice", voice="any", input=text, response_format=format)
    assert (caught.value.param, caught.value.code) == ("input", "nothing_to_speak")


def test_speed_shortens_speech(client: openai.OpenAI) -> None:
    def speak(speed: float) -> float:
        request: Any = {"model": "voice", "voice": "any", "input": "It is late.", "response_format": "wav"}
        return seconds(client.audio.speech.create(**request, speed=speed).content)

    assert speak(2.0) < 0.7 * speak(1.0)


@pytest.mark.parametrize("speed", [0.25, 2.0, 4.0])
def test_speech_is_as_fast_as_asked(client: openai.OpenAI, speed: float) -> None:
    """Also beyond the speed at which the voice's phonemes have their shortest duration."""

    def speak(speed: float) -> float:
        text = "Hello there, this is a test of the speech server. It has two sentences."
        request: Any = {"model": "voice", "voice": "any", "input": text, "response_format": "wav"}
        return seconds(client.audio.speech.create(**request, speed=speed).content)

    assert speak(1.0) / speak(speed) == pytest.approx(speed, rel=0.15)


def test_speech_comes_while_it_is_made(voice: Any, client: openai.OpenAI) -> None:
    text = "The sea is wide and deep. " * 100
    before = voice.aborted()
    speech = client.audio.speech.with_streaming_response.create(model="voice", voice="any", input=text)
    with speech as answer:
        pieces = answer.iter_bytes()
        assert len(next(pieces)) > 44
        assert voice.metric(IN_FLIGHT) == 1
    voice.wait_metric(IN_FLIGHT, 0)
    assert voice.aborted() == before + 1


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"messages": [{"role": "user", "content": " "}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages", "context_length_exceeded"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"max_tokens": 2**63}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 2**80}, "max_completion_tokens", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"extra_body": {"repetition_penalty": 1e-38}}, "repetition_penalty", "invalid_value"),
        ({"extra_body": {"top_k": 2**63}}, "top_k", "invalid_value"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"seed": "x"}, "seed", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"extra_body": {"top_k": -2}}, "top_k", "invalid_value"),
        ({"extra_body": {"temprature": 1}}, "temprature", "invalid_value"),
        ({"extra_body": {"speed": 2}}, "speed", "invalid_value"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engines_refuse(
    client: openai.OpenAI, changes: dict[str, Any], param: str, code: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **{"messages": FRANCE, "stream": stream, **changes})
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_of_no_tokens_is_refused_by_the_name_that_was_sent(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{name}: ") as caught:
        chat(client, **{name: 0})
    assert caught.value.param == name


def test_a_speed_that_is_none_and_a_language_that_it_does_not_know(
    client: openai.OpenAI, recording: Callable[..., bytes]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.speech.create(model="voice", voice="any", input="hello", speed=9)
    assert caught.value.param == "speed"
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.transcriptions.create(model="voice", file=("a.wav", recording()), language="xx")
    assert caught.value.param == "language"
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.transcriptions.create(model="voice", file=("a.wav", recording(0.01)))
    assert (caught.value.param, caught.value.code) == ("file", "too_short")


def test_the_terminal_hears_a_spoken_question_and_speaks_the_answer(voice: Any, tmp_path: Path) -> None:
    with voice.openai() as client:
        say = client.audio.speech.create(
            model="voice", voice="heart", input="What is the capital of France?", response_format="wav"
        )
    (tmp_path / "question.wav").write_bytes(say.content)
    chat = [sys.executable, "-m", "omni_actors", "chat", "--url", voice.url, "--temperature", "0"]
    done = subprocess.run(
        [*chat, "-o", tmp_path, "--commands"],
        input=f"/audio {tmp_path / 'question.wav'}\n\n/stats\n",
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "paris" in words(done.stdout)
    assert "TTFA" in done.stderr
    assert seconds((tmp_path / "answer-1.wav").read_bytes()) > 1
