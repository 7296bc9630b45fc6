"""Signal handlers and masks in plain numbers.

The functions of `signal` make an enum of all that they return, 60 of them for a mask. That takes time, and in each of
many forked processes it writes to pages of memory that they would otherwise share.
"""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

_module = importlib.import_module("_signal")

set_handler: Callable[[int, Any], Any] = _module.signal
set_mask: Callable[[int, Iterable[int]], set[int]] = _module.pthread_sigmask
