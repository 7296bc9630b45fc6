"""One supervisor with a dashboard and one browser for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.web.browser.browser import Browser, start_driver
from tests.web.browser.stage import Stage, staged


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    with staged() as stage:
        yield stage


@pytest.fixture(scope="session")
def _browser(stage: Stage) -> Iterator[Browser]:
    driver = start_driver()
    try:
        yield Browser(driver, stage.root)
    finally:
        driver.quit()


@pytest.fixture
def browser(_browser: Browser, stage: Stage) -> Iterator[Browser]:
    """The browser. A test fails if it reports an error that the test does not expect."""
    _browser.reset()
    yield _browser
    # So that the failure of one test is not that of the next.
    stage.queue("bench").resume()
    assert _browser.errors() == []
