"""A headless Chromium on the pages of one dashboard. Every error that the browser reports is kept for the test."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException, WebDriverException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.support.drive.wait import wait_until

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1280, 900
# Runs in each page before its own scripts.
OBSERVER = """
window.__streams = [];
window.__broken = [];
addEventListener("securitypolicyviolation", (event) => window.__broken.push(
  `CSP ${event.violatedDirective}: ${event.blockedURI || ""} ${event.sample || ""}`));
addEventListener("error", (event) => window.__broken.push(`error: ${event.message}`));
addEventListener("unhandledrejection", (event) => window.__broken.push(`rejection: ${event.reason}`));
for (const name of ["alert", "confirm", "prompt"]) window[name] = () => { window.__hit = name; };
window.EventSource = class extends EventSource {
  constructor(...given) { super(...given); window.__streams.push(this); }
};
"""


def chromium() -> str | None:
    return next((path for name in CHROMIUMS if (path := shutil.which(name))), None)


def start_driver() -> webdriver.Chrome:
    options = Options()
    found = chromium()
    assert found is not None
    options.binary_location = found
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--force-device-scale-factor=1"):
        options.add_argument(argument)
    # Animations of smooth scrolling and blinking carets would make screenshots differ.
    options.add_argument("--disable-smooth-scrolling")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": OBSERVER})
    return driver


def row(key: str) -> str:
    """The selector of a table's row by its data-key."""
    return f"tr[data-key={json.dumps(key)}]"


class Browser:
    BANNER = "main .banner:not([hidden])"

    def __init__(self, driver: webdriver.Chrome, root: str) -> None:
        self.driver = driver
        self.root = root
        self._expected: list[str] = []

    def reset(self) -> None:
        """Removes what the test before has left."""
        for handle in self.driver.window_handles[1:]:
            self.driver.switch_to.window(handle)
            self.driver.close()
        self.driver.switch_to.window(self.driver.window_handles[0])
        self._cdp("Emulation.setScriptExecutionDisabled", value=False)
        self._cdp("Network.clearBrowserCookies")
        self._cdp("Storage.clearDataForOrigin", origin=self.root, storageTypes="local_storage")
        self.resize(WIDTH, HEIGHT)
        self.scheme("light")
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self._expected = []

    def open(self, path: str, **query: Any) -> None:
        self.driver.get(self.root + path + (f"?{urlencode(query)}" if query else ""))

    @property
    def path(self) -> str:
        return str(self.driver.current_url).removeprefix(self.root)

    @property
    def title(self) -> str:
        return self.text("h1")

    @property
    def banner(self) -> str:
        """What the page says is wrong."""
        return self.text(self.BANNER)

    @property
    def note(self) -> str:
        """What the page says about the last action."""
        return self.text("p.note")

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return list(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def has(self, selector: str) -> bool:
        return bool(self.all(selector))

    def text(self, selector: str = "main") -> str:
        """As a reader sees it; empty without such an element. One call: updates replace elements at any time."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.innerText.trim())"
        return list(self.run(script, selector))

    def cells(self, key: str) -> list[str]:
        """The texts of the row of a table with this data-key."""
        return self.texts(f"{row(key)} > *")

    def row_keys(self) -> list[str]:
        """The keys of all rows, in their order."""
        script = "return [...document.querySelectorAll('table.rows tbody tr')].map((row) => row.dataset.key)"
        return list(self.run(script))

    def press_button(self, label: str, within: str = "main") -> None:
        """Clicks the button or link with this label, and waits for the page after it."""
        self.leave(lambda: self.click(label, within))

    def click(self, label: str, within: str = "main") -> None:
        def act() -> None:
            found = [each for each in self.all(f":is({within}) :is(a, button, summary)") if each.text == label]
            assert found, f"no {label!r} in {self.text(within)!r}"
            found[0].click()

        self._repeat(act)

    def _repeat(self, act: Callable[[], object]) -> None:
        """Acts again if a live update has replaced the element meanwhile."""
        for attempt in range(5):
            try:
                act()
                return
            except StaleElementReferenceException:
                if attempt == 4:
                    raise

    def leave(self, act: Callable[[], object]) -> None:
        """Acts, and waits until another page is there."""
        before = self.find("html")
        act()
        wait_until(lambda: self._is_gone(before), what="the page is left")
        wait_until(lambda: self.run("return document.readyState") == "complete", what="the next page is complete")

    def fill(self, selector: str, text: str) -> None:
        def act() -> None:
            field = self.find(selector)
            field.clear()
            field.send_keys(text)

        self._repeat(act)

    def hold(self, selector: str) -> None:
        """Presses the mouse on an element."""
        self._repeat(lambda: ActionChains(self.driver).click_and_hold(self.find(selector)).perform())

    def press(self, *keys: str) -> None:
        """Presses keys, wherever the focus is."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait_for_text(self, text: str, selector: str = "main", seconds: float = 20.0) -> None:
        wait_until(lambda: text in self.text(selector), seconds, f"{selector} shows {text!r}")

    def wait_for_stream(self) -> None:
        """Waits until the page gets live updates."""
        wait_until(lambda: self.run("return __streams.some((each) => each.readyState === 1)"), what="a live page")

    def open_streams(self) -> int:
        return int(self.run("return __streams.filter((each) => each.readyState !== 2).length"))

    def resize(self, width: int, height: int = HEIGHT) -> None:
        """The size of the page: below 500 px, windows do not get smaller."""
        self._cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name: str) -> None:
        """What the system prefers: light or dark."""
        self._cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    @contextmanager
    def without_scripts(self) -> Iterator[None]:
        """Pages run no script of their own; `run` still works."""
        self._cdp("Emulation.setScriptExecutionDisabled", value=True)
        try:
            yield
        finally:
            self._cdp("Emulation.setScriptExecutionDisabled", value=False)

    def expect(self, pattern: str) -> None:
        """This test causes errors in the console which match."""
        self._expected.append(pattern)

    def errors(self) -> list[str]:
        """Unexpected errors since the start of the test: of the console, of scripts, of the content security policy."""
        found = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        found += self.run("return window.__broken ?? []")
        if (hit := self.run("return window.__hit ?? null")) is not None:
            found.append(f"injected script ran: {hit}")
        return [each for each in found if not any(re.search(pattern, each) for pattern in self._expected)]

    def overflow(self) -> list[str]:
        """Elements that make the page wider than its window."""
        found: list[str] = self.run(
            """
            const root = document.documentElement;
            if (root.scrollWidth <= innerWidth) return [];
            return [`page ${root.scrollWidth} of ${innerWidth}`, ...[...document.querySelectorAll("body *")]
              .filter((each) => each.getBoundingClientRect().right > innerWidth + 1 && !each.closest(".scroll, pre"))
              .map((each) => each.outerHTML.slice(0, 120))].slice(0, 6);
            """
        )
        return found

    def _is_gone(self, element: WebElement) -> bool:
        try:
            element.is_enabled()
        except WebDriverException:  # stale, or being replaced
            return True
        return False

    def _cdp(self, command: str, **parameters: Any) -> None:
        self.driver.execute_cdp_cmd(command, parameters)
