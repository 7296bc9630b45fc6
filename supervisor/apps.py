"""The apps of this supervisor: reads their definitions, opens their queues, and restarts them with new code."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from forq.app_spec import AppSpec, Definitions, configured
from forq.errors import CannotImport, ConfigError, ForqError, RedisUnavailable, UnknownApp
from forq.procs.backoff import Backoff
from forq.procs.loop import Loop, Timer
from forq.queue_spec import QueueSpec
from forq.supervisor.census import CENSUS_SECONDS, Census, CensusResult
from forq.supervisor.config import Config, capacity_warning, check_size
from forq.supervisor.queues import AppQueue, Queues
from forq.supervisor.services import RETRY_SECONDS, Services
from forq.supervisor.statedir import StateDir

log = logging.getLogger("forq")

# Pauses before an app that could not be read at start is read again.
FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0
RETRY_SPREAD = 0.2

# Called when a restart is over: with its summary, or with the reason if it failed.
Restarted = Callable[["dict[str, Any] | ForqError"], None]


class ServedApp:
    """One app: its last definitions, and the reason if the last reading failed.

    `specs`: its queues by name. `applied`: those among them that are served, as they were last applied. `files`: of the
    modules that it has imported.
    """

    def __init__(self, spec: AppSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.definitions: Definitions | None = None
        self.specs: dict[str, QueueSpec] = {}
        self.applied: dict[str, QueueSpec] = {}
        self.error: dict[str, Any] | None = None
        self.files: frozenset[str] = frozenset()
        self.census: Census | None = None
        self.backoff = Backoff(FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS, spread=RETRY_SPREAD)
        self.timer: Timer | None = None
        # Whether it was read once, successfully or not.
        self.was_read = False
        # Restarts requested while it was being read or restarted: seconds for the import, callback.
        self.waiting: list[tuple[float, Restarted]] = []
        self.restarting = False

    @property
    def label(self) -> str:
        return self.name or self.spec.app

    @property
    def state(self) -> str:
        if self.definitions is not None:
            return "running"
        return "config_error" if self.error is not None else "reading"

    def describe(self, *, traces: bool) -> dict[str, Any]:
        error = self.error
        return {
            "name": self.name,
            "app": self.spec.app,
            "state": self.state,
            "queues": sorted(self.specs),
            "error": error if error is None or traces else {**error, "traceback": None},
        }


class Apps:
    """All apps.

    1. Reads each at start, in parallel. One that cannot be read is read again after a pause; the others go on.
    2. Opens the queues of an app, with the options of its code and of the config file, and sets its schedules.
    3. Restarts an app: reads its new definitions first. If that fails, nothing changes.
    """

    def __init__(
        self,
        config: Config,
        state: StateDir,
        loop: Loop,
        services: Services,
        queues: Queues,
        changed: Callable[[], None],
    ) -> None:
        self.all = [ServedApp(spec) for spec in config.apps]
        self._config = config
        self._state = state
        self._loop = loop
        self._services = services
        self._queues = queues
        self._changed = changed
        self._stopping = False
        # Called with each app after it was read.
        self.on_read: list[Callable[[ServedApp], None]] = []

    @property
    def settled(self) -> bool:
        """Whether each app was read once, successfully or not."""
        return all(app.was_read for app in self.all)

    @property
    def reading(self) -> bool:
        return any(app.census is not None for app in self.all)

    def start(self) -> None:
        for app in self.all:
            self._read(app, CENSUS_SECONDS, partial(self._read_at_start, app))

    def stop(self) -> None:
        """Kills the processes that read apps."""
        self._stopping = True
        for app in self.all:
            self._cancel(app, "this supervisor is stopping")

    def _cancel(self, app: ServedApp, reason: str) -> None:
        waiting, app.waiting = app.waiting, []
        for _, then in waiting:
            then(ForqError(f"app {app.label!r} is not restarted: {reason}"))
        if app.timer is not None:
            app.timer.cancel()
        if app.census is not None:
            app.census.cancel(reason)

    def find(self, name: object) -> ServedApp:
        for app in self.all:
            if name is not None and name in (app.name, app.spec.app):
                return app
        known = ", ".join(app.label for app in self.all) or "none"
        raise UnknownApp(f"this supervisor has no app {name!r}; it has: {known}")

    def tasks_overriding(self, queue: str, option: str) -> list[str]:
        """The tasks of this queue for whose jobs this option of the queue has no effect."""
        owner = self._queues.of_apps.get(queue)
        definitions = [app.definitions for app in self.all if owner is not None and app.name == owner.app]
        return definitions[0].tasks_overriding(queue, option) if definitions and definitions[0] is not None else []

    def use_config(self, config: Config) -> None:
        """The queues and overrides of a changed config file, for the next reading of each app."""
        self._config = config

    def add(self, spec: AppSpec, seconds: float, then: Restarted) -> None:
        """Reads a new app and opens its queues. One that cannot be read is forgotten."""
        app = ServedApp(spec)
        self.all.append(app)

        def added(answer: "dict[str, Any] | ForqError") -> None:
            if app.definitions is None:
                self.all.remove(app)
            then(answer)

        self.restart(app, seconds, added)

    def change(self, app: ServedApp, spec: AppSpec, seconds: float, then: Restarted) -> None:
        """Reads the app as `spec` configures it, and restarts its queues without options of `forqctl set`. If it cannot
        be read, nothing changes."""
        if app.census is not None or app.restarting:
            raise ForqError(f"app {app.label!r} is being read or restarted; try again")
        old, known, applied = app.spec, app.definitions, app.applied
        app.spec = spec
        app.applied = {name: queue.spec for name, queue in self._queues.by_name.items() if name in applied}

        def changed(answer: "dict[str, Any] | ForqError") -> None:
            if app.definitions is known:
                app.spec, app.applied = old, applied
            then(answer)

        self.restart(app, seconds, changed)

    def configure(self, app: ServedApp, spec: AppSpec, definitions: Definitions) -> None:
        """Sets the options of a changed config file for code that is known. The caller changes the queues."""
        app.spec, app.definitions = spec, definitions
        app.specs = {queue.name: queue for queue in definitions.queues}

    def note_applied(self, spec: QueueSpec) -> None:
        for app in self.all:
            if spec.name in app.specs:
                app.applied[spec.name] = spec

    def disown(self, app: ServedApp) -> None:
        """Lets another app or the config file take over its queues, which are still served."""
        for name in app.specs:
            self._queues.of_apps.pop(name, None)

    def own(self, app: ServedApp) -> None:
        """The inverse of disown, for queues that nothing else has taken over."""
        schedules = {} if app.definitions is None else app.definitions.schedules
        for name in app.specs:
            if not self._queues.is_declared(name):
                self._queues.of_apps[name] = AppQueue(app.label, schedules.get(name, {}))

    def remove(self, app: ServedApp, then: Callable[[], None]) -> None:
        """Forgets an app after `disown`, and stops serving its queues, except those that were taken over."""
        self.all.remove(app)
        self._cancel(app, "its config file no longer has it")
        left = {name for name in app.specs if name in self._queues.by_name and not self._queues.is_declared(name)}

        def stopped(name: str) -> None:
            left.discard(name)
            if not left:
                then()

        for name in sorted(left):
            self._queues.stop_serving(name, partial(stopped, name))
        if not left:
            then()

    def restart(self, app: ServedApp, seconds: float, then: Restarted) -> None:
        """Reads the new definitions, then opens new queues, restarts the others, and stops those that are gone.
        Requests during a restart are served by another one afterwards, since the code may have changed again."""
        if self._stopping:
            then(ForqError(f"app {app.label!r} is not restarted: this supervisor is stopping"))
        elif app.census is not None or app.restarting:
            app.waiting.append((seconds, then))
            if app.census is not None and not app.restarting:
                # It may hang in older code.
                app.census.cancel("a restart was requested")
        else:
            app.restarting = True
            if app.timer is not None:
                app.timer.cancel()
            self._read(app, min(seconds, CENSUS_SECONDS), partial(self._read_for_restart, app, seconds, then))

    def _read(self, app: ServedApp, seconds: float, then: Callable[[CensusResult], None]) -> None:
        app.timer = None

        def done(result: CensusResult) -> None:
            app.census = None
            app.was_read = True
            app.files = result.files if result.definitions is not None else app.files | result.files
            if not self._stopping:
                then(self._with_current_options(app, result))
                for call in self.on_read:
                    call(app)
            self._changed()

        try:
            app.census = Census(
                self._services.children,
                app.spec,
                self._config.overrides,
                self._services.census_main,
                self._state.tree_lock_fd,
                done,
                seconds=seconds,
            )
        except OSError as exc:
            error = CannotImport(f"app {app.label!r} cannot be read: cannot start a process: {exc}")
            done(CensusResult(None, error, frozenset()))

    def _with_current_options(self, app: ServedApp, result: CensusResult) -> CensusResult:
        """Another config file may have been applied while the app was being read."""
        if result.definitions is None or result.definitions.of_code is None:
            return result
        try:
            definitions = configured(result.definitions.of_code, app.spec, self._config.overrides)
        except ForqError as exc:
            return replace(result, definitions=None, error=CannotImport(str(exc)))
        return replace(result, definitions=definitions)

    def _read_at_start(self, app: ServedApp, result: CensusResult) -> None:
        error = result.error or self._conflict(app, result.definitions)
        if error is None:
            assert result.definitions is not None
            self._accept(app, result.definitions)
            for spec in result.definitions.queues:
                self._open_queue(app, spec)
            self._restart_again(app)
            return
        if app.waiting:
            self._restart_again(app)
            return
        self._note_error(app, error, "retrying;")
        self._read_later(app)

    def _read_later(self, app: ServedApp) -> None:
        read = partial(self._read, app, CENSUS_SECONDS, partial(self._read_at_start, app))
        app.timer = self._loop.call_later(app.backoff.fail(), read)

    def _note_error(self, app: ServedApp, error: ForqError, then: str) -> None:
        trace = error.traceback if isinstance(error, CannotImport) else None
        repeated = app.error is not None and app.error["message"] == str(error)
        app.error = {"at": round(time.time(), 3), "message": str(error), "traceback": trace}
        shown = "" if trace is None or repeated else f"\n{trace}"
        log.error("cannot read app app=%s %s reason=%s%s", app.label, then, error, shown)

    def _conflict(self, app: ServedApp, definitions: Definitions | None) -> ForqError | None:
        """Why these definitions cannot be used beside the other apps and the config file; None if they can."""
        assert definitions is not None
        for other in self.all:
            if other is not app and other.name == definitions.name:
                return ConfigError(
                    f"apps {other.spec.app} and {app.spec.app} have the same name {definitions.name!r}; "
                    "rename one of them: forq.App(…)"
                )
        in_file = {spec.name for spec in self._config.queues}
        for spec in definitions.queues:
            owner = self._queues.of_apps.get(spec.name)
            if owner is not None and owner.app not in (app.name, definitions.name):
                return ConfigError(
                    f"queue {spec.name!r} of app {definitions.name!r} is also a queue of app {owner.app!r}: choose "
                    "another queue for one of them, @app.task(queue=…)"
                )
            if spec.name in in_file:
                return ConfigError(
                    f"queue {spec.name!r} of app {definitions.name!r} has a handler of its own in {self._config.file}: "
                    f"remove the handler from [queues.{spec.name}], or choose another queue: @app.task(queue=…)"
                )
            try:
                check_size(self._config.options_of(spec), self._config.capacity, f"queue {spec.name!r}")
            except ForqError as exc:
                return exc
        return None

    def _accept(self, app: ServedApp, definitions: Definitions) -> None:
        app.name = definitions.name
        app.definitions = definitions
        app.error = None
        app.backoff.reset()
        app.specs = {spec.name: spec for spec in definitions.queues}
        for name, spec in app.specs.items():
            self._queues.of_apps[name] = AppQueue(definitions.name, definitions.schedules.get(name, {}))
            if (warning := capacity_warning(self._config.options_of(spec), self._config.capacity)) is not None:
                log.warning("queue=%s %s", name, warning)
        log.info("read app app=%s queues=%s", definitions.name, sorted(app.specs))
        if all(other.definitions is not None for other in self.all):
            for name, override in self._config.overrides.items():
                if name not in self._queues.of_apps:
                    log.error("%s has no handler, and no app has a queue of this name", override.where)

    def _open_queue(self, app: ServedApp, spec: QueueSpec) -> None:
        if self._stopping or app.specs.get(spec.name) is not spec or spec.name in app.applied:
            return
        # A known one was created at run time, before the app defined it.
        known = self._queues.by_name.get(spec.name)
        if known is not None and known.has_successors:
            # Another request creates, restarts or changes it.
            self._loop.call_later(RETRY_SECONDS, partial(self._open_queue, app, spec))
            return
        app.applied[spec.name] = spec
        if known is not None and known.wanted:
            self._queues.replace(known, spec, None, partial(_log_error, spec.name))
            return
        if known is not None:
            known.abandon()
        self._queues.add_declared(spec)

    def _read_for_restart(self, app: ServedApp, seconds: float, then: Restarted, result: CensusResult) -> None:
        error = result.error or self._conflict(app, result.definitions)
        if error is not None:
            self._note_error(app, error, "restart failed;")
            then(_explained(app, error))
            self._end_restart(app)
            if app.definitions is None and not app.restarting and app in self.all:
                self._read_later(app)
            return
        assert result.definitions is not None
        before = app.specs
        self._accept(app, result.definitions)
        restarted = partial(self._restarted, app, then)
        _Restart(self._queues, app, before, seconds, applied=self._set_schedules, then=restarted).run()

    def _restarted(self, app: ServedApp, then: Restarted, answer: "dict[str, Any] | ForqError") -> None:
        then(answer)
        self._end_restart(app)

    def _end_restart(self, app: ServedApp) -> None:
        app.restarting = False
        self._restart_again(app)

    def _restart_again(self, app: ServedApp) -> None:
        """One restart for all requests that came during the last one."""
        waiting, app.waiting = app.waiting, []
        if not waiting:
            return

        def answer_all(answer: "dict[str, Any] | ForqError") -> None:
            for _, then in waiting:
                then(answer)

        self.restart(app, max(seconds for seconds, _ in waiting), answer_all)

    def _set_schedules(self, name: str) -> None:
        """Sets the schedules of a restarted queue, and removes those that its app no longer has. Retries while Redis is
        down."""

        def done(answer: Any) -> None:
            if isinstance(answer, RedisUnavailable) and not self._stopping:
                self._loop.call_later(RETRY_SECONDS, lambda: self._set_schedules(name))
            elif isinstance(answer, ForqError):
                log.warning("failed to set the schedules of an app queue=%s error=%s", name, answer)
            elif answer["unscheduled"]:
                removed = answer["unscheduled"]
                log.warning("removed schedules that the app no longer has queue=%s unscheduled=%s", name, removed)

        params = {"name": name, "schedules": self._queues.app_schedules(name)}
        self._services.clerk.request("set_app_schedules", params, done)


class _Restart:
    """The queues of one app during its restart. `applied` is called with each queue that runs the new code, or is no
    longer served; `then` when each has been restarted or has failed."""

    def __init__(
        self,
        queues: Queues,
        app: ServedApp,
        before: dict[str, QueueSpec],
        seconds: float,
        *,
        applied: Callable[[str], None],
        then: Restarted,
    ) -> None:
        self._applied = applied
        self._queues = queues
        self._app = app
        self._before = before
        self._seconds = seconds
        self._then = then
        # Queues of the config file whose handlers use the hooks of the app.
        self._others = {
            name: queue
            for name, queue in queues.by_name.items()
            if queue.spec.app == app.spec.app and name not in app.specs and name not in before
        }
        self._left = {*app.specs, *before, *self._others}
        self._opened: list[str] = []
        self._restarted: list[str] = []
        self._unserved: list[str] = []
        self._errors: dict[str, ForqError] = {}

    def run(self) -> None:
        if not self._left:
            self._finish()
            return
        for name in sorted(self._before):
            if name not in self._app.specs:
                self._queues.of_apps.pop(name, None)
                if self._queues.is_declared(name):
                    # The config file defines it now.
                    self._done(name, None)
                    continue
                self._unserved.append(name)
                if name in self._queues.by_name:
                    self._queues.stop_serving(name, partial(self._done, name, None))
                else:
                    self._done(name, None)
        for name, spec in self._app.specs.items():
            try:
                self._restart(name, spec)
            except ForqError as exc:
                self._done(name, exc)
        for name, queue in self._others.items():
            self._restarted.append(name)
            self._queues.restart(queue, self._seconds, partial(self._done, name))

    def _restart(self, name: str, spec: QueueSpec) -> None:
        queue = self._queues.by_name.get(name)
        then = partial(self._done, name)
        if queue is None:
            self._opened.append(name)
            self._queues.create(spec, self._seconds, then)
            return
        self._restarted.append(name)
        wanted = _with_options_set_by_users(spec, queue.definition, self._app.applied.get(name))
        if wanted == queue.definition:
            self._queues.restart(queue, self._seconds, then)
        else:
            self._queues.replace(queue, wanted, self._seconds, then)

    def _done(self, name: str, error: ForqError | None) -> None:
        if name not in self._left:
            return
        self._left.discard(name)
        if error is not None:
            self._errors[name] = error
        elif name in self._app.specs:
            self._app.applied[name] = self._app.specs[name]
            self._applied(name)
        elif name not in self._others:
            self._app.applied.pop(name, None)
            self._applied(name)
        if not self._left:
            self._finish()

    def _finish(self) -> None:
        if not self._errors:
            summary = {"opened": self._opened, "restarted": self._restarted, "unserved": self._unserved}
            self._then({"name": self._app.name, **summary})
            return
        first = next(iter(self._errors.values()))
        texts = "; ".join(str(error) for error in self._errors.values())
        trace = first.traceback if isinstance(first, CannotImport) else None
        self._then(CannotImport(f"app {self._app.label!r} is restarted only in part: {texts}", trace))


def _with_options_set_by_users(spec: QueueSpec, live: QueueSpec, applied: QueueSpec | None) -> QueueSpec:
    """Options of `forqctl set` last until the supervisor restarts."""
    if applied is None:
        return spec
    changed = {name: value for name, value in live.options.items() if applied.options.get(name) != value}
    return replace(spec, options={**spec.options, **changed})


def _explained(app: ServedApp, error: ForqError) -> ForqError:
    trace = error.traceback if isinstance(error, CannotImport) else None
    remains = "its queues keep running the old code" if app.definitions is not None else "nothing runs its tasks now"
    return CannotImport(f"app {app.label!r} is not restarted: {error}; {remains}", trace)


def _log_error(name: str, error: ForqError | None) -> None:
    if error is not None:
        log.error("cannot serve queue queue=%s reason=%s", name, error)
