"""Whether the page can be read and used: at every width, with the keyboard, and in both themes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from omni_actors.serve.page.files import read_files
from tests.serve.page.test_browser import enter
from tests.support.chromium import EXECUTABLE, Page, open_page
from tests.support.http_server import Server, Start

pytestmark = pytest.mark.slow
needs_chromium = pytest.mark.skipif(EXECUTABLE is None, reason="there is no Chromium on this machine")

CHAIN = """\
name: a_pipeline_whose_name_is_longer_than_a_phone_is_wide
stages:
  constructor: {engine: echo, accepts: [messages], emits: text}
  a_stage_with_a_very_long_name: {engine: echo, inputs: [constructor]}
  third: {engine: echo, inputs: [a_stage_with_a_very_long_name]}
  fourth: {engine: echo, inputs: [third]}
  fifth: {engine: "tests.support.served_engines:Speaker", accepts: [script], inputs: [fourth], emits: audio}
"""
"""Long names; one of them is that of a property of every object of JavaScript."""
NARROWEST = 120
"""The least width of a stage's box."""
AA = 4.5
"""The least contrast of small text (WCAG 2.1, level AA)."""


@pytest.fixture(scope="module")
def chain(start: Start) -> Iterator[Server]:
    with start("--chaos", config=CHAIN) as server:
        yield server


@pytest.fixture
def page(chain: Server) -> Iterator[Page]:
    with open_page() as page:
        yield page
        assert page.errors == []


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 390, 820, 1024, 1104, 1280, 1920])
def test_nothing_is_wider_than_the_window_and_no_stage_is_squeezed(page: Page, chain: Server, width: int) -> None:
    page.resize(width, 800, phone=width < 500)
    page.open(chain.url)
    page.wait("document.querySelectorAll('.diagram article').length === 5")
    enter(page, "W" * 200)
    page.wait("document.querySelector('.request')")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page fits the window"
    widths = page.evaluate("[...document.querySelectorAll('.diagram article')].map((each) => each.offsetWidth)")
    assert min(widths) >= NARROWEST, widths
    cut = "[...document.querySelectorAll('.diagram article')].filter((each) => each.scrollWidth > each.clientWidth)"
    assert page.evaluate(f"{cut}.length") == 0, "all of a stage is inside its box"
    outside = """[...document.querySelectorAll('button, select, .model, .stage b, .chaos button')].filter((each) => {
      const {left, right} = each.getBoundingClientRect();
      return left < 0 || right > innerWidth;
    }).map((each) => each.innerText)"""
    assert page.evaluate(outside) == []


@needs_chromium
def test_a_dialog_gives_the_focus_back(page: Page, chain: Server) -> None:
    page.open(chain.url)
    page.wait("document.querySelector('.bar button')")
    page.evaluate("document.querySelector('.bar button[aria-label=keys]').focus()")
    page.key("Enter", "Enter", "\r")
    page.wait("document.querySelector('dialog[open]')")
    page.click("dialog header button")
    page.wait("!document.querySelector('dialog')")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "keys"


@needs_chromium
def test_a_page_that_may_not_write_to_the_clipboard_selects_the_text(page: Page, chain: Server) -> None:
    page.open(chain.url)
    page.wait("document.querySelector('.bar button')")
    page.evaluate("void Object.defineProperty(navigator, 'clipboard', {value: undefined})")  # as on http: pages
    page.key("c", "KeyC", "c")
    page.wait("document.querySelector('dialog .code button')")
    page.evaluate("document.querySelector('dialog .code button').click()")  # wherever the layout moves it
    page.wait("document.querySelector('dialog .code button').innerText.startsWith('Selected')")
    assert page.evaluate("getSelection().toString()").startswith("curl -N http://")


def test_a_long_press_of_the_button_to_talk_selects_nothing_on_any_browser() -> None:
    """Safari needs its own names: on an iPhone, a callout would take the finger away."""
    css = read_files()["/page/page.css"][0].decode()
    [rule] = re.findall(r"^\.mic {([^}]*)}", css, re.MULTILINE)
    for line in ("user-select", "-webkit-user-select", "-webkit-touch-callout"):
        assert f" {line}: none;" in rule


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, such as "#1b2023", as WCAG 2.1 defines it."""
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_has_enough_contrast_in_both_themes() -> None:
    css = read_files()["/page/page.css"][0].decode()
    themes = [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in re.findall(r"{([^{}]*--paper:[^{}]*)}", css)
    ]
    assert len(themes) == 3, "light, dark by choice, dark by preference"
    assert themes[1] == themes[2]
    for theme in themes:
        for text in ("ink", "ink-2", "ink-3", "accent", "red"):
            for ground in ("paper", "panel", "sunk"):
                found = contrast(theme[text], theme[ground])
                assert found >= AA, (text, ground, round(found, 2))
        assert contrast(theme["on-accent"], theme["accent"]) >= AA
