"""Live updates: they arrive, pause, spare what the user is doing, and come back after the dashboard was killed."""

from contextlib import suppress

import psutil
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.support.drive.wait import wait_until
from tests.web.browser.browser import Browser, row
from tests.web.browser.stage import Stage

RUNNING = "section[aria-labelledby=running-title]"


def stay(browser: Browser) -> None:
    """Marks the page: the mark is gone after a reload."""
    browser.run("window.__same = true")


def stayed(browser: Browser) -> bool:
    return bool(browser.run("return window.__same === true"))


def next_update(browser: Browser) -> None:
    """Waits until the next update has arrived."""
    browser.run("window.__updates = 0; __streams.at(-1).addEventListener('update', () => { window.__updates++; })")
    wait_until(lambda: browser.run("return window.__updates") > 0, what="an update")


def test_a_page_changes_without_a_reload(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/bench")
    browser.wait_for_stream()
    stay(browser)
    job, gate = stage.hang(fraction=0.25, text="a quarter")
    browser.wait_for_text("25 %, a quarter", row(job))
    gate.touch()
    browser.wait_for_text("No job is running", RUNNING)
    browser.open("/")
    stay(browser)
    job, gate = stage.hang()
    wait_until(lambda: browser.cells("bench")[3] == "1", what="one job runs")
    gate.touch()
    wait_until(lambda: browser.cells("bench")[3] == "0", what="no job runs")
    assert stayed(browser)


def test_pause_stops_updates_and_resume_continues_them(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/bench")
    browser.wait_for_stream()
    stay(browser)
    browser.find("#pause").click()
    assert browser.text("#live-state") == "paused"
    assert browser.find("#pause").get_attribute("aria-pressed") == "true"
    assert browser.open_streams() == 0
    before = browser.text("#live")
    job, gate = stage.hang()
    browser.find("#pause").click()
    browser.wait_for_text(job, RUNNING)
    assert job not in before
    assert browser.text("#live-state") == "live"
    gate.touch()
    assert stayed(browser)


def test_a_focused_button_is_not_replaced_until_it_loses_the_focus(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/bench")
    browser.wait_for_stream()
    button = browser.find("#live form button")
    browser.run("arguments[0].focus()", button)
    job, gate = stage.hang()
    next_update(browser)
    next_update(browser)
    assert browser.run("return document.activeElement === arguments[0] && arguments[0].isConnected", button)
    assert job not in browser.text(RUNNING)
    browser.run("arguments[0].blur()", button)
    browser.wait_for_text(job, RUNNING)
    gate.touch()


def test_a_link_that_is_pressed_during_an_update_is_followed(browser: Browser, stage: Stage) -> None:
    browser.open("/")
    browser.wait_for_stream()
    browser.hold(f"{row('emails')} a")
    before = browser.text("#live")
    _, gate = stage.hang()
    next_update(browser)
    next_update(browser)
    assert browser.text("#live") == before
    browser.leave(lambda: ActionChains(browser.driver).release().perform())
    assert browser.path == "/queues/emails"
    gate.touch()


def test_text_that_was_typed_stays_after_updates(browser: Browser, stage: Stage) -> None:
    browser.open("/")
    browser.wait_for_stream()
    browser.fill("#find", "mail")
    browser.run("document.querySelector('#find').__same = true")
    browser.press(Keys.TAB, Keys.TAB)
    wait_until(lambda: browser.run("return !document.querySelector('#find').__same"), what="another field is there")
    assert browser.find("#find").get_attribute("value") == "mail"


def test_selected_text_is_not_replaced_until_it_is_deselected(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/bench")
    browser.wait_for_stream()
    browser.run("getSelection().selectAllChildren(document.querySelector('#live .facts'))")
    selected = browser.run("return getSelection().toString()")
    job, gate = stage.hang()
    next_update(browser)
    next_update(browser)
    assert browser.run("return getSelection().toString()") == selected
    assert job not in browser.text(RUNNING)
    browser.run("getSelection().removeAllRanges()")
    browser.wait_for_text(job, RUNNING)
    gate.touch()


def test_open_details_and_scrolled_tables_stay_as_they_are(browser: Browser, stage: Stage) -> None:
    browser.resize(390, 800)
    browser.open("/queues/legacy")
    browser.wait_for_stream()
    browser.click("Traceback")
    job = stage.queue("legacy").enqueue(None)
    browser.wait_for_text("1", ".tiles dd")
    assert browser.run("return document.querySelector('#trace-1').open")
    stage.queue("legacy").cancel(job)
    browser.open("/processes")
    browser.wait_for_stream()
    browser.run("document.querySelector('.scroll').scrollLeft = 60")
    job, gate = stage.hang()
    next_update(browser)
    assert browser.run("return document.querySelector('.scroll').scrollLeft") == 60
    gate.touch()


def test_a_hidden_tab_asks_for_nothing(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/bench")
    browser.wait_for_stream()
    first = browser.driver.current_window_handle
    browser.driver.switch_to.new_window("tab")
    second = browser.driver.current_window_handle
    browser.driver.switch_to.window(first)
    browser.run(
        "Object.defineProperty(document, 'hidden', { value: true, configurable: true });"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    assert browser.open_streams() == 0
    job, gate = stage.hang()
    browser.run("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    browser.wait_for_text(job, RUNNING)
    gate.touch()
    browser.driver.switch_to.window(second)
    browser.driver.close()
    browser.driver.switch_to.window(first)


def test_a_page_whose_updates_were_refused_becomes_live_again_by_itself(browser: Browser, stage: Stage) -> None:
    browser.expect("ERR_|status of 404")
    create = ["create", "returning", "--handler", "staged:handle", "--path", str(stage.handlers)]
    stage.forq.ctl(*create)
    browser.open("/")
    wait_until(lambda: "returning" in browser.row_keys(), what="the overview has it")
    browser.open("/queues/returning")
    browser.wait_for_stream()
    stay(browser)
    stage.forq.ctl("delete", "returning")
    # A new stream gets the status 404, after which browsers do not try again.
    stage.service("web").kill()
    browser.wait_for_text("Live updates are interrupted; trying again", browser.BANNER)
    stage.forq.ctl(*create)
    wait_until(lambda: browser.text("#live-state") == "live", what="the page is live again")
    wait_until(lambda: not browser.banner, what="the page says that all is well")
    assert stayed(browser)
    stage.forq.ctl("delete", "returning")


def test_a_page_is_offline_while_the_dashboard_is_down_and_then_live_again(browser: Browser, stage: Stage) -> None:
    browser.expect("ERR_|status of 503")
    browser.open("/queues/bench")
    browser.wait_for_stream()
    stay(browser)

    def is_offline() -> bool:
        # The supervisor is quick to start another.
        with suppress(psutil.NoSuchProcess):
            stage.service("web").kill()
        return browser.text("#live-state") == "offline"

    wait_until(is_offline, what="the page is offline")
    wait_until(lambda: browser.text("#live-state") == "live", what="the page is live again")
    job, gate = stage.hang()
    browser.wait_for_text(job, RUNNING)
    gate.touch()
    assert stayed(browser)
