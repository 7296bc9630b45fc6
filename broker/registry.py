"""Which queues exist: create, delete, pause, and the trash of deleted ones."""

from collections.abc import Callable, Collection, Mapping

from forq.broker.codes import NO_QUEUE, OK, error_for
from forq.broker.dead import read_dead
from forq.broker.keys import (
    deleted_queues_key,
    fail_queue,
    queue_base,
    registry_key,
    trash_keys,
    trashed_outbox_name,
)
from forq.broker.link import Link
from forq.broker.outbox import MAX_LINES, forget, read_line
from forq.broker.record import unpack
from forq.broker.scripts import script
from forq.broker.server_url import database_of
from forq.broker.stored_options import stored_fixed
from forq.errors import InvalidData, UnknownQueue
from forq.names import check_queue_name, is_queue_name
from forq.options import SHARED_MODES
from forq.version import PROTOCOL

PURGE_CHUNK = 500
PURGE_CHUNKS = 20
_DELETING = "deleting"

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
        return {name: mode for name, mode in zip(texts[::2], texts[1::2], strict=True) if is_queue_name(name)}

    def mode(self, name: str) -> str:
        mode = self._link.call("HGET", f"{queue_base(self._prefix, name)}:options", "mode")
        if mode is None:
            raise error_for(name, [NO_QUEUE])
        return str(mode.decode())

    def unserved(self, served: Collection[str]) -> dict[str, str]:
        """The queues that every supervisor serves and that are not among these, with their modes."""
        found = {name: mode for name, mode in self.names().items() if mode in SHARED_MODES and name not in served}
        # Whoever makes or deletes a queue may be between its entry in the registry and the queue itself.
        asked = [("EXISTS", f"{queue_base(self._prefix, name)}:options") for name in found]
        there = self._link.pipeline(asked) if asked else []
        return {name: mode for (name, mode), exists in zip(found.items(), there, strict=True) if exists}

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

        The registry comes first: a crash in between leaves an entry that the next create completes.
        `fail_options`: with a fail queue that has these options.
        `reopening`: not if somebody has deleted the queue (UnknownQueue); only if it is there, or its data was lost.
        `joining`: only if it is there.
        """
        check_queue_name(name)
        if reopening and self._link.call("EXISTS", f"{queue_base(self._prefix, name)}:deleted"):
            raise UnknownQueue(f"queue {name!r} was deleted")
        if joining:
            self.mode(name)
        reply = self._link.run(script("reserve"), self._key, name, mode, max_queues)
        if reply[0] != OK:
            raise error_for(name, reply)
        if fail_options is not None:
            # Only of one that is made now: of one that is there, `pause` has seen to it, and may do so at this moment.
            paused = self._link.call("HGET", f"{queue_base(self._prefix, name)}:options", "paused") or 0
            self._make(fail_queue(name), "fail", {**defaults, "paused": paused}, fail_options)
        return self._make(name, mode, defaults, options)

    def _make(self, name: str, mode: str, defaults: Mapping[str, object], options: Mapping[str, object]) -> bool:
        names = stored_fixed(mode)
        fixed = {option: value for option, value in options.items() if option in names}
        others = {option: value for option, value in options.items() if option not in names}
        # What the queue publishes goes to channels of its database.
        others["db"] = database_of(self._link.url)
        args: list[object] = [PROTOCOL, mode, len(defaults), len(fixed)]
        for option, value in [*defaults.items(), *fixed.items(), *others.items()]:
            args += (option, value)
        reply = self._link.run(script("create"), queue_base(self._prefix, name), *args)
        if reply[0] != OK:
            raise error_for(name, reply)
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
        reply = self._link.run(script("delete"), queue_base(self._prefix, name), int(force))
        if reply[0] not in (OK, NO_QUEUE):
            raise error_for(name, reply)
        registered = self._link.run(script("retire"), self._key, name, _DELETING)[1]
        if reply[0] == NO_QUEUE and not registered:
            raise error_for(name, reply)
        if registered:
            self._remember(name)
        self._delete_fail_queue(name)
        return int(reply[1]) if reply[0] == OK else 0

    def deleted(self) -> list[str]:
        """Queues that were deleted and whose journals may still be there; some may exist again."""
        names = self._link.call("ZRANGE", deleted_queues_key(self._prefix), 0, -1)
        return [name.decode() for name in names if is_queue_name(name.decode(errors="replace"))]

    def _remember(self, name: str) -> None:
        self._link.run(script("remember"), deleted_queues_key(self._prefix), name)

    def _delete_fail_queue(self, name: str) -> None:
        """Its jobs are copies of what is in the failed log already."""
        base = queue_base(self._prefix, fail_queue(name))
        self._link.run(script("delete"), base, 1)
        for epoch in self._link.call("SMEMBERS", f"{base}:trash"):
            self._link.call("UNLINK", *trash_keys(base, epoch.decode()))
        self._link.call("DEL", f"{base}:trash")

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
        if self._link.call("HGET", self._key, name) != _DELETING.encode():
            return
        # Somebody may have made the queue again between its end and the mark in the registry.
        mode = self._link.call("HGET", f"{base}:options", "mode")
        if mode is None:
            # Once more: whoever deleted the queue may have died before it came to these.
            self._remember(name)
            self._delete_fail_queue(name)
            self._link.call("HDEL", self._key, name)
        else:
            self._link.run(script("retire"), self._key, name, mode)

    def _purge_hash(
        self, trash: str, read: Callable[[bytes, bytes], Dropped], log: Callable[[list[Dropped]], None]
    ) -> bool:
        cursor = b"0"
        for _ in range(PURGE_CHUNKS):
            cursor, flat = self._link.call("HSCAN", trash, cursor, "COUNT", PURGE_CHUNK)
            if flat:
                log([read(field, packed) for field, packed in zip(flat[::2], flat[1::2], strict=True)])
                self._link.call("HDEL", trash, *flat[::2])
            if cursor == b"0":
                self._link.call("UNLINK", trash)
                return False
        return True

    def _purge_lines(self, name: str, base: str, trash: str, log: Callable[[list[Dropped]], None]) -> bool:
        """Jobs that had failed, and whose lines nobody had written yet. Somebody else may be doing the same."""
        for _ in range(PURGE_CHUNKS):
            lines = self._link.call("LRANGE", f"{base}:{trash}", 0, MAX_LINES - 1)
            if not lines:
                return False
            log([read_line(name, line) for line in lines])
            forget(self._link, base, trash, lines)
        return True

    def pause(self, name: str, *, paused: bool) -> None:
        reply = self._link.run(script("pause"), queue_base(self._prefix, name), int(paused))
        if reply[0] != OK:
            raise error_for(name, reply)
        self._link.run(script("pause"), queue_base(self._prefix, fail_queue(name)), int(paused))


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
