"""Writes a PNG of every page of the dashboard: `python -m tests.web.browser.screenshots DIRECTORY`.

With --docs only those of the guide, of a machine with a neutral name (needs root).
"""

import argparse
import base64
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from forq.web.display import DASH
from tests.support.drive.wait import wait_until
from tests.web.browser.browser import Browser, start_driver
from tests.web.browser.pages import ERRORS, PAGES, note, question
from tests.web.browser.stage import Stage, staged

SCHEMES = ("light", "dark")
WIDTHS = (1280, 390)
DOC_PAGES = {"/": "dashboard-overview", "/queues/reports/job?id=report-2026-10": "dashboard-job"}
DOC_WIDTH = 1280
DOC_MAX_BYTES = 200_000
DOC_HOST = "worker-1"
# A rate that is not 0.
RATE = re.compile("[1-9][0-9.]*/s")
# Between two jobs in the pictures of the guide.
JOB_SECONDS = 0.03
# Longer pages are cut.
MIN_HEIGHT, MAX_HEIGHT = 480, 3000


def settle(browser: Browser) -> None:
    """Waits until the rates are known, then stops the updates."""
    if browser.has("#pause"):
        wait_until(lambda: browser.text("#live-state") == "live", what="the page is live")
        if browser.path == "/":
            wait_until(lambda: DASH not in browser.text(".tiles"), what="rates are known")
        browser.find("#pause").click()
        browser.run("document.activeElement.blur()")


def shoot(browser: Browser, file: Path, width: int) -> None:
    browser.resize(width, MIN_HEIGHT)
    height = min(MAX_HEIGHT, int(browser.run("return document.documentElement.scrollHeight")))
    browser.resize(width, height)
    # Without a frame between, tables that scroll are sometimes empty in the picture.
    browser.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    answer = browser.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": False})
    file.write_bytes(base64.b64decode(answer["data"]))
    browser.resize(width)


def shoot_all(browser: Browser, stage: Stage, directory: Path) -> None:
    def opened(path: str) -> Callable[[], None]:
        return lambda: browser.open(path)

    pages = {name: opened(path) for path, name in {**PAGES, **ERRORS}.items()}
    pages |= {"question": lambda: question(browser, stage), "note": lambda: note(browser, stage)}
    for name, visit in pages.items():
        visit()
        settle(browser)
        for scheme in SCHEMES:
            browser.scheme(scheme)
            for width in WIDTHS:
                shoot(browser, directory / f"{name}-{scheme}-{width}.png", width)
        browser.scheme("light")
        browser.resize(WIDTHS[0])


def shoot_docs(browser: Browser, stage: Stage, directory: Path) -> None:
    for path, name in DOC_PAGES.items():
        browser.open(path)
        with busy(stage):
            wait_until(lambda: path != "/" or RATE.search(browser.text(".tiles")), what="jobs are done")  # noqa: B023
            file = directory / f"{name}.png"
            shoot(browser, file, DOC_WIDTH)
        assert file.stat().st_size < DOC_MAX_BYTES, f"{file} has {file.stat().st_size} bytes"


@contextmanager
def busy(stage: Stage) -> Iterator[None]:
    """Meanwhile jobs are enqueued."""
    ended = threading.Event()

    def enqueue() -> None:
        client = stage.forq.client()
        while not ended.wait(JOB_SECONDS):
            client.queue("emails").enqueue({"to": "ada@example.com"})
        client.close()

    thread = threading.Thread(target=enqueue)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--docs", action="store_true")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    with staged(for_tests=False, host=DOC_HOST if arguments.docs else None) as stage:
        driver = start_driver()
        try:
            browser = Browser(driver, stage.root)
            browser.reset()
            if arguments.docs:
                shoot_docs(browser, stage, arguments.directory)
            else:
                shoot_all(browser, stage, arguments.directory)
        finally:
            driver.quit()
    print(f"screenshots are in {arguments.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
