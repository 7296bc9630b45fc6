"""The schedules of all queues, and the page of one."""

from typing import Any

from tests.support.drive.wait import wait_until
from tests.web.browser.browser import Browser, row
from tests.web.browser.stage import Stage


def schedule(stage: Stage, key: str) -> Any:
    return next(each for each in stage.queue("emails").schedules() if each["key"] == key)


def test_all_schedules_are_listed_with_rule_and_next_tick(browser: Browser, stage: Stage) -> None:
    browser.open("/schedules")
    assert {"emails/digest", "emails/clean-up", "emails/old-report"} <= set(browser.row_keys())
    assert "30 7 * * 1-5" in browser.cells("emails/digest")[2]
    assert browser.cells("emails/digest")[3].startswith("in ")
    assert browser.cells("emails/old-report")[3] == "paused"
    browser.fill("#find", "clean")
    browser.press_button("Search")
    assert browser.row_keys() == ["emails/clean-up"]


def test_a_schedule_shows_its_next_ticks_and_its_data_on_demand(browser: Browser, stage: Stage) -> None:
    browser.open("/schedules")
    browser.press_button("digest")
    assert browser.title == "Schedule digest"
    assert "Europe/Berlin" in browser.text(".facts")
    ticks = browser.texts("main ol li")
    assert len(ticks) == 5
    assert all("07:30" in tick for tick in ticks)
    browser.press_button("Show data")
    assert '"template": "digest"' in browser.text("main pre")


def test_a_schedule_is_paused_and_resumed(browser: Browser, stage: Stage) -> None:
    browser.open("/schedules")
    browser.press_button("Pause", row("emails/clean-up"))
    assert browser.note == "paused schedule clean-up of queue emails"
    assert schedule(stage, "clean-up")["paused"]
    browser.open("/queues/emails/schedule", key="clean-up")
    browser.press_button("Resume")
    assert browser.note == "resumed schedule clean-up of queue emails"
    assert not schedule(stage, "clean-up")["paused"]
    assert browser.path.startswith("/queues/emails/schedule?key=clean-up")


def test_a_schedule_is_triggered(browser: Browser, stage: Stage) -> None:
    done = stage.counts("emails")["done"]
    runs = schedule(stage, "clean-up")["runs"]
    browser.open("/queues/emails")
    browser.press_button("Trigger", row("emails/clean-up"))
    assert browser.note.startswith("triggered schedule clean-up of queue emails: job ")
    wait_until(lambda: stage.counts("emails")["done"] == done + 1, what="its job is done")
    assert schedule(stage, "clean-up")["runs"] >= runs
