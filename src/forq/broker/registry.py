"""The registry of queues: create, configure, pause and delete queues, and purge what deleted ones held."""

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
from forq.broker.scripts import CHANGED, NO_QUEUE, OK, error_for, script
from forq.errors import InvalidData, UnknownQueue
from forq.redis_url import database_of
from forq.settings import SHARED_MODES, WORK, stored_fixed
from forq.values import check_queue_name, is_queue_name
from forq.version import PROTOCOL

# Jobs per call when a deleted queue is purged: at first, and at most.
FIRST_PURGED, MOST_PURGED = 4, 500
PURGE_CHUNKS = 20
# Attempts to create a queue while other clients delete it.
CREATE_TRIES = 10
_DELETING = b"deleting"

# A job dropped by a deletion, as a line of the failed log.
Dropped = dict[str, object]


class Registry:
    """All queues of a prefix.

    A queue's entry in the registry and its own keys may be on different nodes, so creating and deleting take several
    calls. A crash in between leaves an incomplete queue; `repair` finishes the work.
    """

    def __init__(self, link: Link, prefix: str) -> None:
        self._link = link
        self._prefix = prefix
        self._key = registry_key(prefix)

    def names(self) -> dict[str, str]:
        """Every queue with its mode; `deleting` while it is being deleted. Skips invalid names, which forq did not
        write."""
        texts = [part.decode(errors="replace") for part in self._link.call("HGETALL", self._key)]
        entries = zip(texts[::2], texts[1::2], strict=True)
        return {name: entry.partition(" ")[0] for name, entry in entries if is_queue_name(name)}

    def mode(self, name: str) -> str:
        mode = self._link.call("HGET", f"{queue_base(self._prefix, name)}:options", "mode")
        if mode is None:
            raise error_for(name, [NO_QUEUE])
        return str(mode.decode())

    def served(self, name: str) -> bool:
        """Whether any supervisor serves the queue, according to heartbeats."""
        return bool(self._link.call("ZCARD", f"{queue_base(self._prefix, name)}:processors"))

    def unserved(self, served: Collection[str]) -> dict[str, str]:
        """The queues of shared modes that are not in `served`, with their modes."""
        found = {name: mode for name, mode in self.names().items() if mode in SHARED_MODES and name not in served}
        # A queue that is just being created or deleted may have an entry only.
        commands = [("EXISTS", f"{queue_base(self._prefix, name)}:options") for name in found]
        replies = self._link.pipeline(commands) if commands else []
        return {name: mode for (name, mode), exists in zip(found.items(), replies, strict=True) if exists}

    def queues_without_supervisor(self, served: Collection[str]) -> list[str]:
        """The queues of mode work that are not in `served` and have no supervisor with a current heartbeat."""
        others = sorted(name for name, mode in self.names().items() if mode == WORK and name not in served)
        if not others:
            return []
        now = now_ms(self._link, self._key)
        commands = [("ZCOUNT", f"{queue_base(self._prefix, name)}:processors", now, "+inf") for name in others]
        return [name for name, alive in zip(others, self._link.pipeline(commands), strict=True) if not alive]

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
        """Creates the queue, or joins an existing one, and sets `options`. True if it was created.

        Options that are fixed for a queue of this mode are only compared if it exists (QueueExists).
        `fail_options`: also creates a fail queue with these options.
        `reopening`: UnknownQueue if the queue was deleted; it is created again if its data was lost.
        `joining`: UnknownQueue unless the queue exists.

        The registry entry comes first: after a crash the next create completes it, or `repair` removes it. If the queue
        is deleted meanwhile, it starts over.
        """
        check_queue_name(name)
        base = queue_base(self._prefix, name)
        # The channels of a queue carry the number of its database.
        database = {"db": database_of(self._link.url)}
        reply: list[Any] = [CHANGED]
        for _ in range(CREATE_TRIES):
            deleted, freed = self._link.pipeline([("GET", f"{base}:deleted"), ("GET", f"{base}:freed")], at=base)
            if reopening and deleted is not None:
                raise UnknownQueue(f"queue {name!r} was deleted")
            if joining:
                self.mode(name)
            reserved = self._link.run(script("reserve"), self._key, name, mode, max_queues)
            if reserved[0] != OK:
                raise error_for(name, reserved)
            seen = b"%s %s" % (deleted or b"", freed or b"")
            calls = [(base, *_create_args(mode, seen, defaults, {**options, **database}))]
            if fail_options is not None:
                calls.append((f"{base}:fail", *_create_args("fail", b"", defaults, {**fail_options, **database})))
            reply, *fail_queue_replies = self._link.run_atomic(script("create"), calls)
            if reply[0] != CHANGED:
                break
        for created in (reply, *fail_queue_replies):
            if created[0] != OK:
                raise error_for(name, created)
        return bool(reply[1])

    def configure(self, name: str, options: Mapping[str, object], fail_options: Mapping[str, object]) -> None:
        """Changes options of a queue, and of its fail queue if it has one."""
        for queue, changes in ((name, options), (fail_queue(name), fail_options)):
            flat = [part for pair in changes.items() for part in pair]
            reply = self._link.run(script("configure"), queue_base(self._prefix, queue), *flat) if flat else [OK]
            if reply[0] != OK and queue == name:
                raise error_for(name, reply)

    def delete(self, name: str, *, force: bool) -> int:
        """Deletes the queue; returns the number of jobs dropped. `purge` does the rest, also after a crash."""
        check_queue_name(name)
        base = queue_base(self._prefix, name)
        epoch = self._link.call("HGET", f"{base}:options", "epoch") or b""
        # A half-deleted queue has no epoch; then this call finishes its registry entry.
        reply = self._link.run_atomic(script("delete"), [(base, epoch, int(force)), (f"{base}:fail", "", 1)])[0]
        if reply[0] not in (OK, NO_QUEUE):
            raise error_for(name, reply)
        entry = self._link.call("HGET", self._key, name)
        if reply[0] == NO_QUEUE and entry is None:
            raise error_for(name, reply)
        if entry is not None:
            self._mark_deleting(name, entry, epoch)
            self._remember(name)
        return int(reply[1]) if reply[0] == OK else 0

    def _mark_deleting(self, name: str, entry: bytes, epoch: bytes) -> None:
        if not entry.startswith(_DELETING):
            self._link.run(script("retire"), self._key, name, entry, b"%s %s" % (_DELETING, epoch))

    def incomplete(self, names: Mapping[str, str]) -> dict[str, str]:
        """The half-created and half-deleted queues among `names`, with their entries."""
        calls = [("EXISTS", f"{queue_base(self._prefix, name)}:options") for name in names]
        found = self._link.pipeline(calls) if calls else []
        deleting = _DELETING.decode()
        return {
            name: entry
            for (name, entry), exists in zip(names.items(), found, strict=True)
            if not exists or entry.startswith(deleting)
        }

    def repair(self, name: str, log: Callable[[list[Dropped]], None]) -> bool:
        """Finishes an interrupted deletion, or removes the entry of an interrupted creation.

        Returns True while there is more to do: call it again. A client that is still creating the queue starts over.
        """
        base = queue_base(self._prefix, name)
        entry = self._link.call("HGET", self._key, name)
        if entry is None:
            return False
        if not self._link.call("EXISTS", f"{base}:options"):
            self._mark_deleting(name, entry, self._link.call("GET", f"{base}:deleted") or b"")
        return self.purge(name, log)

    def deleted(self) -> list[str]:
        """Deleted queues whose journals may still exist. Some may have been created again."""
        names = self._link.call("ZRANGE", deleted_queues_key(self._prefix), 0, -1)
        return [name.decode() for name in names if is_queue_name(name.decode(errors="replace"))]

    def was_deleted(self, name: str) -> bool:
        """Whether a queue of this name was deleted within the last 8 days. It may have been created again."""
        return self._link.call("ZSCORE", deleted_queues_key(self._prefix), name) is not None

    def _remember(self, name: str) -> None:
        self._link.run(script("remember"), deleted_queues_key(self._prefix), name)

    def purge(self, name: str, log: Callable[[list[Dropped]], None]) -> bool:
        """Passes the jobs of a deleted queue to `log`, removes them and frees the queue's name.

        Does a slice of the work. Returns True while there is more to do: call it again.
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
            # Again, because the client that deleted the queue may have died before.
            self._remember(name)
        # If the queue exists again, this restores its entry, which was marked too late.
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
        """The unwritten lines of dead jobs. Another supervisor may be purging the same queue."""
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
    """The server's time, which heartbeats use; in a cluster that of the node with this key."""
    seconds, micros = map(int, link.call("TIME", at=at))
    return seconds * 1000 + micros // 1000


