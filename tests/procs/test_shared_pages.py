"""What is done to the supervisor's memory before its forks changes nothing but where things lie."""

import subprocess
import sys

from forq.procs.shared_pages import _names

SHARED = """
import gc
from types import FunctionType
import forq.supervisor.run
from forq.procs import shared_pages
from forq.broker.keys import queue_base

before = queue_base.__code__
shared_pages.share_pages()
assert queue_base.__code__ is not before and queue_base.__code__ == before
assert queue_base("forq:", "a") == "forq:queue:{a}"
assert gc.get_freeze_count() > 10_000
gc.unfreeze()
found = {shared_pages.name_of(each) for each in gc.get_objects() if type(each) is FunctionType}
ours = [name for name in shared_pages._names() if name.startswith("forq.")]
print(len([name for name in ours if name not in found]), len(ours))
"""


def test_gathered_code_does_what_it_did_and_the_list_knows_the_functions_there_are() -> None:
    done = subprocess.run([sys.executable, "-c", SHARED], capture_output=True, text=True, check=True, timeout=60)
    unknown, ours = map(int, done.stdout.split())
    assert ours > 200
    # Some are made later; if there are many, `make hot-code` is due.
    assert unknown < 0.1 * ours


def test_the_list_names_each_function_once() -> None:
    names = _names()
    assert len(set(names)) == len(names)
    assert all(len(name.split(" ", 1)) == 2 for name in names)
