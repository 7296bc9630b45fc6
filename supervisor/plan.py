"""The difference between a config file and what the supervisor serves: changes as lines for people, and the steps that
make them. Pure functions; apply.py collects the state and carries out the steps."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from forq.app_spec import AppSpec, Definitions, configured
from forq.errors import ForqError, InvalidOption, QueueExists
from forq.queue_spec import QueueSpec
from forq.schedules import CONFIG, Schedule
from forq.settings import OPTIONS, SERVICE, SHARED_MODES, Value, fixed_options
from forq.supervisor.config import PIPELINE_QUEUE, Config, capacity_warning, check_size

# Effects of a change.
LIVE, NEW_PROCESSES, CREATED, UNSERVED, READ = "live", "new_processes", "created", "unserved", "read"
REFUSED, RESTART = "refused", "restart"
# What a step does with a queue: create it, set its options and schedules, replace its processes, take over the
# definition of one that another supervisor created, stop serving it, or leave its definition to the others.
CREATE, SET, REPLACE, ADOPT, STOP, RELEASE = "create", "set", "replace", "adopt", "stop", "release"
# Parts of a definition that only new processes use.
_CODE = ("handler", "handlers", "path", "fail_handler", "app")


@dataclass(frozen=True)
class Change:
    """One line of a plan. `name`: of the queue, app or setting. `key`: of the option, schedule or task. `old`, `new`:
    values as users write them. `steps`: ids of the steps that make it."""

    kind: str
    name: str
    key: str | None
    old: str | None
    new: str | None
    effect: str
    note: str | None = None
    steps: tuple[str, ...] = ()

    def describe(self) -> dict[str, str | None]:
        return {part: getattr(self, part) for part in ("kind", "name", "key", "old", "new", "effect", "note")}


@dataclass(frozen=True)
class QueueStep:
    """What to do with one queue. `options`: those to set in Redis. `schedules`: whether they change. `error`: why the
    change is not allowed; nothing is done then."""

    name: str
    action: str
    spec: QueueSpec | None = None
    options: Mapping[str, Value] = field(default_factory=dict)
    schedules: bool = False
    error: ForqError | None = None

    @property
    def id(self) -> str:
        return f"queue {self.name}"


@dataclass(frozen=True)
class AppStep:
    """What to do with one app. `old` None: it is new. `new` None: it is removed. `definitions`: those of its known
    code, with the options of the new file; None if the app has to be read."""

    old: AppSpec | None
    new: AppSpec | None
    definitions: Definitions | None = None
    error: ForqError | None = None

    @property
    def id(self) -> str:
        spec = self.new or self.old
        assert spec is not None
        return f"app {spec.label}"

    @property
    def reads(self) -> bool:
        return self.new is not None and self.definitions is None


@dataclass(frozen=True)
class AppState:
    """An app as it is served. `applied`: its queues, as they were last applied."""

    spec: AppSpec
    definitions: Definitions | None
    applied: Mapping[str, QueueSpec] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.definitions.name if self.definitions is not None else self.spec.label


@dataclass(frozen=True)
class Served:
    """What the supervisor serves. `queues`: their definitions, with options of `forqctl set`. `found`: those that
    another supervisor created. `saved`: the state directory's definitions of queues that the new file lacks."""

    config: Config
    queues: Mapping[str, QueueSpec]
    found: frozenset[str] = frozenset()
    apps: tuple[AppState, ...] = ()
    saved: Mapping[str, QueueSpec] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """`config`: the settings after all steps. `settings`: differences that need a restart of the supervisor."""

    config: Config
    changes: tuple[Change, ...]
    queue_steps: tuple[QueueStep, ...]
    app_steps: tuple[AppStep, ...]
    settings: tuple[Change, ...]
    warnings: tuple[str, ...]

    @property
    def hash(self) -> str:
        """Differs if the file or the state has changed in a way that matters."""
        config = self.config
        wanted = (config.file, config.apps, config.queues, config.overrides, config.schedules, self.changes)
        return hashlib.sha256(repr(wanted).encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        return {
            "file": str(self.config.file),
            "hash": self.hash,
            "changes": [change.describe() for change in self.changes],
            "settings": [change.describe() for change in self.settings],
            "warnings": list(self.warnings),
        }


def make_plan(served: Served, new: Config, started: Config) -> Plan:
    """`new`: the settings as a start would read them now. `started`: as this run has read them at its start."""
    return _Planning(served, _target(served.config, new)).plan(new, started)


def _target(current: Config, new: Config) -> Config:
    """The settings of the running service, with the apps and queues of the new file. The pipeline's queue belongs to
    the settings of the service."""
    own = tuple(spec for spec in current.queues if spec.name == PIPELINE_QUEUE)
    queues = (*(spec for spec in new.queues if spec.name != PIPELINE_QUEUE), *own)
    return replace(
        current, file=new.file, apps=new.apps, queues=queues, overrides=new.overrides, schedules=new.schedules
    )


class _Planning:
    """Collects the changes and steps from the served state to the target."""

    def __init__(self, served: Served, target: Config) -> None:
        self.served = served
        self.target = target
        self.changes: list[Change] = []
        self.app_steps: list[AppStep] = []
        self.queue_steps: list[QueueStep] = []
        self.in_file = {spec.name: spec for spec in target.queues if spec.name != PIPELINE_QUEUE}
        # Queues of apps, with their owners.
        self.owners = {name: app for app in served.apps for name in app.applied}
        # Definitions as they were last applied, without options of `forqctl set`.
        self.applied = {spec.name: spec for spec in served.config.queues}
        self.applied |= {name: spec for app in served.apps for name, spec in app.applied.items()}

    def plan(self, new: Config, started: Config) -> Plan:
        self._plan_apps()
        wanted, tasks = dict(self.served.saved), dict[str, frozenset[str]]()
        for definitions in [step.definitions for step in self.app_steps if step.definitions is not None]:
            wanted |= {spec.name: spec for spec in definitions.queues}
            tasks |= {queue: frozenset(own) for queue, own in definitions.own_options.items()}
        wanted |= self.in_file
        for name, spec in wanted.items():
            self._plan_queue(spec, tasks.get(name, frozenset()))
        declared = {spec.name for spec in self.served.config.queues if spec.name != PIPELINE_QUEUE}
        for name in sorted(declared - wanted.keys() - self.owners.keys()):
            self._plan_removal(name)
        self.changes.sort(key=lambda each: (each.kind in ("queue", "schedule"), each.name, each.kind, each.key or ""))
        return Plan(
            self.target,
            tuple(self.changes),
            tuple(self.queue_steps),
            tuple(self.app_steps),
            tuple(_changed_settings(started, new)),
            tuple(self._warnings(started)),
        )

    def _plan_apps(self) -> None:
        left = list(self.target.apps)
        for app in self.served.apps:
            new = next((spec for spec in left if _is_same_app(app.spec, spec)), None)
            if new is None:
                self._plan_removed_app(app)
            else:
                left.remove(new)
                self._plan_known_app(app, new)
        for new in left:
            step = AppStep(None, new)
            self.app_steps.append(step)
            self._add(step.id, "app", new.label, None, None, new.app, READ, "its queues are opened")

    def _plan_removed_app(self, app: AppState) -> None:
        step = AppStep(app.spec, None)
        self.app_steps.append(step)
        self._add(step.id, "app", app.label, None, app.spec.app, None, UNSERVED)
        for name in sorted(app.applied):
            if name not in self.in_file:
                self._add(step.id, "queue", name, None, f"app {app.label}", None, UNSERVED, _jobs_stay(name))

    def _plan_known_app(self, app: AppState, new: AppSpec) -> None:
        old, label = app.spec, app.label
        fields = [name for name in ("name", "app", "path") if getattr(old, name) != getattr(new, name)]
        if fields == ["name"] and label == new.name:
            # The app of a flag has a table now; its code is the same.
            fields = []
        if app.definitions is not None and not fields:
            self._plan_options_of_app(app, new)
        elif fields or old.task_options != new.task_options:
            step = AppStep(old, new)
            self.app_steps.append(step)
            for name in fields:
                texts = _shown(getattr(old, name)), _shown(getattr(new, name))
                self._add(step.id, "app", label, name, *texts, READ, "its queues get new processes")
            self._add_tasks(step, label, {})
            for name in sorted(app.applied):
                self.changes += [replace(each, steps=(step.id,)) for each in self._changed_schedules(name)]

    def _plan_options_of_app(self, app: AppState, new: AppSpec) -> None:
        """The code is known: only options of the file may differ."""
        assert app.definitions is not None
        step = AppStep(app.spec, new, app.definitions)
        try:
            definitions = configured(app.definitions.of_code or app.definitions, new, self.target.overrides)
            step = replace(step, definitions=definitions)
        except ForqError as exc:
            step = replace(step, error=exc)
            self._add(step.id, "app", app.label, None, None, None, REFUSED, str(exc))
        self.app_steps.append(step)
        if step.error is None:
            queues = {task: queue for queue, own in app.definitions.own_options.items() for task in own}
            self._add_tasks(step, app.label, queues)

    def _add_tasks(self, step: AppStep, label: str, queues: Mapping[str, str]) -> None:
        """`queues`: of the tasks, if the app is not read."""
        assert step.old is not None
        assert step.new is not None
        before, after = step.old.task_options, step.new.task_options
        for task in sorted(task for task in {*before, *after} if before.get(task) != after.get(task)):
            texts = _shown(before.get(task)), _shown(after.get(task))
            queue = queues.get(task)
            if queue is None:
                self._add(step.id, "task", label, task, *texts, READ)
            else:
                self._add(f"queue {queue}", "task", label, task, *texts, NEW_PROCESSES, f"queue {queue}")

    def _plan_queue(self, spec: QueueSpec, tasks: frozenset[str]) -> None:
        """`tasks`: those of its app that have this queue."""
        name, live = spec.name, self.served.queues.get(spec.name)
        schedules = self._changed_schedules(name)
        if live is None:
            error = _too_large(self.target, spec)
            self.queue_steps.append(QueueStep(name, CREATE, spec, error=error))
            effect, note = (CREATED, None) if error is None else (REFUSED, str(error))
            self._add(f"queue {name}", "queue", name, None, None, _code_of(spec), effect, note)
            self.changes += [replace(each, effect=effect, note=note) for each in schedules]
            return
        declaration = self._changed_declaration(name)
        if live == spec and not schedules and not declaration:
            # The usual case, without comparing each option of hundreds of queues.
            return
        options = self._changed_options(live, spec)
        own = [*declaration, *self._changed_code(live, spec), *options, *schedules]
        error = self._obstacle(live, spec) if own else None
        if error is not None:
            own = [replace(each, effect=REFUSED, note=str(error)) for each in own]
        self.changes += own
        same_tasks = all(live.task_options.get(task) == spec.task_options.get(task) for task in tasks)
        processes = any(each.effect == NEW_PROCESSES for each in own) or not same_tasks
        if own or live.task_options != spec.task_options:
            action = ADOPT if name in self.served.found else REPLACE if processes else SET
            values = self.target.options_of(spec)
            changed = {str(each.key): values[str(each.key)] for each in options}
            self.queue_steps.append(QueueStep(name, action, spec, changed, bool(schedules), error))

    def _plan_removal(self, name: str) -> None:
        """The queue stays in Redis with its jobs."""
        live = self.served.queues.get(name)
        if live is not None and live.mode in SHARED_MODES:
            note = f"no longer defined here; still served, as every supervisor serves queues of mode {live.mode}"
            self.queue_steps.append(QueueStep(name, RELEASE))
            self._add(f"queue {name}", "queue", name, None, _code_of(live), None, LIVE, note)
            return
        old, note = (None, "it was not served") if live is None else (_code_of(live), _jobs_stay(name))
        self.queue_steps.append(QueueStep(name, STOP))
        self._add(f"queue {name}", "queue", name, None, old, None, UNSERVED, note)

    def _add(
        self,
        step: str,
        kind: str,
        name: str,
        key: str | None,
        old: str | None,
        new: str | None,
        effect: str,
        note: str | None = None,
    ) -> None:
        self.changes.append(Change(kind, name, key, old, new, effect, note, (step,)))

    def _changed_declaration(self, name: str) -> list[Change]:
        """Whether the file defines it, besides what it defines."""
        if name in self.served.saved:
            note = "no longer in the file; defined by forqctl create again"
        elif name in self.in_file and name not in self.applied:
            where = "by another supervisor" if name in self.served.found else "with forqctl create"
            note = f"was created {where}; now the file defines it"
        else:
            return []
        return [Change("queue", name, None, None, None, LIVE, note, (f"queue {name}",))]

    def _changed_code(self, live: QueueSpec, spec: QueueSpec) -> list[Change]:
        fields = [name for name in ("mode", *_CODE) if getattr(live, name) != getattr(spec, name)]
        step = (f"queue {spec.name}",)
        return [
            Change(
                *("queue", spec.name, name, _shown(getattr(live, name)), _shown(getattr(spec, name)), NEW_PROCESSES),
                steps=step,
            )
            for name in fields
        ]

    def _changed_options(self, live: QueueSpec, spec: QueueSpec) -> list[Change]:
        """Compares the values in effect: an option may be set to its default."""
        if live.mode != spec.mode:
            return []
        name, applied = spec.name, self.applied.get(spec.name, live)
        old, new = self.served.config.options_of(live), self.target.options_of(spec)
        before = self.served.config.options_of(applied)
        changed = [option for option, value in new.items() if old[option] != value]
        return [
            Change(
                *("queue", name, option, OPTIONS[option].show(old[option]), OPTIONS[option].show(new[option])),
                LIVE if OPTIONS[option].live else NEW_PROCESSES,
                "was changed with forqctl set" if before.get(option) == new[option] else None,
                (f"queue {name}",),
            )
            for option in changed
        ]

    def _changed_schedules(self, name: str) -> list[Change]:
        before, after = self.served.config.schedules.get(name, {}), self.target.schedules.get(name, {})
        keys = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
        found = (_changed_schedule(name, key, before.get(key), after.get(key)) for key in keys)
        return [change for change in found if change is not None]

    def _obstacle(self, live: QueueSpec, spec: QueueSpec) -> ForqError | None:
        """Why the queue cannot be changed like this."""
        name = spec.name
        if live.mode != spec.mode:
            return QueueExists(f"queue {name!r} exists with mode {live.mode!r}; a queue's mode never changes")
        owner = self.owners.get(name)
        if owner is not None and name in self.in_file and any(_is_same_app(owner.spec, a) for a in self.target.apps):
            return QueueExists(
                f"queue {name!r} is a queue of app {owner.label!r}, too: remove the handler from [queues.{name}]"
            )
        old, new = self.served.config.options_of(live), self.target.options_of(spec)
        fixed = sorted(option for option in fixed_options(spec.mode) if option in new and old[option] != new[option])
        # The options of a queue that another supervisor created are not known here; Redis compares them.
        if fixed and name not in self.served.found:
            return InvalidOption(f"{fixed[0]} of queue {name!r} cannot be changed: it is fixed while the queue exists")
        return _too_large(self.target, spec)

    def _warnings(self, started: Config) -> Iterator[str]:
        target = self.target
        if target.file != started.file:
            yield f"a restart of the supervisor reads {started.file or 'no config file'}, not {target.file}"
        for step in self.queue_steps:
            if step.spec is not None and step.error is None:
                few = capacity_warning(target.options_of(step.spec), target.capacity)
                if few is not None:
                    yield f"queue {step.name}: {few}"
        known = {spec.name for step in self.app_steps if step.definitions for spec in step.definitions.queues}
        if not any(step.reads for step in self.app_steps):
            for name, override in target.overrides.items():
                if name not in known:
                    yield f"{override.where} has no handler, and no app has a queue of this name"


def _is_same_app(old: AppSpec, new: AppSpec) -> bool:
    return old.app == new.app or (old.name is not None and old.name == new.name)


def _jobs_stay(name: str) -> str:
    return f"its jobs stay in Redis; forqctl delete {name} deletes the queue"


def _code_of(spec: QueueSpec) -> str:
    return spec.handler or ", ".join(spec.handlers.values()) or f"mode {spec.mode}"


def _too_large(target: Config, spec: QueueSpec) -> ForqError | None:
    """A capacity that differs in the file counts only after a restart of the supervisor."""
    try:
        check_size(target.options_of(spec), target.capacity, f"queue {spec.name!r}")
    except InvalidOption as exc:
        return exc
    return None


def _changed_schedule(
    queue: str, key: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> Change | None:
    old = None if before is None else Schedule.from_mapping(key, before, CONFIG)
    new = None if after is None else Schedule.from_mapping(key, after, CONFIG)
    if old == new:
        return None
    fields = ["rule"]
    if old is not None and new is not None:
        fields = [name for name in Schedule.__slots__ if getattr(old, name) != getattr(new, name)]
    return Change(
        *("schedule", queue, key, _shown_schedule(old, fields), _shown_schedule(new, fields), LIVE),
        steps=(f"queue {queue}",),
    )


def _shown_schedule(schedule: Schedule | None, fields: list[str]) -> str | None:
    """Its rule, or the fields that differ."""
    if schedule is None:
        return None
    texts = [f"{name} = {_shown(getattr(schedule, name))}" for name in fields if name != "rule"]
    rule = str(schedule.rule) if schedule.rule.zone == "UTC" else f"{schedule.rule} ({schedule.rule.zone})"
    return ", ".join([rule, *texts] if "rule" in fields else texts)


def _shown(value: Any) -> str | None:
    """A value of a definition: text as it is, lists joined, others as JSON."""
    if value is None or value in ({}, ()):
        return None
    if isinstance(value, str):
        return value
    return ", ".join(value) if isinstance(value, tuple) else json.dumps(value, ensure_ascii=False, default=str)


def _changed_settings(started: Config, new: Config) -> Iterator[Change]:
    """Settings of the service, which are read at start only."""
    for name, row in SERVICE.items():
        part = f"{name}_seconds" if row.kind == "duration" else name
        old, wanted = getattr(started, part), getattr(new, part)
        if old != wanted:
            if row.kind == "path":
                old, wanted = str(old), str(wanted)
            yield Change("setting", name, None, row.show(old), row.show(wanted), RESTART)
    for section, part in (
        ("[metrics]", "metrics"),
        ("[web]", "web"),
        ("[[bridge]]", "bridges"),
        ("[pipeline]", "pipeline"),
    ):
        texts = _shown_section(getattr(started, part)), _shown_section(getattr(new, part))
        if texts[0] != texts[1]:
            yield Change("setting", section, None, *texts, RESTART)


def _shown_section(section: Any) -> str | None:
    """Its values; its place does not count."""
    if not section:
        return None
    if isinstance(section, tuple):
        return "; ".join(str(_shown_section(each)) for each in section)
    values = {name: value for name, value in vars(section).items() if name not in ("where", "host", "port", "path")}
    return ", ".join(f"{name.removesuffix('_seconds')} = {value}" for name, value in values.items())
