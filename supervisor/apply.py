"""Applies a changed config file to a running supervisor: reads the file, plans (plan.py), and carries out the steps.

1. Queues and apps are changed side by side. New processes import their code first; a queue that fails keeps its old
   processes and options, and the others go on.
2. Removals come last: an app that was just read may have taken over a queue that the file no longer has.
3. The new settings are in effect from the beginning. At the end, those of failed steps are undone, so that the next
   plan shows them again.

A supervisor that dies meanwhile leaves nothing behind: the next one reads the file.
"""

import logging
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from forq.errors import CannotImport, ConfigError, ForqError, PlanChanged, UnknownQueue
from forq.procs.ownership import changeable_by
from forq.queue_spec import QueueSpec
from forq.supervisor.apps import ServedApp
from forq.supervisor.config import Config
from forq.supervisor.plan import (
    ADOPT,
    CREATE,
    RELEASE,
    REPLACE,
    STOP,
    AppState,
    AppStep,
    Plan,
    QueueStep,
    Served,
    make_plan,
)
from forq.supervisor.queue import ServedQueue
from forq.supervisor.supervisor import Supervisor

log = logging.getLogger("forq")

# The parent parses the file itself: a larger one would stop its loop for more than half a second.
MAX_FILE_BYTES = 512 << 10

Done = Callable[[ForqError | None], None]


class ConfigChanges:
    """Plans and applies changes of the config file, one at a time.

    `read` returns the settings of this file as a start would read them; `started` are those of the start.
    """

    def __init__(self, supervisor: Supervisor, started: Config, read: Callable[[Path], Config]) -> None:
        self._supervisor = supervisor
        self._started = started
        self._read = read
        self._applying = False

    def plan(self, file: str | None) -> Plan:
        """The changes that this file needs; without one, the file of the start."""
        path = self._started.file if file is None else Path(file)
        if path is None:
            raise ConfigError("this supervisor was started without a config file; name one: forqctl apply FILE")
        _check_file(path)
        new = self._read(path)
        plan = make_plan(self._served(new), new, self._started)
        return replace(plan, warnings=(*plan.warnings, *_changeable_code(plan)))

    def apply(self, plan: Plan, seconds: float, then: Callable[[dict[str, Any]], None]) -> None:
        """Imports may take `seconds`. `then` gets the changes that were applied, and the failures."""
        self.check_idle()
        self._applying = True
        for change in plan.changes:
            log.info(
                "applying config file change=%s name=%s key=%s old=%s new=%s effect=%s",
                *(change.kind, change.name, change.key, change.old, change.new, change.effect),
            )

        def applied(failed: dict[str, ForqError]) -> None:
            self._applying = False
            then(_summary(plan, failed))

        try:
            _Applying(self._supervisor, plan, seconds, applied).run()
        except BaseException:
            # Otherwise an internal error would lock out all later requests.
            self._applying = False
            raise

    def check_idle(self) -> None:
        if self._supervisor.stopping:
            raise ForqError("the config file is not applied: this supervisor is stopping")
        if self._applying:
            raise ForqError("another request is applying the config file; try again when it has ended")

    def check_hash(self, plan: Plan, expected: object) -> None:
        if plan.hash != expected:
            raise PlanChanged(
                f"{plan.config.file}, or what the supervisor serves, has changed since the changes were shown; nothing "
                "was applied; run again: forqctl apply"
            )

    def _served(self, new: Config) -> Served:
        supervisor, queues = self._supervisor, self._supervisor.queues
        left = {spec.name for spec in supervisor.config.queues} - {spec.name for spec in new.queues}
        return Served(
            supervisor.config,
            {name: queue.definition for name, queue in queues.by_name.items()},
            frozenset(name for name, queue in queues.by_name.items() if queue.found),
            tuple(AppState(app.spec, app.definitions, dict(app.applied)) for app in supervisor.apps.all),
            {name: spec for name in sorted(left) if (spec := self._saved(name)) is not None},
        )

    def _saved(self, name: str) -> QueueSpec | None:
        mapping = self._supervisor.state.load_queue(name)
        where = f"{self._supervisor.state.path}/queues/{name}.json"
        return None if mapping is None else QueueSpec.from_mapping(name, mapping, where)


