"""The behaviours of docs/design/spec.md that this release promises; --spec-report wants a passing test for each."""


def _run(letter: str, first: int, last: int) -> list[str]:
    return [f"{letter}{number}" for number in range(first, last + 1)]


SPEC_IDS: tuple[str, ...] = (
    *_run("N", 1, 25),
    *_run("Q", 1, 40),
    *_run("R", 1, 17),
    *_run("M", 1, 13),
    *_run("P", 1, 22),
)
