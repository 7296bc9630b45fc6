"""The keyboard: rows, selection, pages, focus."""

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.web.browser.browser import Browser
from tests.web.browser.stage import Stage


def current(browser: Browser) -> str | None:
    return browser.run("return document.querySelector('tr.current')?.dataset.key ?? null")  # type: ignore[no-any-return]


def focused(browser: Browser) -> str:
    return str(browser.run("return document.activeElement.id || document.activeElement.innerText"))


def test_j_and_k_move_between_rows_and_enter_opens_one(browser: Browser, stage: Stage) -> None:
    browser.open("/")
    keys = browser.row_keys()
    browser.press("j")
    assert current(browser) == keys[0]
    browser.press("jjj")
    browser.press("k")
    assert current(browser) == keys[2]
    browser.press("k" * 10)
    assert current(browser) == keys[0]
    browser.press("j" * 30)
    assert current(browser) == keys[-1]
    browser.leave(lambda: browser.press(Keys.ENTER))
    assert browser.path == f"/queues/{keys[-1]}"


def test_the_current_row_survives_updates(browser: Browser, stage: Stage) -> None:
    browser.open("/")
    browser.wait_for_stream()
    browser.press("jj")
    chosen = current(browser)
    _, gate = stage.hang()
    browser.wait_for_text("1", "tr[data-key=bench] td:nth-of-type(3)")
    assert current(browser) == chosen
    gate.touch()


def test_x_selects_a_row(browser: Browser, stage: Stage) -> None:
    browser.open("/queues/reminders/jobs", state="scheduled")
    browser.press("jjx")
    chosen = browser.run("return [...document.querySelectorAll('input[name=id]:checked')].map((each) => each.value)")
    assert chosen == [current(browser)]
    browser.press("x")
    assert not browser.has("input[name=id]:checked")


def test_slash_goes_to_the_search_and_escape_leaves_it(browser: Browser, stage: Stage) -> None:
    browser.open("/processes")
    browser.press("/")
    assert focused(browser) == "find-job"
    browser.press("jjj")
    assert browser.find("#find-job").get_attribute("value") == "jjj"
    assert current(browser) is None
    browser.press(Keys.ESCAPE)
    browser.press("j")
    assert current(browser) is not None
    browser.open("/")
    browser.press("/")
    assert focused(browser) == "find"


@pytest.mark.parametrize(("keys", "path"), [("go", "/"), ("gd", "/dead"), ("gs", "/schedules"), ("gp", "/processes")])
def test_g_and_a_letter_open_a_page(browser: Browser, stage: Stage, keys: str, path: str) -> None:
    browser.open("/queues/bench")
    browser.leave(lambda: browser.press(keys))
    assert browser.path == path


def test_space_pauses_and_resumes(browser: Browser, stage: Stage) -> None:
    browser.open("/")
    browser.wait_for_stream()
    browser.press(Keys.SPACE)
    assert browser.text("#live-state") == "paused"
    assert browser.open_streams() == 0
    browser.press(Keys.SPACE)
    browser.wait_for_stream()
    assert browser.text("#live-state") == "live"


def test_t_changes_the_theme_and_the_browser_remembers_it(browser: Browser, stage: Stage) -> None:
    browser.open("/")
    light = browser.run("return getComputedStyle(document.body).backgroundColor")
    browser.press("t")
    dark = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert dark != light
    browser.open("/processes")
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == dark
    browser.find("#theme").click()
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == light


def test_question_mark_shows_the_help_and_escape_closes_it(browser: Browser, stage: Stage) -> None:
    browser.open("/")
    browser.press("?")
    assert "next, previous row" in browser.text("dialog[open]")
    browser.press("j")
    assert current(browser) is None
    browser.press(Keys.ESCAPE)
    assert not browser.has("dialog[open]")
    browser.find("#help").click()
    assert browser.has("dialog[open]")
    browser.click("Close", "dialog")
    assert not browser.has("dialog[open]")


def test_the_help_fits_a_phone(browser: Browser, stage: Stage) -> None:
    browser.resize(390, 800)
    browser.open("/")
    browser.find("#help").click()
    assert browser.run("const help = document.querySelector('dialog'); return help.scrollWidth <= help.clientWidth")


def test_letters_with_modifiers_are_left_to_the_browser(browser: Browser, stage: Stage) -> None:
    browser.open("/")
    ActionChains(browser.driver).key_down(Keys.ALT).send_keys("j").key_up(Keys.ALT).perform()
    assert current(browser) is None


def test_the_first_tab_stop_skips_to_the_content(browser: Browser, stage: Stage) -> None:
    browser.open("/")
    browser.press(Keys.TAB)
    assert focused(browser) == "Skip to the content"
    box = browser.find(".skip").rect
    assert box["x"] >= 0
    browser.press(Keys.ENTER)
    assert focused(browser) == "content"
    browser.press(Keys.TAB)
    assert browser.run("return document.querySelector('main').contains(document.activeElement)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_focus_is_visible(browser: Browser, stage: Stage, scheme: str) -> None:
    browser.scheme(scheme)
    browser.open("/queues/payments/jobs", state="dead")
    browser.find("#pause").click()
    browser.run("document.activeElement.blur()")
    for _ in range(25):
        browser.press(Keys.TAB)
        outline = browser.run(
            "const style = getComputedStyle(document.activeElement);"
            "return style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1"
        )
        assert outline, browser.run("return document.activeElement.outerHTML.slice(0, 200)")
