"""Dead jobs of all queues, and those of one grouped by error."""

from tests.support.drive.wait import wait_until
from tests.web.browser.browser import Browser
from tests.web.browser.stage import FAILURES, Stage


def group(browser: Browser, error: str, job_type: str) -> str:
    """The selector of a group."""
    rows = browser.run(
        "return [...document.querySelectorAll('table.rows tbody tr')].map((row) => "
        "[row.cells[1].querySelector('a').innerText, row.cells[2].innerText])"
    )
    return f"table.rows tbody tr:nth-child({rows.index([error, job_type]) + 1})"


def test_all_queues_with_dead_jobs_are_listed_the_most_first(browser: Browser, stage: Stage) -> None:
    browser.open("/dead")
    counts = [int(browser.cells(key)[1]) for key in browser.row_keys()]
    assert counts == sorted(counts, reverse=True)
    assert {"payments", "imports"} <= set(browser.row_keys())
    assert "newsletter" not in browser.row_keys()
    assert browser.cells("payments")[1] == str(len(FAILURES))
    browser.press_button("payments")
    assert browser.path == "/queues/payments/dead"


def test_dead_jobs_are_grouped_by_error_and_type(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/payments/dead")
    counts = browser.texts("table.rows tbody td:first-child")
    assert sum(int(count) for count in counts) == len(FAILURES)
    assert counts == sorted(counts, reverse=True)
    browser.press_button("ConnectionError", group(browser, "ConnectionError", "refund"))
    assert {key.partition("@")[0] for key in browser.row_keys()} == {"order-4000", "order-4002", "order-4004"}


def test_a_group_is_retried_after_a_question_with_its_count(browser: Browser, stage: Stage) -> None:
    queue = stage.queue("bench")
    for number in range(3):
        stage.die("Grouped", "again", id=f"grouped-{number}", type="check")
    other = stage.die("Grouped", "again", id="grouped-other", type="scan")
    failed = stage.counts("bench")["failed"]
    browser.open("/queues/bench/dead")
    browser.press_button("Retry all", group(browser, "Grouped", "check"))
    assert browser.title == "Retry 3 jobs of queue bench?"
    assert stage.counts("bench")["failed"] == failed
    browser.press_button("Retry")
    assert browser.note == "retried 3 jobs of queue bench"
    wait_until(lambda: stage.counts("bench")["failed"] == failed + 3, what="three have failed again")
    browser.open("/queues/bench/dead")
    browser.press_button("Discard all", group(browser, "Grouped", "check"))
    assert browser.title == "Discard 3 jobs of queue bench?"
    browser.press_button("Discard")
    assert {job["id"] for job in queue.dead().jobs if job["error"] == "Grouped"} == {other}
    queue.discard_dead(other)


def test_a_queue_without_dead_jobs_says_so(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/newsletter/dead")
    assert "No job is dead." in browser.text()
