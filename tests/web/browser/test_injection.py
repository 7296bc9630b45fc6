"""Hostile text everywhere that users, jobs or URLs can put some: no page runs it, and none gains an element from it."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.drive.wait import wait_until
from tests.web.browser.browser import Browser
from tests.web.browser.pages import job_path
from tests.web.browser.stage import Stage

SEED = int(os.environ.get("FORQ_TEST_SEED", "0"))
ROUNDS = int(os.environ.get("FORQ_TEST_INJECTIONS", "6"))
# Each marks itself, so that an element made of it is found.
MARKUP = (
    "<script>window.__hit=1</script>",
    "<img src=x onerror=window.__hit=1 data-evil=1>",
    '"><svg/onload=window.__hit=1 data-evil=1>',
    '\'"onfocus=window.__hit=1 autofocus data-evil=1 x="',
    "</title><b data-evil=1>",
    "</textarea></pre></details><i data-evil=1>",
    "<style data-evil=1>*{display:none}</style>",
    "<iframe srcdoc='<script>parent.__hit=1</script>' data-evil=1>",
    "<form data-evil=1><input name=confirmed value=yes>",
    "<!--",
    "<![CDATA[<b data-evil=1>",
    "&lt;b data-evil=1&gt;&#60;b data-evil=1&#62;",
    "{{7*7}}{%print(7*7)%}{#x#}${7*7}#{7*7}<%=7*7%>",
    "{{''.__class__.__mro__[1].__subclasses__()}}",
    "javascript:window.__hit=1",
    "data:text/html,<script>parent.__hit=1</script>",
    "//example.com/\\example.com",
)
SPECIAL = (
    "\u202egnp.exe",
    "\u2066\u2069",
    "\x1b[31mred",
    "\x00\x07\x08",
    "\r\nSet-Cookie: x=1",
    "\ndata: x\n\nevent: update",
    "\ud7ff\ufffd",
    "e\u0301" * 40,
    "\N{PILE OF POO}",
    "\t",
    "a" * 3000,
    "%00%0a%3Cb%3E",
    "../../etc/passwd",
)


def hostile(chance: random.Random, *, ascii_only: bool = False, longest: int = 4000) -> str:
    """A few of these in a row."""
    parts = chance.sample(MARKUP + (() if ascii_only else SPECIAL), chance.randint(1, 3))
    text = "".join(parts)[:longest]
    if ascii_only:
        text = "".join(char for char in text if "!" <= char <= "~")
    return text


def assert_harmless(browser: Browser, where: str) -> None:
    """The page has only elements of its own."""
    found = browser.run(
        """
        const all = (selector) => [...document.querySelectorAll(selector)];
        const evil = all("[data-evil], iframe, object, embed, base, body script, body style");
        const handlers = all("*").filter((each) =>
          [...each.attributes].some(({ name }) => name.startsWith("on") || name === "srcdoc" || name === "style"));
        const target = (each) => ["href", "action", "formaction"].map((name) => each.getAttribute(name)).find(Boolean);
        const links = all("a[href], form[action], button[formaction]").filter((each) =>
          !/^[/#]/.test(target(each)) || new URL(target(each), location).origin !== location.origin);
        return [...evil, ...handlers, ...links].map((each) => each.outerHTML.slice(0, 200));
        """
    )
    assert found == [], where
    assert "49" not in browser.run("return document.title"), where
    assert browser.run("return window.__hit ?? null") is None, where
    # Direction marks could show text in another order than it has.
    marks = browser.run("return document.body.innerText.match(/[\\u202a-\\u202e\\u2066-\\u2069\\u0000-\\u0008]/)")
    assert marks is None, where


def visit(browser: Browser, path: str, **query: str) -> None:
    browser.open(path, **query)
    assert browser.has("main h1"), path
    assert_harmless(browser, f"{path} {query}")


def test_jobs_made_of_hostile_text(
    browser: Browser, stage: Stage, record_property: Callable[[str, object], None]
) -> None:
    record_property("seed", SEED)
    chance = random.Random(SEED)
    queue = stage.queue("hostile")
    for number in range(ROUNDS):
        text = hostile(chance)
        job_id = hostile(chance, ascii_only=True, longest=100) + str(number)
        data = {"lines": [text], "result": {text: [text]}, "more": {text: text}}
        queue.enqueue(data, id=job_id, identifier=text[:1000])
        dead = queue.enqueue({**data, "do": "fail", "error": text, "message": text}, id=f"{job_id}-dead")
        unknown = queue.enqueue(data, id=f"{job_id}-type", type="no:such.type")
        wait_until(lambda: all(stage.state("hostile", each) == "dead" for each in (dead, unknown)), what="dead")  # noqa: B023
        later = queue.enqueue(data, id=f"{job_id}-later", identifier=text[:1000], run_in=3600)
        running, gate = stage.hang(
            "hostile", id=f"{job_id}-running", identifier=text[:1000], text=text[:200], lines=[text]
        )
        Path(f"{gate}.lines").write_text(text.replace("\0", "") + "\n", errors="replace")
        for each in (job_id, dead, later, running):
            visit(browser, job_path("hostile", each))
        visit(browser, "/queues/hostile/job", id=dead, show="data")
        visit(browser, "/queues/hostile/job", id=job_id, show="result")
        visit(browser, "/queues/hostile/job", id=running, show="stack")
        visit(browser, "/queues/hostile")
        browser.wait_for_stream()
        assert_harmless(browser, "after an update")
        visit(browser, "/find", id=job_id)
        gate.touch()
    for state in ("done", "dead", "scheduled", "active"):
        visit(browser, "/queues/hostile/jobs", state=state)
    visit(browser, "/queues/hostile/dead")
    browser.press_button("Retry all", "table.rows tbody tr:first-child")
    assert_harmless(browser, "question")
    visit(browser, "/")
    visit(browser, "/dead")
    visit(browser, "/processes", stack="hostile")
    visit(browser, "/queues/hostile-handler")


def test_schedules_with_hostile_data(browser: Browser, stage: Stage) -> None:
    chance = random.Random(SEED + 1)
    queue = stage.queue("hostile")
    for number in range(3):
        key = f"..key-{number}"
        queue.schedule(key, every="1h", data={hostile(chance): [hostile(chance)]}, type="a:b.c")
        visit(browser, "/queues/hostile/schedule", key=key, show="data")
        queue.unschedule(key)
    visit(browser, "/schedules", find=hostile(chance))


def test_hostile_parameters_of_urls(browser: Browser, stage: Stage) -> None:
    chance = random.Random(SEED + 2)
    browser.expect("status of 4")
    for _ in range(2 * ROUNDS):
        text = hostile(chance, longest=1500)
        path, names = chance.choice(
            [
                ("/", ("find", "order", "page", "note")),
                ("/queues/payments/jobs", ("state", "id", "identifier", "type", "error", "since", "until", "after")),
                ("/queues/payments/job", ("id", "fence", "show")),
                ("/queues/emails/schedule", ("key", "show")),
                ("/find", ("id",)),
                ("/schedules", ("find", "page")),
                ("/processes", ("stack",)),
            ]
        )
        chosen = chance.sample(names, chance.randint(1, min(2, len(names))))
        visit(browser, path, **dict.fromkeys(chosen, text))


@pytest.mark.parametrize("text", ["<b data-evil=1>", "..%2f..", "%00", "{{7*7}}", "javascript:window.__hit=1"])
def test_hostile_paths(browser: Browser, stage: Stage, text: str) -> None:
    browser.expect("status of 4")
    for path in (f"/{text}", f"/queues/{text}", f"/queues/{text}/job?id=x", f"/static/{text}"):
        browser.open(path)
        assert browser.run("return document.querySelector('[data-evil]')") is None, path
        assert "49" not in browser.text("body"), path


def test_hostile_values_of_forms(browser: Browser, stage: Stage) -> None:
    chance = random.Random(SEED + 3)
    browser.expect("status of 4")
    before = stage.forq.call("queue.options", name="hostile")["options"]
    for _ in range(4):
        browser.open("/queues/hostile/options")
        browser.run("document.querySelector('#option-max_retries').value = arguments[0]", hostile(chance))
        browser.run("document.querySelector('input[name=back]').value = arguments[0]", hostile(chance))
        browser.press_button("Save changed options")
        assert_harmless(browser, "refused option")
    assert stage.forq.call("queue.options", name="hostile")["options"] == before


@pytest.mark.parametrize(
    "back", ["//example.com/", "/\\\\example.com", "https://example.com/", "javascript:window.__hit=1"]
)
def test_an_action_never_leads_to_another_site(browser: Browser, stage: Stage, back: str) -> None:
    browser.open("/queues/bench")
    browser.wait_for_text("Pause", "#live .bar")
    # An update would restore the form.
    browser.find("#pause").click()
    browser.run("document.querySelector('main form input[name=back]').value = arguments[0]", back)
    browser.press_button("Pause")
    stage.queue("bench").resume()
    assert browser.driver.current_url.startswith(f"{stage.root}/?note=")
