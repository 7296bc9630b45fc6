"""The processes, the pages of errors, and the dashboard while Redis does not answer."""

from tests.support.drive.wait import wait_until
from tests.web.browser.browser import Browser, row
from tests.web.browser.stage import Stage, frozen


def test_the_tree_has_the_supervisor_its_services_and_the_processes_of_queues(browser: Browser, stage: Stage) -> None:
    browser.open("/processes")
    wait_until(lambda: set(browser.row_keys()) == {str(each.pid) for each in stage.forq.processes()}, what="same tree")
    assert browser.cells(str(stage.forq.pid))[0].startswith("forq: supervisor")
    assert browser.cells(str(stage.service("web").pid))[0] == "forq: web"
    assert "reports main" in browser.cells(str(stage.forq.child("reports")["pid"]))[0]
    services = browser.texts("section[aria-labelledby=services-title] th[scope=row]")
    assert services == [each["name"] for each in stage.forq.status()["supervisor"]["services"]]
    assert "answers" in browser.text("section[aria-labelledby=redis-title]")


def test_the_stacks_of_a_queue_are_shown_on_demand(browser: Browser, stage: Stage) -> None:
    browser.open("/processes")
    browser.press_button("Stacks", row(str(stage.forq.child("reports")["pid"])))
    stacks = browser.texts("section[aria-labelledby=stacks-title] h3 a")
    assert set(stacks) == {"report-2026-10", "report-2026-11"}
    assert "hang" in browser.text("section[aria-labelledby=stacks-title] pre")


def test_a_queue_that_was_deleted_meanwhile_has_an_error_page(browser: Browser, stage: Stage) -> None:
    stage.forq.ctl("create", "short-lived", "--handler", "staged:handle", "--path", str(stage.handlers))
    wait_until(lambda: stage.forq.queue_status("short-lived")["state"] == "running", what="the queue runs")
    browser.open("/")
    wait_until(lambda: "short-lived" in browser.row_keys(), what="the overview has it")
    browser.open("/queues/short-lived")
    stage.forq.ctl("delete", "short-lived")
    browser.wait_for_text("there is no queue 'short-lived'", "#problem")
    browser.expect("status of 404")
    browser.press_button("Pause")
    assert "short-lived" in browser.banner
    browser.open("/queues/short-lived")
    assert "there is no queue 'short-lived'" in browser.banner
    browser.press_button("Overview", "main")
    assert browser.path == "/"


def test_an_action_on_a_job_that_has_ended_meanwhile_is_refused(browser: Browser, stage: Stage) -> None:
    job, gate = stage.hang()
    browser.open("/queues/bench/job", id=job)
    browser.press_button("Kill")
    gate.touch()
    wait_until(lambda: stage.state("bench", job) == "done", what="it has ended")
    browser.expect("status of 4")
    browser.press_button("Kill")
    assert job in browser.banner
    assert stage.state("bench", job) == "done"


def test_a_stale_form_changes_nothing(browser: Browser, stage: Stage) -> None:
    job = stage.die(id="stale")
    browser.open("/queues/bench/jobs", state="dead")
    browser.find("input[type=checkbox][name=id]").click()
    stage.queue("bench").discard_dead(job)
    browser.press_button("Retry")
    assert browser.note.startswith("retried 0 jobs; 1 job not:")


def test_unknown_pages_actions_and_values_are_errors(browser: Browser, stage: Stage) -> None:
    browser.expect("status of 4")
    browser.open("/no/such/page")
    assert "There is no such page." in browser.banner
    browser.open("/queues/emails/jobs", state="sleeping")
    assert "state = 'sleeping' is not allowed" in browser.banner
    browser.open("/queues/emails/job")
    assert "the parameter id is missing" in browser.banner
    browser.open("/queues/bench")
    # An update would restore the form.
    browser.find("#pause").click()
    browser.run("document.querySelector('main form').action = '/do/explode'")
    browser.leave(browser.find("main form button").click)
    assert "there is no action 'explode'" in browser.banner
    browser.open("/do/queue.pause")
    assert "GET is not possible here." in browser.banner


def test_without_redis_processes_are_shown_and_the_page_recovers(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/reports")
    browser.wait_for_stream()
    server = next(each for each in stage.forq.processes() if "redis" in " ".join(each.cmdline()))
    browser.expect("status of 503")
    with frozen(server):
        browser.open("/")
        browser.wait_for_text("Redis does not answer", browser.BANNER)
        assert browser.cells("reports")[3] == "2"
        browser.open("/processes")
        assert browser.cells(str(server.pid))[2] == "stopped"
        browser.open("/queues/reports")
        assert str(stage.forq.child("reports")["pid"]) in browser.text("section[aria-labelledby=processes-title]")
        browser.open("/")
    browser.wait_for_text("250", row("newsletter"))
    wait_until(lambda: not browser.has("main .banner:not([hidden])"), what="the page says that all is well")
