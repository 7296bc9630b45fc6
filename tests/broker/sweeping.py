"""Makes scripts remove stale hints at once and two at a time, so that tests see every step."""

from collections.abc import Iterator
from contextlib import contextmanager

from forq.broker import scripts
from tests.support.models.mutants import Mutant, forget_texts, use

_FILE = "hints.lua"
_AT_ONCE = Mutant(
    _FILE,
    "if length <= SPARE_HINTS or length <= 2 * (hints.main_waiting() + in_lane) + SPARE_HINTS then return end",
    "if length == 0 then return end",
    "",
    "",
)
_TWO = Mutant(_FILE, "SWEPT_PER_CALL = 1000, 4", "SWEPT_PER_CALL = 1000, 2", "", "")


@contextmanager
def sweeping_at_once() -> Iterator[None]:
    read = scripts._read
    use(_AT_ONCE)
    use(_TWO)
    try:
        yield
    finally:
        scripts._read = read
        forget_texts()
