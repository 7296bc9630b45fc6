"""axe-core on every page, in both themes and two widths; and no page is wider than its window."""

import pytest

from tests.support.thorough import examples
from tests.web.browser.axe import violations
from tests.web.browser.browser import Browser
from tests.web.browser.pages import ERRORS, MISSING, PAGES, note, question
from tests.web.browser.stage import Stage

WIDTHS = (390, 768, 1280, 1920)
# All four combinations if thorough.
LOOKS = [(1280, "light"), (390, "dark"), (1280, "dark"), (390, "light")][: examples(2, 4)]


def assert_fits_and_is_accessible(browser: Browser, where: str) -> None:
    # An update would replace elements under the eyes of axe.
    if browser.has("#pause") and browser.text("#live-state") != "paused":
        browser.find("#pause").click()
    for width in WIDTHS:
        browser.resize(width)
        assert browser.overflow() == [], f"{where} at {width}"
    for width, scheme in LOOKS:
        browser.resize(width)
        browser.scheme(scheme)
        assert violations(browser) == [], f"{where} at {width}, {scheme}"
    browser.scheme("light")


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_accessible_and_fits(browser: Browser, stage: Stage, path: str) -> None:
    browser.open(path)
    assert_fits_and_is_accessible(browser, path)


@pytest.mark.parametrize("path", ERRORS)
def test_an_error_page_is_accessible_and_fits(browser: Browser, stage: Stage, path: str) -> None:
    browser.expect(MISSING)
    browser.open(path)
    assert_fits_and_is_accessible(browser, path)


def test_questions_notes_and_the_help_are_accessible_and_fit(browser: Browser, stage: Stage) -> None:
    question(browser, stage)
    assert_fits_and_is_accessible(browser, "question")
    note(browser, stage)
    assert_fits_and_is_accessible(browser, "note")
    browser.find("#help").click()
    assert_fits_and_is_accessible(browser, "help")
