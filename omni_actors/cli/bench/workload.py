"""What is asked, and when: the prompts and the arrivals of a run. Everything follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

WORDS = (
    *("time", "year", "day", "world", "life", "hand", "part", "child", "eye", "place", "work", "week", "case", "point"),
    *("home", "water", "room", "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "word"),
    *("business", "issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game"),
)
"""Short common words: most tokenizers have one token for each."""

Arrivals: TypeAlias = Literal["poisson", "constant"]


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a dataset. One field is enough; an endpoint uses the ones that it knows.

    Attributes:
        prompt: A text.
        messages: A conversation, as in OpenAI's API.
        audio: The path of a sound file, relative to the dataset.
    """

    prompt: str = ""
    messages: list[dict[str, Any]] | None = None
    audio: str | None = None


class DatasetError(ValueError):
    """A dataset cannot be used. The message has the file, the line and the reason."""


def read_dataset(path: Path) -> list[Prompt]:
    """Return the prompts of a file.

    path: JSON lines (".jsonl"), each with the fields of ``Prompt``; or a text, each line of which is a prompt. Empty
    lines are left out. Raises DatasetError, OSError.
    """
    is_json = path.suffix == ".jsonl"
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):  # a line may hold U+2028
        if not line.strip():
            continue
        try:
            prompt = msgspec.json.decode(line, type=Prompt) if is_json else Prompt(line)
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{path}:{number}: {error}") from error
        if prompt.audio is not None:
            prompt = msgspec.structs.replace(prompt, audio=str(path.parent / prompt.audio))
            if not Path(str(prompt.audio)).is_file():
                raise DatasetError(f"{path}:{number}: audio: there is no file {prompt.audio}")
        if prompt == Prompt():
            raise DatasetError(f"{path}:{number}: accepted are prompt, messages and audio; at least one of them")
        prompts.append(prompt)
    if not prompts:
        raise DatasetError(f"{path}: there is no prompt in it")
    return prompts


def made_prompts(shortest: int, longest: int, seed: int) -> Iterator[Prompt]:
    """Yield prompts of ``shortest`` to ``longest`` words, all different: no server answers one from a cache."""
    chance = random.Random(seed)
    number = 0
    while True:
        words = chance.choices(WORDS, k=chance.randint(shortest, longest) - 1)
        yield Prompt(" ".join([f"{seed}-{number}:", *words]))
        number += 1


def repeated(prompts: list[Prompt], seed: int) -> Iterator[Prompt]:
    """Yield the prompts of a dataset in a random order, again and again."""
    chance = random.Random(seed)
    while True:
        yield from chance.sample(prompts, len(prompts))


def arrival_times(kind: Arrivals, rate: float, seed: int) -> Iterator[float]:
    """Yield the times at which requests are due, in seconds from the start.

    kind: "poisson": the gaps are exponentially distributed, as those of many independent clients; "constant": they are
    equal. rate: requests per second.
    """
    chance = random.Random(seed)
    due = 0.0
    while True:
        yield due
        due += chance.expovariate(rate) if kind == "poisson" else 1 / rate
