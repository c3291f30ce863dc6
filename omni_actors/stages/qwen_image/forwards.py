"""Which requests share a forward of the transformer, so that a step costs least.

The rows of a forward are padded to the longest picture and the longest prompt, and padding costs as much as tokens do.
A forward of its own costs something too. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

FORWARD = 64
"""What a forward costs besides its tokens, in tokens. Layers of small pictures cost the same whatever they compute, so
small pictures of different sizes share a forward. A picture of a megapixel has 4096 tokens, and few of another size
share its forward."""


class Need(NamedTuple):
    """What a request adds to a forward. rows: two, if it has a companion. image, text: tokens of its longest row."""

    rows: int
    image: int
    text: int


@lru_cache(maxsize=64)  # the same requests take many steps together
def forwards(needs: tuple[Need, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the forwards of a step, each as the positions of its requests in ``needs``.

    Of the divisions that keep requests in the order of their lengths, it is the one that costs least.
    """
    order = sorted(range(len(needs)), key=lambda n: (needs[n].image, needs[n].text))
    ways: list[tuple[int, tuple[tuple[int, ...], ...]]] = [(0, ())]
    """The cheapest division of the first n requests, for each n."""
    for end in range(1, len(order) + 1):
        found = []
        for begin, (cost, division) in enumerate(ways):
            members = order[begin:end]
            found.append((cost + _cost([needs[n] for n in members]), (*division, tuple(sorted(members)))))
        ways.append(min(found))
    return ways[-1][1]


def _cost(needs: Sequence[Need]) -> int:
    """Return what one forward of these requests costs, in tokens."""
    longest = max(need.image for need in needs) + max(need.text for need in needs)
    return FORWARD + longest * sum(need.rows for need in needs)
