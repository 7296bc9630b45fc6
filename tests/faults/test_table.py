"""docs/design/faults.md and the fault marks of the tests agree."""

import pytest

from tests.support.marks import fault_rows, marked_tests


@pytest.mark.parametrize("row", fault_rows())
def test_each_row_of_the_table_names_existing_tests_with_its_mark(row: str) -> None:
    named = fault_rows()[row]
    assert named, "no test is named"
    assert set(named) <= marked_tests().get(row, set())


def test_each_mark_is_a_row_of_the_table() -> None:
    assert set(marked_tests()) == set(fault_rows())
