"""Starts and supervises the service processes and the embedded server, and sends them the supervisor's requests."""

import hashlib
import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from forq.app_spec import AppSpec
from forq.errors import BackPressure, ForqError, RedisUnavailable
from forq.log_format import choose_format
from forq.procs.cgroups import Cgroup, Cgroups, Delegation
from forq.procs.context import Context
from forq.procs.loop import Loop, Timer
from forq.procs.minutes import MinuteRings
from forq.procs.scoreboard import AttemptStats, Role, Scoreboard
from forq.queue_spec import QueueSpec
from forq.redis_url import shown_url
from forq.settings import Value
from forq.supervisor import embedded, entry_points
from forq.supervisor.child import ChildTable
from forq.supervisor.config import BridgeConfig, Config
from forq.supervisor.service import OutputPipes, Service, WardenClient
from forq.supervisor.statedir import StateDir, new_processor_name
from forq.supervisor.unresponsive import ServiceWatch
from forq.version import PROTOCOL, VERSION

RETRY_SECONDS = 0.25
LOAD_RETRY_SECONDS = 1.0
# Delay before a failed write of the processor's name is repeated.
SAVE_RETRY_SECONDS = 5.0
# Pulse, scribe and logger get the list of all queues and check each: with a thousand queues once a second at most.
SERVE_SECONDS_PER_QUEUE = 0.001
# How long a stop waits for the logger to read the last output.
LAST_OUTPUT_SECONDS = 1.0

log = logging.getLogger("forq")


