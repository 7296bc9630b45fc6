"""How much a run tries: `make test` a sample, `make test-all` and CI (FORQ_TEST_THOROUGH=1) everything.

Both make the same assertions. A quick run leaves out further examples, orders and seeds of a test, and long tests of
code that rarely changes.
"""

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

THOROUGH_VARIABLE = "FORQ_TEST_THOROUGH"
THOROUGH = os.environ.get(THOROUGH_VARIABLE) == "1"

only_in_test_all = pytest.mark.skipif(not THOROUGH, reason="long: only `make test-all` runs it")

T = TypeVar("T")


def examples(quick: int, thorough: int) -> int:
    """The number of examples of a property, or of seconds of a random test."""
    return thorough if THOROUGH else quick


def sample(cases: Sequence[T], one_in: int) -> Sequence[T]:
    """All cases, or every `one_in`-th; the seed of the run picks which."""
    return cases if THOROUGH else cases[int(os.environ["FORQ_TEST_SEED"]) % one_in :: one_in]
