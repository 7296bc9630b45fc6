"""The only module of the supervisor that imports the code of its children; none of it runs in the parent."""

import gc
import os
import socket
import sys

import forq
from forq.bridge.run import BridgeSettings, run_bridge
from forq.broker.connection import warm
from forq.broker.scripts import flags, script
from forq.output.logger import run_logger
from forq.procs.context import Context
from forq.services.clerk import run_clerk
from forq.services.metrics import run_metrics
from forq.services.pulse import run_pulse
from forq.services.scribe import run_scribe
from forq.services.warden import run_warden
from forq.web.settings import WebSettings
from forq.workers.census import CensusSettings, run_census
from forq.workers.child import ChildSettings, run_child

__all__ = [
    "BridgeSettings",
    "CensusSettings",
    "ChildSettings",
    "preload",
    "run_bridge",
    "run_census",
    "run_child",
    "run_clerk",
    "run_logger",
    "run_metrics",
    "run_pulse",
    "run_scribe",
    "run_warden",
    "run_web",
]


def run_web(context: Context, settings: WebSettings, listener: socket.socket, leash: socket.socket) -> int:
    # Not at the top: only this process needs Starlette, uvicorn and Jinja2.
    from forq.web.run import run_service

    return run_service(context, settings, listener, leash)


def preload(url: str, prefix: str) -> None:
    """Does the work that every child would do, once, and freezes the result for the garbage collector, so that the
    children share its memory."""
    for name in forq.__all__:
        getattr(forq, name)
    # A handler's own Client() then uses the same queues.
    os.environ["FORQ_REDIS"], os.environ["FORQ_PREFIX"] = url, prefix
    warm(url)
    for verb in flags():
        script(verb)
    gc.collect()
    # The attribute cache is full after hundreds of imports. A child that replaces an entry would copy its page.
    # _clear_internal_caches exists since Python 3.13.
    getattr(sys, "_clear_internal_caches", sys._clear_type_cache)()
    gc.freeze()
