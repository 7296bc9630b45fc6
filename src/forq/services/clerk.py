"""The clerk: handles requests of the control socket that need Redis, so that the supervisor never blocks on it."""

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from forq.broker.link import Link, check_server
from forq.broker.registry import Dropped, Registry
from forq.broker.scripts import script
from forq.errors import BeingDeleted, ExitCode
from forq.procs.context import Context
from forq.procs.liveness import DISK_SECONDS, expect_busy
from forq.procs.loop import Loop, service_loop
from forq.services.elsewhere import Elsewhere
from forq.services.redis_verbs import RedisVerbs
from forq.services.rpc import RpcServer
from forq.services.scribe import append_lines
from forq.services.waiting import Awaiters, Followers, Watchers
from forq.settings import WORK, stored, stored_defaults, stored_for_fail_queue
from forq.values import check_queue_name

CALL_TIMEOUT_SECONDS = 3.0


def run_clerk(context: Context, leash: socket.socket) -> int:
    loop = service_loop()
    clerk = Clerk(context, loop)
    RpcServer(loop, leash, clerk.verbs())
    loop.run(clerk.after_pass)
    return ExitCode.STOPPED


class Clerk:
    def __init__(self, context: Context, loop: Loop) -> None:
        self._context = context
        self._link = Link(context.url, name="forq-clerk", timeout_seconds=CALL_TIMEOUT_SECONDS)
        self._registry = Registry(self._link, context.prefix)
        self.redis_verbs = RedisVerbs(self._link, context.prefix)
        self.awaiters = Awaiters(self._link, context.prefix, loop)
        self.watchers = Watchers(self._link, context.prefix, loop)
        self.followers = Followers(context.logs_dir)
        self.elsewhere = Elsewhere(self._link, context.prefix, loop)

    def after_pass(self) -> float | None:
        """Serves waiting clients. Returns the seconds until the next one is due, or None."""
        waits = [one.tick() for one in (self.awaiters, self.watchers, self.followers)]
        return min((seconds for seconds in waits if seconds is not None), default=None)

    def verbs(self) -> dict[str, Any]:
        return {
            **self.redis_verbs.table(),
            "check": self.check,
            "offer": self.offer,
            "create": self.create,
            "delete": self.delete,
            "purge": self.purge,
            "repair": self.repair,
            "await": self.awaiters.wait_for_item,
            "leave": self.awaiters.leave,
            "watch": self.watchers.watch,
            "logs": self.followers.read_logs,
            "memory": self.memory,
            "supervisors": self.elsewhere.supervisors,
            "elsewhere": self.elsewhere.ask,
        }

    def check(self, params: dict[str, Any]) -> object:
        """Raises if the server cannot be used."""
        return {"server": check_server(self._link)}

    def offer(self, params: dict[str, Any]) -> object:
        """Loads the functions into the server, since clients may lack the right."""
        self._link.load_library(script("enqueue"))
        return {}

    def create(self, params: dict[str, Any]) -> object:
        try:
            made = self._create(params)
        except BeingDeleted:
            # The client that deleted it may have died half way: finish that first.
            while self._purge(params["name"]):
                pass
            made = self._create(params)
        # In the same call, so that a retry also sets them.
        return {"created": made, "unscheduled": self.redis_verbs.set_schedules(params)}

    def _create(self, params: dict[str, Any]) -> bool:
        mode, options = params["mode"], params["options"]
        return self._registry.create(
            params["name"],
            mode,
            self._context.max_queues,
            stored_defaults(mode),
            stored(options) | ({"fail_handler": int(params["fail_handler"])} if mode == WORK else {}),
            fail_options=stored_for_fail_queue(options) if params["fail_handler"] else None,
            reopening=params["reopening"],
            joining=params["joining"],
        )

    def delete(self, params: dict[str, Any]) -> object:
        return {"dropped": self._registry.delete(params["name"], force=bool(params.get("force")))}

    def purge(self, params: dict[str, Any]) -> object:
        """Moves a slice of a deleted queue's jobs to its failed log."""
        return {"more": self._purge(check_queue_name(params["name"]))}

    def repair(self, params: dict[str, Any]) -> object:
        """Completes the deletion of a queue that was left half created or half deleted, in slices like `purge`."""
        name = check_queue_name(params["name"])
        return {"more": self._log_dropped(name, self._registry.repair)}

    def _purge(self, name: str) -> bool:
        return self._log_dropped(name, self._registry.purge)

    def _log_dropped(self, name: str, drop: Callable[[str, Callable[[list[Dropped]], None]], bool]) -> bool:
        directory, max_bytes = self._context.logs_dir / name, self._context.failed_log_max
        expect_busy(DISK_SECONDS)
        return drop(name, lambda jobs: append_lines(directory, jobs, max_bytes))

    def memory(self, params: dict[str, Any]) -> object:
        """PSS of each process in bytes. Processes that have ended are left out."""
        # Not at the top: the supervisor would load it too, and each fork would copy more page tables.
        import psutil

        found: dict[str, int] = {}
        for pid in params["pids"]:
            expect_busy()
            with suppress(psutil.Error):
                found[str(pid)] = psutil.Process(pid).memory_full_info().pss
        return found
