"""The lists of jobs: states, search, parts, selection, actions on selected and on matching jobs."""

import pytest

from tests.support.drive.wait import wait_until
from tests.web.browser.browser import Browser, row
from tests.web.browser.stage import WAITING, Stage, utc_minute


@pytest.mark.parametrize(
    ("queue", "state", "job"),
    [
        ("reports", "active", "report-2026-10"),
        ("reminders", "scheduled", "reminder-0"),
        ("webhooks", "retry", "hook-1"),
        ("webhooks", "waiting", "hook-3"),
        ("reports", "blocked", "report-2026-11"),
        ("reports", "held", "report-2026"),
        ("imports", "dead", "import-7"),
        ("emails", "done", "welcome-42"),
    ],
)
def test_each_state_has_a_list(browser: Browser, stage: Stage, queue: str, state: str, job: str) -> None:
    browser.open(f"/queues/{queue}")
    browser.press_button("Kept" if state == "done" else state.capitalize(), ".tiles")
    assert browser.title == f"{queue} {state} jobs"
    assert browser.text(".tabs [aria-current]").split()[0] == state
    assert any(key.startswith(job) for key in browser.row_keys())


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("id", "order-4003", {"order-4003"}),
        ("identifier", "customer-1", {"order-4001", "order-4005"}),
        ("type", "refund", {f"order-{number}" for number in range(4000, 4009, 2)}),
        ("error", "CardDeclined", {"order-4005", "order-4006", "order-4007"}),
        ("error", "nothing like it", set()),
    ],
)
def test_search(browser: Browser, stage: Stage, field: str, value: str, found: set[str]) -> None:
    browser.open("/queues/payments/jobs", state="dead")
    browser.fill(f"main input[name={field}]", value)
    browser.press_button("Search")
    assert {key.partition("@")[0] for key in browser.row_keys()} == found
    assert browser.find(f"main input[name={field}]").get_attribute("value") == value
    browser.press_button("Clear")
    assert len(browser.row_keys()) == 9


def test_search_by_time(browser: Browser, stage: Stage) -> None:
    died = float(stage.queue("payments").dead().jobs[0]["died_at"])
    browser.open("/queues/payments/jobs", state="dead", since=utc_minute(died - 3600), until=utc_minute(died + 120))
    assert len(browser.row_keys()) == 9
    browser.open("/queues/payments/jobs", state="dead", until=utc_minute(died - 3600))
    assert browser.row_keys() == []
    browser.expect("status of 400")
    browser.open("/queues/payments/jobs", state="dead", since="yesterday")
    assert "since = 'yesterday' is not allowed" in browser.text()


def test_a_long_list_has_parts(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/newsletter/jobs", state="waiting")
    seen = set(browser.row_keys())
    pages = 1
    while "Next" in browser.texts(".pages a"):
        browser.press_button("Next")
        assert seen.isdisjoint(browser.row_keys())
        seen |= set(browser.row_keys())
        pages += 1
    assert len(seen) == WAITING
    assert pages == 3


def test_selected_jobs_are_cancelled_and_no_others(browser: Browser, stage: Stage) -> None:
    queue = stage.queue("bench")
    ids = [queue.enqueue(None, id=f"later-{number}", run_in=3600) for number in range(4)]
    browser.open("/queues/bench/jobs", state="scheduled")
    for job in ids[:2]:
        browser.find(f"{row(job)} input").click()
    assert browser.run("return document.querySelector('#all').indeterminate")
    browser.press_button("Cancel")
    assert browser.note == "cancelled 2 jobs"
    assert set(browser.row_keys()) == set(ids[2:])
    assert [job["id"] for job in queue.jobs("scheduled").jobs] == ids[2:]
    browser.find("#all").click()
    browser.press_button("Cancel")
    assert stage.counts("bench")["scheduled"] == 0


def test_scheduled_jobs_run_now(browser: Browser, stage: Stage) -> None:
    job = stage.queue("bench").enqueue(None, run_in=3600)
    browser.open("/queues/bench/jobs", state="scheduled")
    browser.find(f"{row(job)} input").click()
    browser.press_button("Run now")
    assert browser.note == "made ready 1 job"
    wait_until(lambda: stage.state("bench", job) == "done", what="the job ran")


def test_no_selection_is_an_error_that_says_so(browser: Browser, stage: Stage) -> None:
    job = stage.queue("bench").enqueue(None, run_in=3600)
    browser.expect("status of 400")
    browser.open("/queues/bench/jobs", state="scheduled")
    browser.press_button("Cancel")
    assert "no job is selected" in browser.banner
    assert stage.queue("bench").cancel(job)


def test_matching_dead_jobs_are_counted_first_then_retried(browser: Browser, stage: Stage) -> None:
    wanted = [stage.die("Wanted", id=f"match-{number}") for number in range(3)]
    other = stage.die("Other", id="match-not")
    browser.open("/queues/bench/jobs", state="dead", error="Wanted")
    browser.find("input[name=which][value=matching]").click()
    browser.press_button("Discard")
    assert browser.title == "Discard 3 jobs of queue bench?"
    browser.press_button("Discard")
    assert browser.note == "discarded 3 jobs of queue bench"
    left = {job["id"] for job in stage.queue("bench").dead().jobs}
    assert left.isdisjoint(wanted)
    assert other in left
    stage.queue("bench").discard_dead(other)


def test_all_waiting_jobs_are_cancelled_after_a_question(browser: Browser, stage: Stage) -> None:
    queue = stage.queue("bench")
    queue.pause()
    queue.enqueue_many(range(120))
    browser.open("/queues/bench/jobs", state="waiting")
    browser.find("input[name=which][value=matching]").click()
    browser.press_button("Cancel")
    assert browser.title == "Cancel 120 jobs of queue bench?"
    browser.press_button("Back")
    assert stage.counts("bench")["waiting"] == 120
    browser.find("input[name=which][value=matching]").click()
    browser.press_button("Cancel")
    browser.press_button("Cancel")
    assert browser.note == "cancelled 120 jobs of queue bench"
    assert stage.counts("bench")["waiting"] == 0
    queue.resume()
