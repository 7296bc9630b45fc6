"""The table of actions: what each does to which form fields, its question before, and its note after.

An action uses the verbs of forqctl. One that concerns many jobs handles a part per request, and its note asks whether
to continue, so no request is long and a crash leaves nothing half done that the next request would not find.
"""

import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl

from forq.errors import ForqError, UsageError
from forq.settings import OPTIONS
from forq.values import check_job_id, check_queue_name, check_schedule_key, show_time, shown
from forq.web.action_log import Plain
from forq.web.source import Source

FORM_TYPE = "application/x-www-form-urlencoded"
MAX_FIELDS = 2000
# Jobs of one request.
MAX_IDS = 1000
# Reads of a count before a question, each of at most 10,000 jobs.
COUNT_PAGES = 20
FILTER_FIELDS = ("id", "identifier", "type", "error", "group", "text", "since", "until")


class Form:
    """The fields of an action, checked as they are read."""

    def __init__(self, items: Sequence[tuple[str, str]]) -> None:
        self._items = items

    @classmethod
    def read(cls, content_type: str, body: bytes) -> "Form":
        """A form as browsers send it."""
        if content_type.partition(";")[0].strip().lower() != FORM_TYPE:
            raise UsageError(f"content type {shown(content_type)} is not allowed: {FORM_TYPE}")
        try:
            return cls(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS))
        except ValueError as exc:
            raise UsageError(f"the form cannot be read: {exc}") from exc

    def items(self) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self._items if name != "confirmed"]

    def all(self, name: str) -> list[str]:
        return [value for given, value in self._items if given == name and value != ""]

    def get(self, name: str) -> str | None:
        found = self.all(name)
        return found[0] if found else None

    @property
    def confirmed(self) -> bool:
        return self.get("confirmed") == "yes"

    @property
    def queue(self) -> str:
        return check_queue_name(self.get("queue"))

    @property
    def key(self) -> str:
        return check_schedule_key(self.get("key"))

    @property
    def ids(self) -> list[str]:
        """The selected jobs: ids, or id@fence of dead ones."""
        ids = list(dict.fromkeys(self.all("id")))
        if not ids:
            raise UsageError("no job is selected")
        if len(ids) > MAX_IDS:
            raise UsageError(f"{len(ids)} jobs are selected: at most {MAX_IDS} are allowed")
        for each in ids:
            check_job_id(each.rpartition("@")[0] if len(each) > 128 else each)
        return ids

    @property
    def id(self) -> str:
        return self.ids[0]

    @property
    def filter(self) -> dict[str, Any] | None:
        """The filter of the page that the action came from; None: it is about selected jobs."""
        if self.get("which") != "matching":
            return None
        found: dict[str, Any] = {}
        for name in FILTER_FIELDS:
            value = self.get(f"filter.{name}")
            if value is not None:
                found[name] = _time(value) if name in ("since", "until") else value
        return found

    @property
    def state(self) -> str | None:
        return self.get("state")

    @property
    def options(self) -> dict[str, str]:
        """Changed options. Fields `option.NAME` with the value before in `before.NAME`: an unchanged one is left out,
        so that a form of another hour changes nothing else back."""
        before = {name: value for name, value in self._items if name.startswith("before.")}
        return {
            name.removeprefix("option."): value
            for name, value in self._items
            if name.startswith("option.") and value.strip() != before.get(f"before.{name.removeprefix('option.')}")
        }

    @property
    def so_far(self) -> int:
        """The jobs that the parts before this one have changed."""
        text = self.get("so_far") or ""
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0

    @property
    def back(self) -> str:
        """The path of the page to return to. Only paths of the dashboard itself."""
        path = self.get("back") or "/"
        if not path.startswith("/") or path.startswith(("//", "/\\")) or any(ord(char) < 33 for char in path):
            return "/"
        # Browsers resolve dots, and would leave the place where the dashboard is mounted.
        steps = re.split(r"[/\\]", re.split("[?#]", path)[0].lower().replace("%2e", "."))
        return "/" if "." in steps or ".." in steps else path

    def target(self) -> dict[str, Plain]:
        """For the action log."""
        target: dict[str, Plain] = {
            name: self.get(name) for name in ("queue", "key", "state", "which") if self.get(name)
        }
        # Jobs that are still selected are left alone if the action is about all that match.
        return {**target, "ids": self.ids} if self.filter is None and self.all("id") else target

    def params(self) -> dict[str, Plain]:
        found: dict[str, Plain] = dict(self.options)
        found |= {f"filter.{name}": value for name, value in (self.filter or {}).items()}
        return found | ({"again": "yes"} if self.get("again") == "yes" else {})