def _check_file(path: Path) -> None:
    """Other kinds of files, and large ones, could block the supervisor."""
    try:
        status = os.stat(path)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path}: not a file")
    if status.st_size > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes; restart the supervisor to use it")


def _changeable_code(plan: Plan) -> Iterable[str]:
    paths = {step.id: step.spec.path for step in plan.queue_steps if step.spec is not None}
    paths |= {step.id: step.new.path for step in plan.app_steps if step.new is not None and step.reads}
    for owner, directories in paths.items():
        for directory in directories:
            if (other := changeable_by(directory)) is not None:
                yield f"{owner}: its code in {directory} can be changed by {other}"


def _summary(plan: Plan, failed: dict[str, ForqError]) -> dict[str, Any]:
    for id, error in failed.items():
        log.error("cannot apply a change of the config file change=%s reason=%s", id, error)
    applied = [change for change in plan.changes if not failed.keys() & set(change.steps)]
    log.info("applied config file file=%s changes=%s failed=%s", plan.config.file, len(applied), len(failed))
    described = plan.describe()
    return {
        "file": described["file"],
        "applied": [change.describe() for change in applied],
        "failed": [
            {
                "step": id,
                "code": error.code,
                "message": str(error),
                "traceback": error.traceback if isinstance(error, CannotImport) else None,
            }
            for id, error in failed.items()
        ],
        "settings": described["settings"],
        "warnings": described["warnings"],
    }


def _without_result(then: Done) -> Callable[[Any], None]:
    return lambda answer: then(answer if isinstance(answer, ForqError) else None)


