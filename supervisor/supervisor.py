"""The parent process: start, run and stop.

1. Start: embedded Redis (if none is configured), the services, the control socket, and a process per app that reads its
   definitions. Then each queue is created in Redis and its processes are started. Only the queues wait for Redis.
2. Run: one loop (procs/loop.py). It never connects to Redis, never imports a handler, never blocks.
3. Stop: the queues within their grace periods, then recovery of their jobs, then the services, the server last.
"""

import logging
import signal
from collections.abc import Callable
from typing import Any

from setproctitle import setproctitle

from forq.errors import ExitCode, ForqError, IncompatibleServer
from forq.procs.loop import Loop, Timer
from forq.supervisor.apps import Apps
from forq.supervisor.census import CENSUS_SECONDS
from forq.supervisor.config import Config
from forq.supervisor.queues import Queues
from forq.supervisor.services import RETRY_SECONDS, Services
from forq.supervisor.statedir import StateDir

# How long a stop waits for the recovery of the children's jobs; after that the next start recovers them.
LAST_RECOVERY_SECONDS = 3.0
# Time for a stop beyond the longest stop_grace: TERM to groups, kills, the last recovery, the embedded server.
STOP_MARGIN_SECONDS = 20.0
# Without Redis the supervisor counts as ready after this time: it answers requests, and queues start when Redis is up.
READY_SECONDS = 10.0
TITLE_SECONDS = 0.2
FLAPPING_CHECK_SECONDS = 5.0

log = logging.getLogger("forq")