def _time(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        # The action log could not store it.
        raise UsageError(f"time {shown(text)} is not allowed: seconds")
    return seconds


@dataclass(frozen=True)
class Note:
    """The result of an action. `fields`: of the form that continues with the next part, or None."""

    text: str
    fields: list[tuple[str, str]] | None = None


@dataclass(frozen=True)
class Question:
    title: str
    text: str
    button: str


@dataclass(frozen=True)
class Action:
    """`name`: the permission that it needs."""

    name: str
    run: Callable[[Source, Form], Awaitable[Note]]
    ask: Callable[[Source, Form], Awaitable[Question | None]] | None = None

    async def question(self, source: Source, form: Form) -> Question | None:
        return None if self.ask is None or form.confirmed else await self.ask(source, form)


def _on_queue(verb: str, done: str, **params: Any) -> Callable[[Source, Form], Awaitable[Note]]:
    async def run(source: Source, form: Form) -> Note:
        await source.change(verb, name=form.queue, **params)
        return Note(f"{done} queue {form.queue}")

    return run


async def _drain(source: Source, form: Form) -> Note:
    await source.drain(form.queue)
    return Note(f"draining queue {form.queue}: its state is draining until nothing is waiting or running")


async def _set(source: Source, form: Form) -> Note:
    if not form.options:
        raise UsageError("no option was changed")
    await _refuse_stale(source, form)
    answer = await source.change("queue.set", name=form.queue, options=form.options)
    changed = ", ".join(f"{name} = {value}" for name, value in form.options.items())
    until = " until the supervisor restarts (the config file defines the queue)" if (answer or {}).get("until") else ""
    warnings = "".join(f"; {warning}" for warning in (answer or {}).get("warnings", ()))
    return Note(f"set {changed} of queue {form.queue}{until}{warnings}")


async def _refuse_stale(source: Source, form: Form) -> None:
    """Another user may have changed an option since the form was made. Options that Redis does not store are not
    checked."""
    fields = await source.option_fields(form.queue)
    for name in form.options:
        before, option = form.get(f"before.{name}"), OPTIONS.get(name)
        if before is None or option is None or not option.stored:
            continue
        current = option.show(option.read_fields(fields))
        if current not in (before, form.options[name].strip()):
            raise UsageError(f"{name} was changed meanwhile, from {before} to {current}: reload the options")


async def _cancel(source: Source, form: Form) -> Note:
    if form.filter is not None:
        return await _part(source, form, "cancel", "cancelled")
    answer = await source.change("cancel", name=form.queue, ids=form.ids)
    return Note(_counted("cancelled", answer["cancelled"], len(form.ids), "running or gone meanwhile"))


async def _retry(source: Source, form: Form) -> Note:
    return await _to_dead(source, form, "dead.retry", "retried")


async def _discard(source: Source, form: Form) -> Note:
    return await _to_dead(source, form, "dead.discard", "discarded")


async def _to_dead(source: Source, form: Form, verb: str, done: str) -> Note:
    if form.filter is not None:
        return await _part(source, form, verb, done)
    answer = await source.change(verb, name=form.queue, ids=form.ids)
    reasons = "; ".join(sorted(set(answer["refused"].values()))[:3])
    return Note(_counted(done, answer["done"], len(form.ids), reasons))


async def _part(source: Source, form: Form, verb: str, done: str) -> Note:
    """Applies the verb to the matching jobs among the next 10,000."""
    params: dict[str, Any] = {"name": form.queue, "filter": form.filter, "after": form.get("after")}
    if verb == "cancel":
        params["state"] = form.state
    answer = await source.change(verb, **params)
    total = form.so_far + answer["cancelled" if verb == "cancel" else "done"]
    text = f"{done} {_jobs(total)} of queue {form.queue}"
    if left := len(answer["left"] if verb == "cancel" else answer["refused"]):
        text += f"; {_jobs(left)} of this part not: running, gone or changed meanwhile"
    if answer["next"] is None:
        return Note(text)
    kept = [(name, value) for name, value in form.items() if name not in ("after", "so_far")]
    return Note(text, [*kept, ("after", answer["next"]), ("so_far", str(total)), ("confirmed", "yes")])


async def _kill(source: Source, form: Form) -> Note:
    again = form.get("again") == "yes"
    how = "killed, to run again," if again else "killed"
    return await _each(form, how, lambda job: source.change("kill", name=form.queue, id=job, retry=again))


async def _run_now(source: Source, form: Form) -> Note:
    if form.filter is not None:
        raise UsageError("run now is for selected jobs: select them, up to a page at a time")
    return await _each(form, "made ready", lambda job: source.change("job.run", name=form.queue, id=job))


async def _each(form: Form, done: str, change: Callable[[str], Awaitable[object]]) -> Note:
    """One request per selected job. If none succeeds, the first error is raised."""
    errors: list[ForqError] = []
    for job in form.ids:
        try:
            await change(job)
        except ForqError as exc:
            errors.append(exc)
    if len(errors) == len(form.ids):
        raise errors[0]
    return Note(_counted(done, len(form.ids) - len(errors), len(form.ids), str(errors[0]) if errors else ""))


def _on_schedule(verb: str, done: str) -> Callable[[Source, Form], Awaitable[Note]]:
    async def run(source: Source, form: Form) -> Note:
        answer = await source.change(verb, name=form.queue, key=form.key)
        job = f": job {answer['id']}" if verb == "trigger" else ""
        return Note(f"{done} schedule {form.key} of queue {form.queue}{job}")

    return run


async def _ask_kill(source: Source, form: Form) -> Question:
    outcome = "runs again, uncounted" if form.get("again") == "yes" else "is cancelled"
    what = f"job {form.id}" if len(form.ids) == 1 else _jobs(len(form.ids))
    text = f"The process that runs it is killed, with everything it started. The job {outcome}."
    return Question(f"Kill {what} of queue {form.queue}?", text, "Kill")


async def _ask_discard(source: Source, form: Form) -> Question:
    question = await _ask_many(source, form, "Discard")
    if question is None:
        question = Question(f"Discard {_jobs(len(form.ids))} of queue {form.queue}?", "", "Discard")
    return replace(question, text=f"{question.text} Their records are removed for good.".strip())


async def _ask_many(source: Source, form: Form, verb: str) -> Question | None:
    """Only for jobs that match a filter: how many there are is not obvious."""
    if form.filter is None:
        return None
    count = await _count(source, form)
    given = form.get("about") or ", ".join(f"{name} = {value}" for name, value in _shown(form.filter).items())
    text = f"Those that match: {given}." if given else f"All {form.state or 'dead'} jobs of the queue."
    return Question(f"{verb} {count} of queue {form.queue}?", text, verb)


async def _ask_cancel(source: Source, form: Form) -> Question | None:
    return await _ask_many(source, form, "Cancel")


async def _ask_retry(source: Source, form: Form) -> Question | None:
    return await _ask_many(source, form, "Retry")


async def _count(source: Source, form: Form) -> str:
    """The number of jobs that match the filter, as text."""
    count, after = 0, None
    for _ in range(COUNT_PAGES):
        page = await source.redis(
            "jobs",
            name=form.queue,
            state=form.state or "dead",
            limit=1000,
            after=after,
            details=True,
            filter=form.filter,
        )
        count, after = count + len(page["jobs"]), page["next"]
        if after is None:
            return _jobs(count)
    return f"more than {_jobs(count)}"


def _shown(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: show_time(value) if name in ("since", "until") else value for name, value in given.items()}


def _jobs(count: int) -> str:
    return f"{count:,} {'job' if count == 1 else 'jobs'}"


def _counted(done: str, count: int, wanted: int, reason: str) -> str:
    left = wanted - count
    return f"{done} {_jobs(count)}" + (f"; {_jobs(left)} not: {reason}" if left else "")


async def _cancel_batch(source: Source, form: Form) -> Note:
    answer = await source.change("batch.cancel", name=form.queue, id=form.id)
    total = form.so_far + answer["cancelled"]
    text = f"cancelled {_jobs(total)} of batch {form.id}"
    if not answer["more"]:
        return Note(text)
    kept = [(name, value) for name, value in form.items() if name != "so_far"]
    return Note(text, [*kept, ("so_far", str(total)), ("confirmed", "yes")])


async def _ask_cancel_batch(source: Source, form: Form) -> Question:
    text = "Its members that have not begun are cancelled, in all queues. Running ones end; then the batch has failed."
    return Question(f"Cancel batch {form.id} of queue {form.queue}?", text, "Cancel batch")


ACTIONS: Mapping[str, Action] = {
    action.name: action
    for action in (
        Action("queue.pause", _on_queue("queue.pause", "paused")),
        Action("queue.resume", _on_queue("queue.resume", "resumed")),
        Action("queue.drain", _drain),
        Action("queue.restart", _on_queue("queue.restart", "restarted the processes of")),
        Action("queue.set", _set),
        Action("job.cancel", _cancel, _ask_cancel),
        Action("job.kill", _kill, _ask_kill),
        Action("job.retry", _retry, _ask_retry),
        Action("job.discard", _discard, _ask_discard),
        Action("job.run", _run_now),
        Action("batch.cancel", _cancel_batch, _ask_cancel_batch),
        Action("schedule.pause", _on_schedule("schedule.pause", "paused")),
        Action("schedule.resume", _on_schedule("schedule.resume", "resumed")),
        Action("schedule.trigger", _on_schedule("trigger", "triggered")),
    )
}
# Only the dashboard of a supervisor offers these.
NEED_SUPERVISOR = frozenset(("queue.drain",))
