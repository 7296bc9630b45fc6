"""Runs axe-core, which checks a page for accessibility. Its script comes with a package (make test-web)."""

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tests.web.browser.browser import Browser

PACKAGE = "axe_playwright_python"
SERIOUS = ("serious", "critical")


@cache
def script() -> str:
    # Not imported: that would need Playwright.
    spec = find_spec(PACKAGE)
    assert spec is not None, f"{PACKAGE} is not installed: make test-web installs it"
    assert spec.origin is not None
    return Path(spec.origin).with_name("axe.min.js").read_text()


def violations(browser: Browser) -> list[str]:
    """The serious ones of the present page: rule, element and reason."""
    browser.run(script())
    answer = browser.driver.execute_async_script(
        """
        const done = arguments[arguments.length - 1];
        axe.run(document, { resultTypes: ["violations"] }).then(
          (found) => done(JSON.stringify(found.violations)), (error) => done(JSON.stringify([{ id: String(error) }])));
        """
    )
    found = json.loads(answer)
    return [
        f"{each['id']} ({each.get('impact')}): {node['html'][:160]}: {node.get('failureSummary', '')[:300]}"
        for each in found
        if each.get("impact") in (*SERIOUS, None)
        for node in each.get("nodes", [{"html": ""}])
    ]
