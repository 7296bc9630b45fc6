"""Without JavaScript: pages are complete, actions are plain forms."""

from collections.abc import Iterator

import pytest

from tests.support.drive.wait import wait_until
from tests.web.browser.browser import Browser, row
from tests.web.browser.pages import PAGES
from tests.web.browser.stage import Stage


@pytest.fixture(autouse=True)
def _no_scripts(browser: Browser) -> Iterator[None]:
    with browser.without_scripts():
        yield


def test_every_page_is_readable(browser: Browser, stage: Stage) -> None:
    for path in PAGES:
        browser.open(path)
        assert browser.title, path
        assert len(browser.text()) > len(browser.title) + 10, path
        assert not browser.find(".tools").is_displayed(), "scripts are not off"


def test_the_overview_filters_and_leads_to_a_queue(browser: Browser, stage: Stage) -> None:
    browser.open("/")
    browser.fill("#find", "pay")
    browser.press_button("Search")
    assert browser.row_keys() == ["payments"]
    browser.press_button("payments", row("payments"))
    assert browser.path == "/queues/payments"


def test_a_queue_is_paused_and_resumed(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/bench")
    browser.press_button("Pause")
    assert browser.note == "paused queue bench"
    assert stage.counts("bench")["paused"]
    browser.press_button("Resume")
    assert not stage.counts("bench")["paused"]


def test_a_job_is_killed_after_a_question(browser: Browser, stage: Stage) -> None:
    job, _ = stage.hang(lines=["said before"])
    browser.open("/queues/bench/job", id=job)
    assert "said before" in browser.text("section[aria-labelledby=log-title]")
    browser.press_button("Stack")
    assert "hang" in browser.text("section[aria-labelledby=stack-title] pre")
    browser.press_button("Kill")
    browser.press_button("Kill")
    assert browser.note == "killed 1 job"
    assert stage.counts("bench")["active"] == 0


def test_dead_jobs_are_searched_selected_retried_and_discarded(browser: Browser, stage: Stage) -> None:
    ids = [stage.die("Plain", id=f"plain-{number}") for number in range(3)]
    failed = stage.counts("bench")["failed"]
    browser.open("/queues/bench/jobs", state="dead")
    browser.fill("main input[name=error]", "Plain")
    browser.press_button("Search")
    assert len(browser.row_keys()) == 3
    browser.find(f"{row(browser.row_keys()[0])} input").click()
    browser.press_button("Retry")
    assert browser.note == "retried 1 job"
    wait_until(lambda: stage.counts("bench")["failed"] == failed + 1, what="it has failed again")
    browser.open("/queues/bench/jobs", state="dead", error="Plain")
    browser.find("input[name=which][value=matching]").click()
    browser.press_button("Discard")
    assert browser.title == "Discard 3 jobs of queue bench?"
    browser.press_button("Discard")
    assert {each["id"] for each in stage.queue("bench").dead().jobs}.isdisjoint(ids)


def test_an_option_is_changed(browser: Browser, stage: Stage) -> None:
    for value in ("5", "0"):
        browser.open("/queues/bench/options")
        browser.fill("#option-max_retries", value)
        browser.press_button("Save changed options")
        assert stage.forq.call("queue.options", name="bench")["options"]["max_retries"] == int(value)


def test_a_schedule_is_triggered(browser: Browser, stage: Stage) -> None:
    done = stage.counts("emails")["done"]
    browser.open("/schedules")
    browser.press_button("Trigger", row("emails/digest"))
    assert browser.note.startswith("triggered schedule digest")
    wait_until(lambda: stage.counts("emails")["done"] == done + 1, what="its job is done")


def test_a_job_is_found_by_id(browser: Browser, stage: Stage) -> None:
    browser.open("/processes")
    browser.fill("#find-job", "large")
    browser.leave(lambda: browser.press("\ue007"))
    assert browser.row_keys() == ["uploads"]


def test_a_queue_is_drained_and_restarted(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/bench")
    browser.press_button("Drain")
    assert browser.note.startswith("draining queue bench")
    wait_until(lambda: stage.forq.queue_status("bench")["state"] == "running", what="drained")
    before = stage.forq.child("bench")["pid"]
    browser.open("/queues/bench")
    browser.press_button("Restart")
    assert browser.note == "restarted the processes of queue bench"
    stage.forq.wait_for_child("bench", not_pid=before)


def test_scheduled_jobs_run_now_and_are_cancelled(browser: Browser, stage: Stage) -> None:
    first, second = (stage.queue("bench").enqueue(None, run_in=3600) for _ in range(2))
    browser.open("/queues/bench/job", id=first)
    browser.press_button("Run now")
    assert browser.note == "made ready 1 job"
    wait_until(lambda: stage.state("bench", first) == "done", what="it ran")
    browser.open("/queues/bench/job", id=second)
    browser.press_button("Cancel")
    assert browser.note == "cancelled 1 job"
    assert stage.counts("bench")["scheduled"] == 0


def test_a_schedule_is_paused_and_resumed(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/emails/schedule", key="clean-up")
    browser.press_button("Pause")
    assert browser.note == "paused schedule clean-up of queue emails"
    browser.press_button("Resume")
    assert browser.note == "resumed schedule clean-up of queue emails"


def test_a_batch_is_cancelled(browser: Browser, stage: Stage) -> None:
    stage.queue("bench").pause()
    with stage.client.batch("bench", id="plain") as batch:
        batch.enqueue("bench", {}, id="plain-0")
    browser.open("/queues/bench/batch", id="plain")
    browser.press_button("Cancel")
    browser.press_button("Cancel batch")
    assert browser.note == "cancelled 1 job of batch plain"
    stage.queue("bench").resume()
