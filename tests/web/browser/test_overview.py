"""The overview: problems, totals, the table of queues, the supervisors."""

from tests.support.drive.wait import wait_until
from tests.web.browser.browser import Browser, row
from tests.web.browser.stage import FAILURES, WAITING, Stage


def test_the_overview_shows_problems_first_and_links_them(browser: Browser, stage: Stage) -> None:
    browser.open("/")
    problems = browser.texts(".problems li")
    assert any("legacy is config_error" in problem and "no_such_module" in problem for problem in problems)
    dead = next(problem for problem in problems if problem.startswith("queue payments"))
    assert dead == f"queue payments has {len(FAILURES)} dead jobs"
    serious = browser.run("return [...document.querySelectorAll('.problems li')].map((each) => each.className)")
    assert serious == sorted(serious, key=lambda tone: tone != "bad")
    assert browser.run("return document.querySelector('main section').className") == "problems"
    browser.press_button("queue payments has 9 dead jobs")
    assert browser.path == "/queues/payments/dead"


def test_the_overview_shows_every_queue_with_its_state_and_counts(browser: Browser, stage: Stage) -> None:
    browser.open("/")
    known = {queue["name"]: queue for queue in stage.forq.status()["queues"]}
    wait_until(lambda: browser.row_keys() == sorted(known), what="the queues of the supervisor")
    assert browser.cells("newsletter")[1:3] == ["paused", str(WAITING)]
    assert browser.cells("legacy")[1] == "config_error"
    assert browser.cells("payments")[6] == str(len(FAILURES))
    assert browser.cells("reports")[3] == "2"
    total = sum(queue["waiting"] for queue in known.values())
    assert browser.text(".tiles dd") == f"{total:,}"


def test_the_overview_sorts_and_filters(browser: Browser, stage: Stage) -> None:
    browser.open("/")
    browser.press_button("Waiting")
    assert browser.path == "/?order=waiting"
    assert browser.row_keys()[0] == "newsletter"
    assert browser.text("th[aria-sort]") == "Waiting"
    browser.press_button("Dead")
    dead = [int(browser.cells(key)[6]) for key in browser.row_keys()]
    assert dead == sorted(dead, reverse=True)
    assert dead[0] >= len(FAILURES)
    browser.fill("#find", "mail")
    browser.press_button("Search")
    assert browser.row_keys() == ["emails"]
    assert browser.text("th[aria-sort]") == "Dead"
    browser.fill("#find", "nothing of this name")
    browser.press_button("Search")
    assert "No queue has “nothing of this name” in its name" in browser.text()
    browser.press_button("All queues")
    assert browser.path == "/"


def test_the_overview_shows_the_supervisor_and_its_capacity(browser: Browser, stage: Stage) -> None:
    wait_until(lambda: stage.client.supervisors(), what="a heartbeat")
    browser.open("/")
    browser.wait_for_text(str(stage.forq.pid), "section[aria-labelledby=hosts-title]")
    assert "of 1,000 units in use" in browser.text()


def test_each_queue_of_the_overview_is_a_link(browser: Browser, stage: Stage) -> None:
    browser.open("/")
    browser.press_button("emails", row("emails"))
    assert browser.path == "/queues/emails"
    assert browser.title == "emails"