class Supervisor:
    def __init__(self, config: Config, state: StateDir, loop: Loop) -> None:
        self.config = config
        self.state = state
        self.loop = loop
        self.exit_code = ExitCode.STOPPED
        self.stopping = False
        self.started = loop.now()
        self.services = Services(config, state, loop, served=lambda: self.queues.served(), on_pulse=self._pulse_event)
        self.queues = Queues(config, state, loop, self.services, changed=self._changed, fail=self.fail)
        self.apps = Apps(config, state, loop, self.services, self.queues, self._changed)
        # Carries out a request that came through Redis (remote.py).
        self.receive_remote: Callable[[dict[str, Any]], None] = lambda request: None
        self._title_timer: Timer | None = None
        self._repairing: set[str] = set()

    def start(self) -> None:
        """Starts everything without waiting for it."""
        self._changed()
        self.services.start()
        self.apps.start()
        for signum in (signal.SIGTERM, signal.SIGINT):
            self.loop.on_signal(signum, lambda: self.stop(now=self.stopping))
        self.loop.on_signal(signal.SIGHUP, self._refuse_reload)
        self._check_server()

    def stop(self, *, now: bool = False) -> None:
        """Stops everything within the grace periods, or at once (`now`)."""
        if not self.stopping:
            log.info("stopping queues=%s", len(self.queues.by_name))
        self.stopping = True
        self.apps.stop()
        self.queues.stop(self._stop_services, now=now)

    def use_config(self, config: Config) -> None:
        """The apps, queues and schedules of a changed config file. The settings of the services stay."""
        self.config = config
        self.queues.use_config(config)
        self.apps.use_config(config)

    def fail(self, code: int, message: str) -> None:
        """Stops at once with this exit code."""
        log.critical("%s", message)
        self.exit_code = code
        self.stop(now=True)

    @property
    def ready(self) -> bool:
        """Whether all apps are read and all configured queues are open, or the time for that has passed."""
        seconds = self.loop.now() - self.started
        if not self.apps.settled:
            return seconds >= CENSUS_SECONDS
        if seconds >= READY_SECONDS:
            return True
        opening = (queue.opening and not queue.has_successors for queue in self.queues.by_name.values())
        return bool(self.services.redis_state["ok"]) and not any(opening)

    def stop_seconds(self) -> float:
        return self.queues.longest_grace_seconds() + STOP_MARGIN_SECONDS

    def summary(self) -> str:
        """The status line for systemd."""
        doing = ["stopping"] if self.stopping else [] if self.ready else ["starting"]
        jobs = self.queues.running_jobs()
        running = f"{jobs} job{'' if jobs == 1 else 's'} running"
        return ", ".join([*doing, *self._counts(), running, self._redis_summary()])

    def close(self) -> None:
        self.services.close()

    def _check_server(self) -> None:
        def checked(answer: Any) -> None:
            if self.stopping:
                return
            if isinstance(answer, IncompatibleServer):
                self.fail(ExitCode.CONFIG, str(answer))
            elif isinstance(answer, ForqError):
                if self.config.require_redis:
                    self.fail(ExitCode.NO_REDIS, str(answer))
                else:
                    self.services.redis_state = {"ok": False, "error": str(answer)}
                    self.loop.call_later(RETRY_SECONDS, self._check_server)
            else:
                self.services.redis_state = {"ok": True, "error": None, "server": answer["server"]}
                self.queues.open_all()
                # Last, because it takes long and nothing here waits for it.
                self.services.load_functions()

        self.services.clerk.request("check", {}, checked)

    def _stop_services(self) -> None:
        """Called when all processes of queues are gone. Pulse still has to recover their jobs."""
        deadline = self.loop.now() + LAST_RECOVERY_SECONDS
        services = self.services

        def when_recovered() -> None:
            waiting = (services.unrecovered and services.redis_state["ok"]) or self.apps.reading
            if waiting and self.loop.now() < deadline:
                self.loop.call_later(0.02, when_recovered)
            else:
                services.stop(self.loop.stop)

        services.evict(services.processor, "stopped", list(self.queues.by_name))
        when_recovered()

    def _pulse_event(self, message: dict[str, Any]) -> None:
        if message["event"] == "queue_gone":
            self.queues.gone(message["queue"], deleted=message["deleted"])
        elif message["event"] == "queue_found":
            self.queues.found(message["queue"], message["mode"])
        elif message["event"] == "queue_incomplete":
            self._repair(message["queue"])
        elif message["event"] == "probe":
            self.queues.probe(message["slots"], unread=message["unread"])
        elif message["event"] == "evicted":
            self.queues.rejoin()
        elif message["event"] == "suspects":
            self.queues.suspects_wait(message["queue"], message["waiting"])
        elif message["event"] == "remote_request":
            self.receive_remote(message["request"])
        elif message["event"] == "fail_jobs":
            self.queues.fail_jobs_wait(message["queue"])

    def _repair(self, name: str) -> None:
        """Repairs a queue whose client died while creating or deleting it. Works in slices; after a failure pulse
        reports the queue again."""
        if name in self._repairing:
            # Pulse repeats its report while the repair is under way.
            return

        def repaired(answer: Any) -> None:
            if not isinstance(answer, ForqError) and answer["more"]:
                self.services.clerk.request("repair", {"name": name}, repaired)
                return
            self._repairing.discard(name)
            if isinstance(answer, ForqError):
                log.warning("failed to repair queue; retrying queue=%s error=%s", name, answer)

        log.info("repairing half-created or half-deleted queue queue=%s", name)
        self._repairing.add(name)
        self.services.clerk.request("repair", {"name": name}, repaired)

    def _changed(self) -> None:
        """Updates the process title soon, once for many changes."""
        if self._title_timer is None:
            self._title_timer = self.loop.call_later(TITLE_SECONDS, self._show_title)

    def _show_title(self) -> None:
        self._title_timer = None
        setproctitle(f"forq: supervisor ({', '.join(self._counts())})")
        if any(queue.state == "flapping" for queue in self.queues.by_name.values()):
            # Nothing is reported when flapping ends.
            self._title_timer = self.loop.call_later(FLAPPING_CHECK_SECONDS, self._show_title)

    def _counts(self) -> list[str]:
        states = [queue.state for queue in self.queues.by_name.values()]
        troubles = [f"{states.count(state)} {state}" for state in ("flapping", "config_error") if state in states]
        unread = sum(app.error is not None for app in self.apps.all)
        return [
            f"{len(states)} queue{'' if len(states) == 1 else 's'}",
            *troubles,
            *([f"{unread} app{'' if unread == 1 else 's'} with errors"] if unread else []),
        ]

    def _redis_summary(self) -> str:
        state = self.services.redis_state
        if state["ok"]:
            return "Redis ok"
        return f"Redis is down: {state['error']}" if state["error"] else "Redis not reached yet"

    def _refuse_reload(self) -> None:
        log.warning(
            "SIGHUP ignored: settings are read at start only; restart forq to change them; for queues, schedules and "
            "apps run: forqctl apply"
        )
