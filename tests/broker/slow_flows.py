"""Makes scripts follow one edge per call and remember few ends, so that tests see every step."""

from collections.abc import Iterator
from contextlib import contextmanager

from forq.broker import scripts
from tests.support.models.mutants import Mutant, forget_texts, use

MAX_ENDS = 3


@contextmanager
def following_one_edge_per_call() -> Iterator[None]:
    with _changed(Mutant("call.lua", "EDGES_PER_CALL = 500", "EDGES_PER_CALL = 1", "", "")), remembering_few_ends():
        yield


@contextmanager
def remembering_few_ends() -> Iterator[None]:
    with _changed(Mutant("flows.lua", "MAX_ENDS = 50000", f"MAX_ENDS = {MAX_ENDS}", "", "")):
        yield


@contextmanager
def _changed(mutant: Mutant) -> Iterator[None]:
    read = scripts._read
    use(mutant)
    try:
        yield
    finally:
        scripts._read = read
        forget_texts()
