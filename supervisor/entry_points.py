"""The one place where the supervisor names the code of its children. Nothing of it runs in the parent."""

import gc
import os
import sys

import forq
from forq.bridge.run import BridgeSettings, run_bridge
from forq.broker.connection import warm
from forq.broker.scripts import flags, script
from forq.output.logger import run_logger
from forq.services.clerk import run_clerk
from forq.services.metrics import run_metrics
from forq.services.pulse import run_pulse
from forq.services.scribe import run_scribe
from forq.services.warden import run_warden
from forq.workers.child import ChildSettings, run_child

__all__ = [
    "BridgeSettings",
    "ChildSettings",
    "preload",
    "run_bridge",
    "run_child",
    "run_clerk",
    "run_logger",
    "run_metrics",
    "run_pulse",
    "run_scribe",
    "run_warden",
]


def preload(url: str, prefix: str) -> None:
    """Their code is imported by now, and what all of them would do is done here. Keeps the collector off it, so that
    children share those pages."""
    for name in forq.__all__:
        getattr(forq, name)
    # So that a handler's own Client() finds the same queues.
    os.environ["FORQ_REDIS"], os.environ["FORQ_PREFIX"] = url, prefix
    warm(url)
    for verb in flags():
        script(verb)
    gc.collect()
    # The cache of attributes holds names from hundreds of imports. A child that replaces one writes to its page.
    # Python 3.13 has this function, earlier releases the other one.
    getattr(sys, "_clear_internal_caches", sys._clear_type_cache)()
    gc.freeze()
