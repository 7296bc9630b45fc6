"""So that forked processes go on to share the memory of their parent.

CPython counts the references to an object in the object itself: whoever calls a function writes to it, to its code and
to what it names, and the kernel copies those pages, 4 KB for each count. How many they are depends on how far apart the
objects lie that a process uses.

1. The code of the functions that run in every process of a queue is gathered: made anew, piece by piece, in one place.
   It was made module by module, with all that is seldom used in between. Which functions those are is written in
   hot_code.txt, by benchmarks/hot_code.py; a name too many or too few there costs some memory and nothing else.
2. The interpreter's cache of attributes is emptied. Each entry that is replaced gives up the name that was in it, and
   after hundreds of imports those are names from everywhere.
3. What is garbage goes, and the collector is kept off the rest, or it would write to all of it.
"""

import gc
import sys
from importlib.resources import files
from itertools import chain
from types import CodeType, FunctionType

# What is replaced stays where it is. If it were freed, the gaps would be filled with new objects, here and there.
_replaced: list[CodeType] = []


def share_pages() -> None:
    """Once, when all is imported that the children use, and before the first fork."""
    hot: dict[str, list[FunctionType]] = {name: [] for name in _names()}
    for found in gc.get_objects():
        if type(found) is FunctionType and (name := name_of(found)) in hot:
            hot[name].append(found)
    for function in chain.from_iterable(hot.values()):
        _replaced.append(function.__code__)
        function.__code__ = _copied(function.__code__)
    gc.collect()
    # Its name from Python 3.13 on, and before.
    getattr(sys, "_clear_internal_caches", sys._clear_type_cache)()
    gc.freeze()


def name_of(function: FunctionType) -> str:
    return f"{function.__globals__.get('__name__')} {function.__qualname__}"


def _names() -> list[str]:
    return files("forq.procs").joinpath("hot_code.txt").read_text().splitlines()


def _copied(code: CodeType) -> CodeType:
    inner = tuple(_copied(const) if isinstance(const, CodeType) else const for const in code.co_consts)
    return code.replace(co_consts=inner)
