"""How much a run tries: `make test` enough to find what is broken, `make test-all` and CI (FORQ_TEST_THOROUGH=1) all.

What is asserted is the same. What is left out are further examples, orders and seeds of the same test, and those tests
that take long and depend on little that changes.
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
    """How many examples of a property are tried."""
    return thorough if THOROUGH else quick


def sample(cases: Sequence[T], one_in: int) -> Sequence[T]:
    """All cases, or one of so many; which, depends on the seed of the run."""
    return cases if THOROUGH else cases[int(os.environ["FORQ_TEST_SEED"]) % one_in :: one_in]
