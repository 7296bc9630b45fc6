"""Which queues exist: create, delete, pause, and the trash of deleted ones."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from forq.broker.dead import read_dead
from forq.broker.keys import (
    deleted_queues_key,
    fail_queue,
    queue_base,
    registry_key,
    trash_keys,
    trashed_outbox_name,
)
from forq.broker.link import READ_BYTES, Link
from forq.broker.outbox import forget, read_line
from forq.broker.record import unpack
from forq.broker.replies import CHANGED, NO_QUEUE, OK, error_for
from forq.broker.scripts import script
from forq.errors import InvalidData, UnknownQueue
from forq.redis_url import database_of
from forq.settings import SHARED_MODES, WORK, stored_fixed
from forq.values import check_queue_name, is_queue_name
from forq.version import PROTOCOL

# Jobs per call when a deleted queue is purged: as many at first, and at most.
FIRST_PURGED, MOST_PURGED = 4, 500
PURGE_CHUNKS = 20
# How often a queue is made anew while others delete it.
TRIES = 10
_DELETING = b"deleting"

# One job that a deletion dropped: what recovery needs.
Dropped = dict[str, object]


class Registry:
    def __init__(self, link: Link, prefix: str) -> None:
        self._link = link
        self._prefix = prefix
        self._key = registry_key(prefix)

    def names(self) -> dict[str, str]:
        """Every queue with its mode; `deleting` while one is taken away. What no queue can be called is left out: then
        somebody else has written that."""
        texts = [part.decode(errors="replace") for part in self._link.call("HGETALL", self._key)]
        entries = zip(texts[::2], texts[1::2], strict=True)
        return {name: entry.partition(" ")[0] for name, entry in entries if is_queue_name(name)}

    def mode(self, name: str) -> str:
        mode = self._link.call("HGET", f"{queue_base(self._prefix, name)}:options", "mode")
        if mode is None:
            raise error_for(name, [NO_QUEUE])
        return str(mode.decode())

    def served(self, name: str) -> bool:
        """Whether a supervisor runs the queue's jobs, as far as heartbeats tell."""
        return bool(self._link.call("ZCARD", f"{queue_base(self._prefix, name)}:processors"))

    def unserved(self, served: Collection[str]) -> dict[str, str]:
        """The queues that every supervisor serves and that are not among these, with their modes."""
        found = {name: mode for name, mode in self.names().items() if mode in SHARED_MODES and name not in served}
        # Whoever makes or deletes a queue may be between its entry in the registry and the queue itself.
        asked = [("EXISTS", f"{queue_base(self._prefix, name)}:options") for name in found]
        there = self._link.pipeline(asked) if asked else []
        return {name: mode for (name, mode), exists in zip(found.items(), there, strict=True) if exists}

    def queues_without_supervisor(self, served: Collection[str]) -> list[str]:
        """The queues of mode work that run nowhere: they are not among these, and no supervisor that has told of itself
        in time has them."""
        others = sorted(name for name, mode in self.names().items() if mode == WORK and name not in served)
        if not others:
            return []
        now = now_ms(self._link, self._key)
        asked = [("ZCOUNT", f"{queue_base(self._prefix, name)}:processors", now, "+inf") for name in others]
        return [name for name, alive in zip(others, self._link.pipeline(asked), strict=True) if not alive]

    def create(
        self,
        name: str,
        mode: str,
        max_queues: int,
        defaults: Mapping[str, object],
        options: Mapping[str, object],
        *,
        fail_options: Mapping[str, object] | None = None,
        reopening: bool = False,
        joining: bool = False,
    ) -> bool:
        """Makes the queue or joins it; then sets `options`. True if it was made.

        Of `options` those that are fixed for the life of a queue of this mode are only compared (QueueExists).

        The registry comes first: a crash in between leaves an entry that the next create completes, or `mend` removes.
        If somebody deletes the queue meanwhile, it begins again.
        `fail_options`: with a fail queue that has these options.
        `reopening`: not if somebody has deleted the queue (UnknownQueue); only if it is there, or its data was lost.
        `joining`: only if it is there.
        """
        check_queue_name(name)
        base = queue_base(self._prefix, name)
        # What the queue publishes goes to channels of its database.
        place = {"db": database_of(self._link.url)}
        reply: list[Any] = [CHANGED]
        for _ in range(TRIES):
            deleted, freed = self._link.pipeline([("GET", f"{base}:deleted"), ("GET", f"{base}:freed")], at=base)
            if reopening and deleted is not None:
                raise UnknownQueue(f"queue {name!r} was deleted")
            if joining:
                self.mode(name)
            reserved = self._link.run(script("reserve"), self._key, name, mode, max_queues)
            if reserved[0] != OK:
                raise error_for(name, reserved)
            seen = b"%s %s" % (deleted or b"", freed or b"")
            calls = [(base, *_creation(mode, seen, defaults, {**options, **place}))]
            if fail_options is not None:
                calls.append((f"{base}:fail", *_creation("fail", b"", defaults, {**fail_options, **place})))
            reply, *of_fail_queue = self._link.run_atomic(script("create"), calls)
            if reply[0] != CHANGED:
                break
        for each in (reply, *of_fail_queue):
            if each[0] != OK:
                raise error_for(name, each)
        return bool(reply[1])

    def configure(self, name: str, options: Mapping[str, object], fail_options: Mapping[str, object]) -> None:
        """Changes options of a queue, and of its fail queue if it has one."""
        for queue, changes in ((name, options), (fail_queue(name), fail_options)):
            flat = [part for pair in changes.items() for part in pair]
            reply = self._link.run(script("configure"), queue_base(self._prefix, queue), *flat) if flat else [OK]
            if reply[0] != OK and queue == name:
                raise error_for(name, reply)

    def delete(self, name: str, *, force: bool) -> int:
        """Ends the queue at once; how many jobs that dropped. `purge` finishes it, also after a crash."""
        check_queue_name(name)
        base = queue_base(self._prefix, name)
        epoch = self._link.call("HGET", f"{base}:options", "epoch") or b""
        # One that is deleted half way has no epoch; then this is about its entry.
        reply = self._link.run_atomic(script("delete"), [(base, epoch, int(force)), (f"{base}:fail", "", 1)])[0]
        if reply[0] not in (OK, NO_QUEUE):
            raise error_for(name, reply)
        entry = self._link.call("HGET", self._key, name)
        if reply[0] == NO_QUEUE and entry is None:
            raise error_for(name, reply)
        if entry is not None:
            self._mark(name, entry, epoch)
            self._remember(name)
        return int(reply[1]) if reply[0] == OK else 0

    def _mark(self, name: str, entry: bytes, epoch: bytes) -> None:
        if not entry.startswith(_DELETING):
            self._link.run(script("retire"), self._key, name, entry, b"%s %s" % (_DELETING, epoch))

    def incomplete(self, names: Mapping[str, str]) -> dict[str, str]:
        """Those that are in the registry and not there, or that somebody has begun to delete: with their entries."""
        asked = [("EXISTS", f"{queue_base(self._prefix, name)}:options") for name in names]
        there = self._link.pipeline(asked) if asked else []
        marked = _DELETING.decode()
        return {
            name: entry
            for (name, entry), exists in zip(names.items(), there, strict=True)
            if not exists or entry.startswith(marked)
        }

    def mend(self, name: str, log: Callable[[list[Dropped]], None]) -> bool:
        """Finishes what somebody has begun and left: a deletion, or a creation that got no further than the registry.

        True while there is more to do: call it again. Whoever is still at it begins again.
        """
        base = queue_base(self._prefix, name)
        entry = self._link.call("HGET", self._key, name)
        if entry is None:
            return False
        if not self._link.call("EXISTS", f"{base}:options"):
            self._mark(name, entry, self._link.call("GET", f"{base}:deleted") or b"")
        return self.purge(name, log)

    def deleted(self) -> list[str]:
        """Queues that were deleted and whose journals may still be there; some may exist again."""
        names = self._link.call("ZRANGE", deleted_queues_key(self._prefix), 0, -1)
        return [name.decode() for name in names if is_queue_name(name.decode(errors="replace"))]

    def _remember(self, name: str) -> None:
        self._link.run(script("remember"), deleted_queues_key(self._prefix), name)

    def purge(self, name: str, log: Callable[[list[Dropped]], None]) -> bool:
        """Writes what a deleted queue held through `log`, then forgets it and frees its name.

        It does a slice of the work and returns True while there is more: call it again.
        """
        base = queue_base(self._prefix, name)
        for epoch in self._link.call("SMEMBERS", f"{base}:trash"):
            jobs, dead = trash_keys(base, epoch.decode())
            if self._purge_hash(jobs, lambda field, packed: _dropped(name, field, packed), log):
                return True
            if self._purge_hash(dead, lambda field, packed: _dropped_dead(name, field, packed), log):
                return True
            if self._purge_lines(name, base, trashed_outbox_name(epoch.decode()), log):
                return True
            self._link.call("SREM", f"{base}:trash", epoch)
        self._free_name(name, base)
        return False

    def _free_name(self, name: str, base: str) -> None:
        entry = self._link.call("HGET", self._key, name)
        if entry is None or not entry.startswith(_DELETING):
            return
        mode = self._link.run(script("free"), base)[1]
        if not mode:
            # Once more: whoever deleted the queue may have died before that.
            self._remember(name)
        # If there is a queue of this name again, its entry was marked too late.
        self._link.run(script("retire"), self._key, name, entry, mode)

    def _purge_hash(
        self, trash: str, read: Callable[[bytes, bytes], Dropped], log: Callable[[list[Dropped]], None]
    ) -> bool:
        cursor, count = b"0", FIRST_PURGED
        for _ in range(PURGE_CHUNKS):
            cursor, flat = self._link.call("HSCAN", trash, cursor, "COUNT", count)
            count = _next_count(count, flat)
            if flat:
                log([read(field, packed) for field, packed in zip(flat[::2], flat[1::2], strict=True)])
                self._link.call("HDEL", trash, *flat[::2])
            if cursor == b"0":
                self._link.call("UNLINK", trash)
                return False
        return True

    def _purge_lines(self, name: str, base: str, trash: str, log: Callable[[list[Dropped]], None]) -> bool:
        """Jobs that had failed, and whose lines nobody had written yet. Somebody else may be doing the same."""
        count = FIRST_PURGED
        for _ in range(PURGE_CHUNKS):
            lines = self._link.call("LRANGE", f"{base}:{trash}", 0, count - 1)
            if not lines:
                return False
            count = _next_count(count, lines)
            log([read_line(name, line) for line in lines])
            forget(self._link, base, trash, lines)
        return True

    def pause(self, name: str, *, paused: bool) -> None:
        reply = self._link.run(script("pause"), queue_base(self._prefix, name), int(paused))
        if reply[0] != OK:
            raise error_for(name, reply)
        self._link.run(script("pause"), queue_base(self._prefix, fail_queue(name)), int(paused))