class Services:
    """All services of one supervisor.

    1. Creates the resources that children share: scoreboard, control groups, output pipes, the context.
    2. Starts and stops the services and the embedded server.
    3. Sends requests to pulse (recover, evict), and the list of served queues to pulse, scribe and logger.
    4. Keeps the state that services report: whether Redis is reachable, errors of the failed log.

    `served` returns the names of the served queues, and of those with a fail queue.
    """

    def __init__(
        self,
        config: Config,
        state: StateDir,
        loop: Loop,
        *,
        served: Callable[[], tuple[list[str], list[str]]],
        on_pulse: Callable[[dict[str, Any]], None],
    ) -> None:
        self._config = config
        self._state = state
        self._loop = loop
        self._served = served
        self._on_pulse = on_pulse
        self.redis_url = config.redis or f"unix://{state.redis_socket}"
        self.redis_state: dict[str, Any] = {"ok": None, "error": None}
        # By queue: why its failed log cannot be written.
        self.failed_log_errors: dict[str, str] = {}
        # Requests to pulse that are not yet done in Redis.
        self.unrecovered = 0
        # Whether the clerk is loading functions into Redis; None before the first time.
        self._loading_functions: bool | None = None
        self._load_missed = False
        self._serve_timer: Timer | None = None
        self._served_at = float("-inf")
        self.scoreboard = Scoreboard.create()
        # Opened here, so that the addresses stay bound when these processes die.
        self._metrics_listener = None if config.metrics is None else config.metrics.open(config.control_group)
        self._web_listener = None if config.web is None else config.web.open(config.control_group)
        self._watch_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._cgroups = _cgroups(config, state)
        self._delegation = None if self._cgroups is None else Delegation(self._cgroups)
        if self._delegation is not None:
            self._delegation.begin()
        self.children = ChildTable(loop, (state.tree_lock_fd, self._watch_fd), self._cgroups, tree_mark=state.tree_mark)
        processor, self.predecessor = state.take_processor()
        self.redis = self._embedded_redis() if config.redis is None else None
        self.context = self._context(processor)
        self.output_pipes = OutputPipes(self.context.logs_dir)
        self.watch = ServiceWatch(loop, lambda: self.all)
        self.pulse = self._service(
            "pulse", entry_points.run_pulse, on_event=self._pulse_event, on_start=self.send_served
        )
        self.scribe = self._service(
            "scribe", entry_points.run_scribe, on_event=self._scribe_event, on_start=self._scribe_started
        )
        self.clerk = self._service("clerk", entry_points.run_clerk)
        self.logger = self._service("logger", entry_points.run_logger, on_start=self._send_logger)
        self.warden = WardenClient(partial(self._service, "warden", entry_points.run_warden))
        self.children.request_warden = self.warden.request
        self.bridges = tuple(
            self._service(f"bridge {bridge.listen}", partial(self._run_bridge, bridge)) for bridge in config.bridges
        )
        self.metrics = () if self._metrics_listener is None else (self._metrics_service(self._metrics_listener),)
        self.web = () if self._web_listener is None else (self._web_service(self._web_listener),)

    def _context(self, processor: str) -> Context:
        config, state = self._config, self._state
        return Context(
            url=self.redis_url,
            prefix=config.prefix,
            processor=processor,
            about={
                "host": os.uname().nodename,
                "pid": os.getpid(),
                "version": VERSION,
                "protocol": PROTOCOL,
                "state_dir": str(state.path),
                "config": None if config.file is None else str(config.file),
                "remote_control": config.remote_control,
            },
            heartbeat_seconds=config.heartbeat_seconds,
            expiry_ms=round(config.expiry_seconds * 1000),
            max_queues=config.max_queues,
            control_socket=str(config.socket),
            health_seconds=0.0 if config.metrics is None else config.metrics.health_seconds,
            scoreboard=self.scoreboard,
            stats=None if config.metrics is None and config.web is None else AttemptStats(),
            rings=None if config.web is None else MinuteRings(config.max_queues),
            watch_fd=self._watch_fd,
            child_pids=self.children.pids,
            cgroups=self._cgroups,
            tree_lock_fd=state.tree_lock_fd,
            tree_mark=state.tree_mark,
            logs_dir=Path(state.path) / "logs",
            log_max=config.log_max,
            failed_log_max=config.failed_log_max,
            log_format=choose_format(config.log_format, 2, os.environ),
            log_level=config.log_level,
            redact=config.log_redact,
            redis_dir=None if self.redis is None else state.redis_dir,
            tracing=config.tracing,
            titles=config.titles,
        )

    @property
    def processor(self) -> str:
        return self.context.processor

    @property
    def all(self) -> tuple[Service, ...]:
        return (
            *(self.pulse, self.scribe, self.clerk, self.logger),
            *(*self.bridges, *self.metrics, *self.web, *self.warden.services),
        )

    def start(self) -> None:
        if self.redis is not None:
            self.redis.start()
        self.children.watch_stops()
        for service in self.all:
            service.start()
        self.watch.start()

    def stop(self, then: Callable[[], None]) -> None:
        left = {"logger", "redis"}
        self.watch.stop()

        def stopped(what: str) -> None:
            if what in left:
                left.remove(what)
                if what == "logger":
                    self.logger.kill()
                if not left:
                    then()

        for service in self.all:
            if service is not self.logger:
                service.kill()
        self.logger.request("drain", {}, lambda answer: stopped("logger"))
        self._loop.call_later(LAST_OUTPUT_SECONDS, lambda: stopped("logger"))
        if self.redis is not None:
            self.redis.stop(lambda: stopped("redis"))
        else:
            stopped("redis")

    def close(self) -> None:
        if self._config.metrics is not None and self._metrics_listener is not None:
            self._config.metrics.close(self._metrics_listener)
        if self._config.web is not None and self._web_listener is not None:
            self._config.web.close(self._web_listener)
        if self._cgroups is not None:
            self._cgroups.remove()
        if self._delegation is not None:
            self._delegation.end()

    def new_processor(self) -> str:
        """Takes a new processor name; returns the old one."""
        before = self.processor
        self.context = replace(self.context, processor=new_processor_name())
        self._save_processor()
        return before

    def _save_processor(self) -> None:
        """A failure is not fatal. But if this run is killed, its jobs come back only after `expiry`, because the next
        run does not know which processor to evict."""
        try:
            self._state.save_processor(self.processor)
        except ForqError as exc:
            log.error("%s; retrying in %.0f s", exc, SAVE_RETRY_SECONDS)
            self._loop.call_later(SAVE_RETRY_SECONDS, self._save_processor)

    def end_predecessor(self, queues: list[str]) -> None:
        """Evicts the processor of the last run on this state directory, if that run has certainly ended.

        The locks prove it, unless this directory is a copy: then the original may still run, and its heartbeats decide,
        as for any other supervisor. An embedded server is never used by another supervisor.
        """
        predecessor, self.predecessor = self.predecessor, None
        if predecessor is None:
            return
        if self.redis is not None or not predecessor.doubt:
            self.evict(predecessor.name, "supervisor_lost", queues)
            return
        log.warning(
            "jobs of the last run on this state directory come back when its heartbeats expire "
            "processor=%s expiry=%gs reason=%s",
            *(predecessor.name, self._config.expiry_seconds, predecessor.doubt),
        )

    def recover(self, params: dict[str, Any], then: Callable[[], None]) -> None:
        self._request_until_done("recover", params | {"output": self.output_pipes.directory(params["queue"])}, then)

    def evict(self, processor: str, cause: str, queues: list[str]) -> None:
        """Removes a dead processor from every queue now, without waiting for its expiry."""
        self._request_until_done("evict", {"processor": processor, "cause": cause, "queues": queues}, lambda: None)

    def beat(self, queue: str) -> None:
        """Requests a heartbeat of this queue now. Pulse then reports whether this processor was evicted, and how many
        jobs wait for helpers."""
        self.pulse.request("heartbeat", {"queues": [queue]})

    def _request_until_done(self, verb: str, params: dict[str, Any], then: Callable[[], None]) -> None:
        """Repeats the request while Redis is unavailable."""
        self.unrecovered += 1

        def done(answer: Any) -> None:
            if isinstance(answer, RedisUnavailable):
                self._loop.call_later(RETRY_SECONDS, send)
                return
            if isinstance(answer, ForqError):
                log.error("request to pulse failed verb=%s error=%s", verb, answer)
            self.unrecovered -= 1
            then()

        def send() -> None:
            self.pulse.request(verb, params, done, repeat=True)

        send()

    def send_served(self) -> None:
        """Sends the list of queues at the end of this pass, or later if it was sent recently: sending it for each of a
        thousand starting queues would be a million names."""
        if self._serve_timer is None:
            wait_seconds = self._served_at + SERVE_SECONDS_PER_QUEUE * len(self.output_pipes.names) - self._loop.now()
            self._serve_timer = self._loop.call_later(max(0.0, wait_seconds), self._send_served)

    def serve_new(self, queue: str, *, with_fail_queue: bool, then: Callable[[], None]) -> None:
        """Calls `then` when pulse watches the timers of this queue, or has died (its successor gets all queues)."""
        self.pulse.request("serve_also", {"queue": queue, "with_fail_queue": with_fail_queue}, lambda answer: then())

    def _send_served(self) -> None:
        self._serve_timer, self._served_at = None, self._loop.now()
        queues, failing = self._served()
        for service in (self.pulse, self.scribe):
            service.request("serve", {"queues": queues, "with_fail_queue": failing})
        self._send_logger()

    def _send_logger(self) -> None:
        """Includes queues whose handler cannot be imported: the logger has their output, too."""
        self.logger.request("serve", {"queues": self.output_pipes.names})

    def status_of_redis(self) -> dict[str, Any]:
        return {"url": shown_url(self.redis_url), "embedded": self.redis is not None, **self.redis_state}

    def load_functions(self) -> None:
        """Loads the functions that clients use into Redis. Repeated when Redis is back: it may have lost them."""
        self._loading_functions = True
        self._load_missed = False

        def loaded(answer: Any) -> None:
            self._loading_functions = False
            if isinstance(answer, RedisUnavailable | BackPressure):
                self._loop.call_later(LOAD_RETRY_SECONDS, self._load_functions_again)
            elif isinstance(answer, ForqError):
                log.error("failed to load the functions for clients into Redis error=%s", answer)
            elif self._load_missed:
                self.load_functions()

        self.clerk.request("offer", {}, loaded)

    def _load_functions_again(self) -> None:
        """Not before the first load, and once more after one that is under way."""
        if self._loading_functions is False:
            self.load_functions()
        else:
            self._load_missed = True

    def _scribe_started(self) -> None:
        self.failed_log_errors.clear()
        self.send_served()

    def _scribe_event(self, message: dict[str, Any]) -> None:
        if message["error"] is None:
            self.failed_log_errors.pop(message["queue"], None)
        else:
            self.failed_log_errors[message["queue"]] = f"{message['error']} (tried {message['failures']} times)"

    def _pulse_event(self, message: dict[str, Any]) -> None:
        if message["event"] == "redis_back":
            self._load_functions_again()
        elif message["event"] == "redis":
            self.redis_state = {**self.redis_state, "ok": message["ok"], "error": message["error"]}
        else:
            self._on_pulse(message)

    def _embedded_redis(self) -> embedded.EmbeddedRedis:
        program = embedded.find_server(self._config.embedded_server)
        self._state.make_redis_dir()
        return embedded.EmbeddedRedis(self.children, embedded.command(program, self._state))

    def child_main(
        self, name: str, spec: QueueSpec, options: Mapping[str, Value], role: Role, slots: tuple[int, ...], held: bool
    ) -> Callable[[socket.socket], int]:
        """The main function of a queue's process. As much as possible is prepared here in the parent: its memory is
        shared by all children."""
        settings = entry_points.ChildSettings(
            context=self.context,
            name=name,
            spec=spec,
            options=options,
            role=role,
            slots=slots,
            output=self.output_pipes.directory(spec.name),
            held=held,
        )
        return partial(entry_points.run_child, settings)

    def census_main(self, app: AppSpec, stack_fd: int) -> Callable[[socket.socket], int]:
        """The main function of the process that imports an app and reports its definitions."""
        self.output_pipes.open(app.output_name)
        self.send_served()
        settings = entry_points.CensusSettings(
            context=self.context,
            app=app,
            supervisor=os.getpid(),
            output=self.output_pipes.directory(app.output_name),
            stack_fd=stack_fd,
        )
        return partial(entry_points.run_census, settings)

    def _service(self, name: str, run: Callable[..., int], **how: Any) -> Service:
        """Each start of the service uses the context of that moment."""
        return Service(
            self.children, name, lambda leash: run(self.context, leash), on_stop=self.watch.check_soon, **how
        )

    def _metrics_service(self, listener: socket.socket) -> Service:
        def run(context: Context, leash: socket.socket) -> int:
            return entry_points.run_metrics(context, listener, leash)

        return self._service("metrics", run, keep_fds=(listener.fileno(),))

    def _web_service(self, listener: socket.socket) -> Service:
        config = self._config
        assert config.web is not None
        settings = config.web.settings(config.control_group, config.control_read_group)

        def run(context: Context, leash: socket.socket) -> int:
            return entry_points.run_web(context, settings, listener, leash)

        return self._service("web", run, keep_fds=(listener.fileno(),))

    def _run_bridge(self, bridge: BridgeConfig, context: Context, leash: socket.socket) -> int:
        return entry_points.run_bridge(
            entry_points.BridgeSettings(
                url=context.url,
                prefix=context.prefix,
                tick_seconds=bridge.tick_seconds,
                max_queues=context.max_queues,
                path=str(bridge.listen),
                leash=leash,
            )
        )


def _cgroups(config: Config, state: StateDir) -> Cgroups | None:
    """The control groups of this state directory. Kills processes of an earlier run that are left in them."""
    if config.cgroup == "off":
        return None
    name = "forq-" + hashlib.sha256(os.fsencode(state.path)).hexdigest()[:16]
    earlier = Cgroups.find(name)
    if earlier is None:
        return None
    Cgroup(earlier.path).kill()
    earlier.remove()
    return Cgroups.find(name)