def _next_count(count: int, read: list[bytes]) -> int:
    """How many entries to read next, so that a call reads at most READ_BYTES."""
    size = sum(map(len, read))
    return max(1, min(MOST_PURGED, 4 * count, count * READ_BYTES // max(size, 1)))


def _create_args(
    mode: str, seen: bytes, defaults: Mapping[str, object], options: Mapping[str, object]
) -> tuple[object, ...]:
    names = stored_fixed(mode)
    fixed = {option: value for option, value in options.items() if option in names}
    others = {option: value for option, value in options.items() if option not in names}
    args: list[object] = [PROTOCOL, mode, len(defaults), len(fixed), seen]
    for option, value in [*defaults.items(), *fixed.items(), *others.items()]:
        args += (option, value)
    return tuple(args)


def _dropped(name: str, field: bytes, packed: bytes) -> Dropped:
    # A job that was blocked behind an active one has the field "ID blocked".
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
        "enqueued_at": record.enqueued_us / 1e6,
        "data": record.data,
    }


def _dropped_dead(name: str, member: bytes, packed: bytes) -> Dropped:
    record, error, _ = read_dead(packed)
    job_id, _, fence = member.rpartition(b"@")
    # The fence identifies duplicate lines about the same death.
    return _dropped(name, job_id, record) | {"error": error, "fence": int(fence) if fence.isdigit() else None}
