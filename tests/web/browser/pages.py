"""Every page of the dashboard, with something to show; and the pages that answer a form."""

from urllib.parse import quote

from tests.web.browser.browser import Browser
from tests.web.browser.stage import Stage

# Path -> name of its screenshot.
PAGES = {
    "/": "overview",
    "/?find=nothing-like-it": "overview-empty",
    "/queues/emails": "queue",
    "/queues/newsletter": "queue-paused",
    "/queues/legacy": "queue-broken",
    "/queues/reports": "queue-running",
    "/queues/emails/options": "options",
    "/queues/newsletter/jobs?state=waiting": "jobs-waiting",
    "/queues/reports/jobs?state=active": "jobs-active",
    "/queues/reminders/jobs?state=scheduled": "jobs-scheduled",
    "/queues/reports/jobs?state=held": "jobs-held",
    "/queues/payments/jobs?state=dead": "jobs-dead",
    "/queues/emails/jobs?state=done": "jobs-done",
    "/queues/payments/jobs?state=dead&error=nothing": "jobs-none",
    "/queues/reports/job?id=report-2026-10": "job-active",
    "/queues/reports/job?id=report-2026-10&show=stack": "job-stack",
    "/queues/payments/job?id=order-4000&show=data": "job-dead",
    "/queues/imports/job?id=import-7": "job-crashed",
    "/queues/emails/job?id=welcome-42&show=result": "job-done",
    "/queues/reminders/job?id=reminder-3": "job-scheduled",
    "/queues/reports/job?id=report-2026": "job-held",
    "/queues/uploads/job?id=gallery-7-3": "job-member",
    "/queues/uploads/job?id=large&show=data": "job-large",
    "/queues/emails/job?id=never-there": "job-unknown",
    "/queues/emails/flow?id=close-2026-11": "flow",
    "/queues/uploads/batch?id=gallery-7": "batch",
    "/dead": "dead",
    "/queues/payments/dead": "dead-groups",
    "/schedules": "schedules",
    "/queues/emails/schedule?key=digest&show=data": "schedule",
    "/processes": "processes",
    "/processes?stack=reports": "processes-stacks",
    "/find": "find",
    "/find?id=order-4003": "find-result",
    "/find?id=never-there": "find-nothing",
}
ERRORS = {"/no/such/page": "error-missing", "/queues/no-such-queue": "error-queue"}
MISSING = "status of 404"


def question(browser: Browser, stage: Stage) -> None:
    """Opens the page that asks before a group of dead jobs is discarded."""
    browser.open("/queues/payments/dead")
    browser.press_button("Discard all", "table.rows tbody tr:first-child")
    assert browser.title.startswith("Discard ")


def note(browser: Browser, stage: Stage) -> None:
    """Opens a page with a note about an action."""
    browser.open("/queues/reminders")
    browser.wait_for_text("Pause", "main .bar")
    browser.press_button("Pause")
    assert browser.note == "paused queue reminders"
    stage.queue("reminders").resume()


def job_path(queue: str, job: str) -> str:
    return f"/queues/{queue}/job?id={quote(job, safe='')}"