def now_ms(link: Link, at: str) -> int:
    """The server's time, by which processors have told of themselves; of a cluster that of the node with this key."""
    seconds, micros = map(int, link.call("TIME", at=at))
    return seconds * 1000 + micros // 1000


def _next_count(count: int, read: list[bytes]) -> int:
    """How many to read next, after so many gave this: a call should not read more than READ_BYTES."""
    size = sum(map(len, read))
    return max(1, min(MOST_PURGED, 4 * count, count * READ_BYTES // max(size, 1)))


def _creation(
    mode: str, seen: bytes, defaults: Mapping[str, object], options: Mapping[str, object]
) -> tuple[object, ...]:
    """The arguments of create.lua."""
    names = stored_fixed(mode)
    fixed = {option: value for option, value in options.items() if option in names}
    others = {option: value for option, value in options.items() if option not in names}
    args: list[object] = [PROTOCOL, mode, len(defaults), len(fixed), seen]
    for option, value in [*defaults.items(), *fixed.items(), *others.items()]:
        args += (option, value)
    return tuple(args)


def _dropped(name: str, field: bytes, packed: bytes) -> Dropped:
    # What was blocked behind an active job is in the trash under "ID blocked".
    job_id = field.decode(errors="replace").partition(" ")[0]
    try:
        record = unpack(packed)
    except InvalidData as exc:
        return {"queue": name, "id": job_id, "cause": "deleted", "error": str(exc)}
    return {
        "queue": name,
        "id": job_id,
        "identifier": record.identifier or job_id,
        "cause": "deleted",
        "priority": record.priority,
        "type": record.type,
        "enqueued_at": record.enqueued_ms / 1000,
        "data": record.data,
    }


def _dropped_dead(name: str, member: bytes, packed: bytes) -> Dropped:
    record, error, _ = read_dead(packed)
    job_id, _, fence = member.rpartition(b"@")
    # With its fence a line about the same death that is there already is known to be the same.
    return _dropped(name, job_id, record) | {"error": error, "fence": int(fence) if fence.isdigit() else None}