class _Applying:
    """One run of all steps of a plan."""

    def __init__(
        self, supervisor: Supervisor, plan: Plan, seconds: float, then: Callable[[dict[str, ForqError]], None]
    ) -> None:
        self._supervisor = supervisor
        self._queues = supervisor.queues
        self._apps = supervisor.apps
        self._plan = plan
        self._seconds = seconds
        self._then = then
        self._before = supervisor.config
        self._failed: dict[str, ForqError] = {}
        self._removed = [self._app(step) for step in plan.app_steps if step.new is None]

    def run(self) -> None:
        self._supervisor.use_config(self._plan.config)
        for app in self._removed:
            self._apps.disown(app)
        for step in self._plan.app_steps:
            if step.new is not None and step.definitions is not None and step.error is None:
                self._apps.configure(self._app(step), step.new, step.definitions)
        changes: list[tuple[str, Callable[[Done], None]]] = [
            (step.id, partial(self._change_queue, step))
            for step in self._plan.queue_steps
            if step.action not in (STOP, RELEASE)
        ]
        changes += [
            (step.id, partial(self._change_app, step))
            for step in self._plan.app_steps
            if step.reads or step.error is not None
        ]
        self._run_all(changes, self._remove)

    def _run_all(self, steps: list[tuple[str, Callable[[Done], None]]], then: Callable[[], None]) -> None:
        """Begins all steps; calls `then` when each has succeeded or failed."""
        left = {id for id, _ in steps}

        def done(id: str, error: ForqError | None) -> None:
            if id not in left:
                return
            left.discard(id)
            if error is not None:
                self._failed[id] = error
            if not left:
                then()

        for id, begin in steps:
            try:
                begin(partial(done, id))
            except ForqError as exc:
                done(id, exc)
        if not steps:
            then()

    def _app(self, step: AppStep) -> ServedApp:
        return next(app for app in self._apps.all if app.spec is step.old)

    def _change_app(self, step: AppStep, then: Done) -> None:
        def changed(answer: dict[str, Any] | ForqError) -> None:
            then(answer if isinstance(answer, ForqError) else None)

        assert step.new is not None
        if step.error is not None:
            raise step.error
        if step.old is None:
            self._apps.add(step.new, self._seconds, changed)
        else:
            self._apps.change(self._app(step), step.new, self._seconds, changed)

    def _change_queue(self, step: QueueStep, then: Done) -> None:
        spec = step.spec
        assert spec is not None

        def changed(error: ForqError | None) -> None:
            if error is None:
                self._apps.note_applied(spec)
            then(error)

        if step.error is not None:
            raise step.error
        if step.action == CREATE:
            if step.name in self._queues.by_name:
                raise ForqError(f"queue {step.name!r} is being created by another request; try again")
            self._queues.create(spec, self._seconds, changed)
            return
        queue = self._queues.find(step.name)
        if step.action == ADOPT:
            self._queues.adopt(queue, spec, changed)
        elif step.action == REPLACE:
            # Opening the queue sets its schedules, but does not remove those of a table that the file no longer has.
            self._queues.replace(queue, spec, self._seconds, partial(self._set_schedules, step, changed))
        else:
            set_all = partial(
                self._set_options, step, partial(self._set_schedules, step, partial(self._define, queue, spec, changed))
            )
            if queue.opening:
                # Redis may not have it yet.
                lost = UnknownQueue(f"queue {step.name!r} could not be opened, or was deleted in the meantime")
                queue.when_opened(set_all, partial(then, lost))
            else:
                set_all()

    def _set_options(self, step: QueueStep, then: Done) -> None:
        if step.options:
            params = {"name": step.name, "options": dict(step.options)}
            self._supervisor.services.clerk.request("set", params, _without_result(then))
        else:
            then(None)

    def _set_schedules(self, step: QueueStep, then: Done, error: ForqError | None) -> None:
        if error is not None or not step.schedules:
            then(error)
            return
        params = {
            "name": step.name,
            "schedules": self._plan.config.schedules.get(step.name, {}),
            "app_schedules": self._queues.app_schedules(step.name),
        }
        self._supervisor.services.clerk.request("set_config_schedules", params, _without_result(then))

    def _define(self, queue: ServedQueue, spec: QueueSpec, then: Done, error: ForqError | None) -> None:
        if error is None and self._queues.serves(queue):
            self._queues.set_definition(queue, spec)
        elif error is None:
            error = UnknownQueue(f"queue {spec.name!r} was deleted or replaced in the meantime")
        then(error)

    def _remove(self) -> None:
        unread = [step.id for step in self._plan.app_steps if step.reads and step.id in self._failed]
        removals: list[tuple[str, Callable[[Done], None]]] = [
            (step.id, partial(self._remove_queue, step))
            for step in self._plan.queue_steps
            if step.action in (STOP, RELEASE)
        ]
        removals += [(f"app {app.spec.label}", partial(self._remove_app, app)) for app in self._removed]
        if not unread:
            self._run_all(removals, self._finish)
            return
        for id, _ in removals:
            self._failed[id] = ForqError(f"{id} is not removed: {unread[0]} could not be read, and may need its queues")
        for app in self._removed:
            self._apps.own(app)
        self._finish()

    def _remove_app(self, app: ServedApp, then: Done) -> None:
        self._apps.remove(app, lambda: then(None))

    def _remove_queue(self, step: QueueStep, then: Done) -> None:
        queue = self._queues.by_name.get(step.name)
        if queue is None or self._queues.is_declared(step.name):
            # Deleted in the meantime, or taken over by an app.
            then(None)
        elif step.action == RELEASE:
            queue.found = True
            self._queues.set_definition(queue, QueueSpec(step.name, queue.spec.mode, None, {}, (), {}))
            then(None)
        else:
            self._queues.stop_serving(step.name, lambda: then(None))

    def _finish(self) -> None:
        self._supervisor.use_config(self._without_failed())
        self._then(self._failed)

    def _without_failed(self) -> Config:
        """The new settings, with the old queues and schedules where a step has failed."""
        config, before = self._plan.config, {spec.name: spec for spec in self._before.queues}
        failed = {step.name for step in self._plan.queue_steps if step.id in self._failed}
        queues = {spec.name: spec for spec in config.queues if spec.name not in failed}
        queues |= {name: spec for name, spec in before.items() if name in failed}
        schedules = {name: keys for name, keys in config.schedules.items() if name not in failed}
        schedules |= {name: keys for name, keys in self._before.schedules.items() if name in failed}
        return replace(config, queues=tuple(queues.values()), schedules=schedules)
