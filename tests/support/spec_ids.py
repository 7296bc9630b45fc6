"""The behaviours of docs/spec.md that this release promises; --spec-report wants a passing test for each."""


def _run(letter: str, first: int, last: int) -> list[str]:
    return [f"{letter}{number}" for number in range(first, last + 1)]


SPEC_IDS: tuple[str, ...] = (
    *_run("N", 1, 8),
    *_run("N", 10, 12),
    "N20",
    *("Q2", "Q4", "Q10", "Q22", "Q24", "Q33", "Q34"),
    *_run("R", 1, 17),
    "M1",
    *_run("M", 4, 7),
    "P7",
)
