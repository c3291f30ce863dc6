"""Which requests share a forward: a function of their numbers of rows and tokens."""

from __future__ import annotations

import pytest

from omni_actors.stages.qwen_image.forwards import FORWARD, Need, forwards


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        ([16], [(0,)]),
        ([16, 16, 16], [(0, 1, 2)]),
        ([16, 24, 24, 16], [(0, 1, 2, 3)]),  # 16 tokens of padding cost less than a forward
        ([100, 100 + FORWARD - 1], [(0, 1)]),
        ([100, 100 + FORWARD + 1], [(0,), (1,)]),
        ([100] * 4 + [120], [(0, 1, 2, 3), (4,)]),  # padding four rows costs more
        ([100] + [120] * 4, [(0, 1, 2, 3, 4)]),
        ([4096, 1024, 4096, 1040], [(1, 3), (0, 2)]),
        ([4096, 16, 1024], [(1,), (2,), (0,)]),
    ],
)
def test_pictures_of_different_sizes_share_a_forward_if_padding_costs_less(
    images: list[int], expected: list[tuple[int, ...]]
) -> None:
    assert [*forwards(tuple(Need(1, image, 8) for image in images))] == expected


def test_the_padding_of_companions_and_of_prompts_counts() -> None:
    small, large = Need(2, 100, 8), Need(1, 140, 8)
    assert [*forwards((small, large))] == [(0,), (1,)]
    assert [*forwards((small._replace(rows=1), large))] == [(0, 1)]
    assert [*forwards((Need(1, 100, 8), Need(1, 100, 9 + FORWARD)))] == [(0,), (1,)]
