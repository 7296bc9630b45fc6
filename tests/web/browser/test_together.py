"""Jobs that belong together: what a job waits for, flows and batches."""

from forq.client import new_job
from tests.support.drive.wait import wait_until
from tests.web.browser.browser import Browser
from tests.web.browser.stage import Stage


def test_a_held_job_leads_to_what_it_waits_for_and_back(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/reports/job", id="report-2026")
    assert browser.text(".state") == "held"
    assert "it waits for jobs report-2026-10 and report-2026-11 to be done" in browser.text(".why")
    assert "Waits for 2 jobs, until all are done" in browser.text("#waits-title")
    browser.press_button("report-2026-10", "section[aria-labelledby=waits-title]")
    assert browser.title == "report-2026-10"
    browser.press_button("report-2026", "section[aria-labelledby=dependants-title]")
    assert browser.title == "report-2026"


def test_a_held_job_runs_when_the_other_is_done(browser: Browser, stage: Stage) -> None:
    first, gate = stage.hang()
    job = stage.queue("bench").enqueue(None, after=[first])
    browser.open("/queues/bench/job", id=job)
    browser.wait_for_stream()
    assert first in browser.text("section[aria-labelledby=waits-title]")
    gate.touch()
    browser.wait_for_text("done in queue bench", ".facts")


def test_a_flow_is_found_by_its_id_and_shows_its_jobs(browser: Browser, stage: Stage) -> None:
    browser.open("/")
    browser.fill("#find-job", "close-2026-11")
    browser.leave(lambda: browser.press("\ue007"))
    browser.press_button("close-2026-11", "main p")
    assert browser.title == "close-2026-11"
    jobs = ["emails/close-collect", "uploads/close-pdf", "uploads/close-csv", "reminders/close-publish"]
    assert browser.row_keys() == jobs
    assert [browser.cells(job)[3] for job in jobs] == ["done", "waiting", "waiting", "held"]
    assert browser.cells(jobs[3])[4] == "close-pdf close-csv (ended)"
    browser.press_button("close-publish", "table.rows")
    assert browser.path == "/queues/reminders/job?id=close-publish"


def test_a_batch_shows_its_progress(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/uploads/job", id="gallery-7-3")
    browser.press_button("gallery-7", "main .facts")
    assert browser.path == "/queues/uploads/batch?id=gallery-7"
    assert "60 %" in browser.text()
    shown = dict(zip(browser.texts(".pairs dt"), browser.texts(".pairs dd"), strict=True))
    assert (shown["Members"], shown["Not ended"], shown["Done"]) == ("5", "2", "3")


def test_a_batch_is_cancelled_after_a_question(browser: Browser, stage: Stage) -> None:
    queue = stage.queue("bench")
    queue.pause()
    with stage.client.batch("bench", id="stopped", on_end=new_job({})) as batch:
        batch.enqueue("bench", {}, id="stopped-0")
        batch.enqueue("bench", {}, id="stopped-1")
    browser.open("/queues/bench/batch", id="stopped")
    browser.press_button("Cancel")
    assert browser.title == "Cancel batch stopped of queue bench?"
    assert stage.counts("bench")["waiting"] == 2
    browser.press_button("Cancel batch")
    assert browser.note == "cancelled 2 jobs of batch stopped"
    queue.resume()
    wait_until(lambda: stage.state("bench", "stopped:on_end") == "done", what="its callback is done")
