"""The ports of other queues' examples run."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import arithmetic, fibonacci, words
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SETTINGS = "".join(
    f'[apps.{name}]\napp = "{name}:app"\npath = ["{HERE}"]\n\n' for name in ("arithmetic", "fibonacci", "words")
)


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings=SETTINGS) as forq:
        wait_until(lambda: forq.run_ctl("status", "--check").returncode == 0, 60.0, "all queues run")
        yield forq


@pytest.fixture(autouse=True)
def environment(forq: Forq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORQ_REDIS", forq.url)


def test_the_arithmetic_of_celerys_example_is_done() -> None:
    refs = [
        arithmetic.plus.enqueue(4, 4),
        arithmetic.times.enqueue(8, 8),
        arithmetic.total.enqueue([1, 2, 3]),
    ]
    assert [ref.result(timeout=30) for ref in refs] == [8, 64, 6]


@pytest.mark.parametrize(("name", "seconds"), [("fail_slowly", [600.0]), ("fail_faster", [5.0, 10.0, 20.0])])
def test_a_failed_task_waits_for_its_own_backoff(forq: Forq, name: str, seconds: list[float]) -> None:
    ref = arithmetic.app.tasks[name].enqueue()
    wait_until(lambda: ref.state() == "scheduled", what="a retry")
    job = forq.client().queue("arithmetic").job(ref.id)
    ended, run_at = job["attempts"][-1]["ended_at"], job["run_at"]
    assert run_at is not None
    # On a busy machine the first retry may have failed, too.
    assert run_at - ended == pytest.approx(seconds[job["retry_count"] - 1], abs=1.0)
    assert ref.cancel()


def test_the_numbers_of_rqs_example_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    fibonacci.main()
    printed = sorted(capsys.readouterr().out.splitlines())
    assert printed[0] == "fib(20) = 10946"
    assert len(printed) == 14


def test_a_page_is_fetched_parsed_processed_in_parts_and_merged_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    words.main()
    expected = ", ".join(f"{('text', 'of', 'a.example')[number % 3]} {number}" for number in range(20))
    assert capsys.readouterr().out == f"{expected}\n"


def test_the_guide_states_the_length_of_a_flow_and_of_a_canvas() -> None:
    page = (ROOT / "docs/guide/from-celery.md").read_text().replace("\n", " ")
    for name in ("words.py", "words_in_celery.txt"):
        assert f"({name}): {code_lines(HERE / name)} lines" in page


def test_the_schedules_of_the_examples_are_defined(forq: Forq) -> None:
    assert {each["key"] for name in ("arithmetic", "fibonacci") for each in forq.client().queue(name).schedules()} == {
        "greet",
        "clean_up",
        "news",
    }
    assert arithmetic.app.definitions()["schedules"]["arithmetic"]["greet"]["every"] == "10s"
    schedules = fibonacci.app.definitions()["schedules"]["fibonacci"]
    assert schedules["clean_up"]["every"] == "30m"
    assert schedules["news"]["cron"] == "30 10 * * TUE"
    assert schedules["news"]["data"] == {"kind": "weekly", "template": "news.html"}


def code_lines(file: Path) -> int:
    """Lines without blank lines, comments and docstrings."""
    text = file.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING):
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


@pytest.mark.parametrize("name", ["arithmetic", "fibonacci"])
def test_the_guides_state_the_length_of_the_ports(name: str) -> None:
    page = ROOT / "docs/guide" / {"arithmetic": "from-celery.md", "fibonacci": "from-rq.md"}[name]
    assert f"({name}.py): {code_lines(HERE / f'{name}.py')} lines" in page.read_text().replace("\n", " ")
