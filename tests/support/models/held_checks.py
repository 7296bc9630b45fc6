"""Checks the held jobs of a real queue: that edges, open dependencies and inputs belong together, and that they are
those of the model."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from forq.broker.record import unpack
from tests.support.drive.one_queue import OneQueue
from tests.support.models.queue import ModelQueue

MINUTE_MS = 60_000
HASHES = (
    "held",
    "held:jobs",
    "held:open",
    "inputs",
    "sources",
    "edges",
    "ends",
    "ends:old",
    "jobs",
    "active",
    "blocked",
)


@dataclass(frozen=True)
class Edge:
    group: int
    target: str
    nonce: str
    number: int
    use: int


@dataclass(frozen=True)
class Hold:
    nonce: str
    when: str
    use: int
    run_at: int
    count: int
    open: int


class Flows:
    """The keys of a queue about held jobs, parsed."""

    def __init__(self, queue: OneQueue) -> None:
        with queue.redis.pipeline(transaction=False) as look:
            for name in HASHES:
                look.hgetall(queue.key(name))
            look.lrange(queue.key("resolving"), 0, -1)
            *hashes, resolving = look.execute()
        self.raw: dict[str, dict[str, bytes]] = {
            name: {field.decode(): value for field, value in found.items()}
            for name, found in zip(HASHES, hashes, strict=True)
        }
        self.holds = {job_id: _hold(entry.decode()) for job_id, entry in self.raw["held"].items()}
        self.open = {_numbered(field): value.decode() for field, value in self.raw["held:open"].items()}
        # Source -> (group, number of edges, used).
        self.groups: dict[str, list[tuple[int, int, bool]]] = {
            source: [(int(group), int(count), used == "1") for group, count, used in _triples(groups.decode())]
            for source, groups in self.raw["sources"].items()
        }
        # Group -> (number of edges, index of the next one).
        self.resolving_count = len(resolving)
        self.resolving = {int(group): (int(count), int(at)) for group, count, at, *_ in map(_words, resolving)}
        # Group that holds a result -> how many of those that are left use it.
        self.users = Counter(holder for _, _, _, _, *holders in map(_words, resolving) for holder in holders)
        self.edges: dict[tuple[int, int], Edge] = {}
        self.results: dict[str, int] = {}
        for field, value in self.raw["edges"].items():
            group, _, index = field.partition(" ")
            if index == "left":
                self.results[group] = int(value)
            elif index == "result":
                assert group in self.users, f"the result of group {group} has no users"
            else:
                self.edges[int(group), int(index)] = _edge(int(group), value.decode())

    def is_used(self, source: str) -> bool:
        return any(used for _, _, used in self.groups.get(source, []))

    def remembered(self) -> dict[str, str]:
        return {job_id: how.decode() for job_id, how in (self.raw["ends:old"] | self.raw["ends"]).items()}

    def source_of(self, group: int) -> str | None:
        """None: its source has ended, and pulse still follows its edges."""
        return next((source for source, groups in self.groups.items() if group in [each[0] for each in groups]), None)

    def check(self) -> None:
        """What holds after each call, whatever has happened."""
        self._check_held()
        self._check_edges()
        self._check_open()
        self._check_inputs()

    def _check_held(self) -> None:
        assert set(self.raw["held:jobs"]) == set(self.holds), "each held id has a record, and no other has"
        for other in ("jobs", "active", "blocked"):
            assert not set(self.holds) & set(self.raw[other]), f"a held job is in {other}"

    def _check_edges(self) -> None:
        groups = [group for groups in self.groups.values() for group, _, _ in groups] + list(self.resolving)
        assert len(set(groups)) == len(groups), "a group has two sources"
        assert len(self.resolving) == self.resolving_count, "pulse follows a group twice"
        for source in self.groups:
            job_id, _, blocked = source.partition(" ")
            live = "blocked" if blocked else "held" if job_id in self.holds else "jobs"
            assert job_id in self.raw[live], f"the source {source!r} has ended"
        expected = {(group, at) for each in self.groups.values() for group, count, _ in each for at in _upto(count)}
        expected |= {(group, at) for group, (count, first) in self.resolving.items() for at in range(first, count + 1)}
        assert set(self.edges) == expected
        assert self.results == self.users
        assert all(f"{holder} result" in self.raw["edges"] for holder in self.users)
        for of_source in self.groups.values():
            for number, count, used in of_source:
                assert used == any(self.edges[number, at].use > 0 for at in _upto(count))

    def _check_open(self) -> None:
        """An open dependency of a held job has exactly one edge, at the live job that it waits for."""
        edges = Counter((edge.target, edge.nonce, edge.number) for edge in self.edges.values())
        by_slot = {(edge.target, edge.nonce, edge.number): edge for edge in self.edges.values()}
        for (job_id, number), dependency in self.open.items():
            hold = self.holds[job_id]
            assert 1 <= number <= hold.count
            slot = (job_id, hold.nonce, number)
            assert edges[slot] == 1, f"{edges[slot]} edges lead to dependency {number} of {job_id}"
            assert by_slot[slot].use == hold.use
            source = self.source_of(by_slot[slot].group)
            assert source is None or f"job {source.removesuffix(' blocked')}" == dependency
        assert Counter(job_id for job_id, _ in self.open) == Counter(
            {job_id: hold.open for job_id, hold in self.holds.items()}
        ), "a held job waits for nothing, or counts other dependencies than are open"

    def _check_inputs(self) -> None:
        for field in self.raw["inputs"]:
            job_id, number = _numbered(field) if " " in field else (field, 0)
            if job_id in self.holds:
                hold = self.holds[job_id]
                assert hold.use > 0
                assert 1 <= number <= hold.count
                assert (job_id, number) not in self.open
            else:
                assert job_id in self.raw["jobs"], f"inputs of {job_id}, which has ended"
                assert number <= int(self.raw["inputs"][job_id].split()[0])


class HeldChecks:
    def __init__(self, queue: OneQueue, model: ModelQueue) -> None:
        self._queue = queue
        self._model = model
        # How many ends are remembered at least; a test may lower it in the scripts.
        self.max_ends = 50_000

    def all(self) -> None:
        flows = Flows(self._queue)
        flows.check()
        self._check_holds(flows)
        self._check_used(flows)
        self._check_inputs(flows)
        self._check_ends(flows)

    def _check_holds(self, flows: Flows) -> None:
        held = self._model.held
        assert {job_id: (hold.when, hold.use, hold.count) for job_id, hold in flows.holds.items()} == {
            job_id: (hold.after.when, hold.after.use, len(hold.after.names)) for job_id, hold in held.items()
        }
        for job_id, hold in flows.holds.items():
            assert abs(hold.run_at - held[job_id].job.run_at) < MINUTE_MS, f"{job_id} has another time"
            job, record = held[job_id].job, unpack(flows.raw["held:jobs"][job_id])
            assert (record.data, record.priority) == (job.data, job.priority)
            assert record.options is None or record.options.pack() == job.options
            assert ((record.options and record.options.expires_ms) or 0) == held[job_id].expires_in
        sources = {
            (edge.target, edge.number): flows.source_of(edge.group)
            for edge in flows.edges.values()
            if (edge.target, edge.number) in flows.open and edge.nonce == flows.holds[edge.target].nonce
        }
        assert sources == {
            (job_id, number): each.source for job_id, hold in held.items() for number, each in hold.open().items()
        }

    def _check_used(self, flows: Flows) -> None:
        jobs = self._model.jobs
        used = {job_id for job_id, job in jobs.items() if job.used}
        used |= {job_id for job_id, hold in self._model.held.items() if hold.job.used}
        used |= {f"{job_id} blocked" for job_id, job in jobs.items() if job.blocked_used}
        assert {source for source in flows.groups if flows.is_used(source)} == used

    def _check_inputs(self, flows: Flows) -> None:
        expected: dict[str, str] = {}
        # Which of several deaths in one call came first decides what a job gets that runs after the first one.
        loose: set[str] = set()
        for job_id, job in self._model.jobs.items():
            if job.waited:
                expected[job_id] = f"{len(job.waited.after.names)} {job.waited.after.use}"
                expected |= {f"{job_id} {number}": text for number, text in job.waited.inputs.items()}
                loose |= {job_id} if job.waited.after.when == "dead" else set()
        for job_id, hold in self._model.held.items():
            expected |= {f"{job_id} {number}": text for number, text in hold.inputs.items()}
        found = {field: value.decode() for field, value in flows.raw["inputs"].items()}
        assert _without(found, loose) == _without(expected, loose)
        for job_id in loose:
            assert any(found.get(f"{job_id} {number}") == "dead " for number in (1, 2, 3))

    def _check_ends(self, flows: Flows) -> None:
        """The scripts may forget, but not the last ends, and remember nothing else."""
        found, known = flows.remembered(), self._model.ends
        assert found.items() <= known.items()
        assert len(flows.raw["ends"]) < self.max_ends
        if self._model.remembers:
            last = self._model.just_ended
            assert len(last) != 1 or last[0] in found
            assert len(found) >= min(len(known), self.max_ends)
        self._model.ends, self._model.just_ended = found, []

    def marks(self, jobs: list[bytes]) -> None:
        """What the records of claimed jobs tell their worker."""
        for job_id, record in zip(jobs[::2], jobs[1::2], strict=True):
            job = self._model.jobs[job_id.decode()]
            expected = ["w=1"] * job.used
            if job.waited:
                expected += [f"i={len(job.waited.after.names)}", f"I={job.waited.after.use}"]
            head = record.partition(b"\n")[0].decode()
            assert re.findall(r"\b[wiI]=\d+", head) == expected


def _upto(count: int) -> range:
    return range(1, count + 1)


def _words(text: Any) -> list[str]:
    return str(text.decode()).split(" ")


def _triples(groups: str) -> list[list[str]]:
    return [group.split(":") for group in groups.split(",")]


def _numbered(field: str) -> tuple[str, int]:
    job_id, _, number = field.partition(" ")
    return job_id, int(number)


def _edge(group: int, text: str) -> Edge:
    kind, target, nonce, number, use = text.split(" ")
    assert kind == "job"
    return Edge(group, target, nonce, int(number), int(use))


def _hold(entry: str) -> Hold:
    nonce, when, use, run_at, count, still_open = entry.split(" ")
    return Hold(nonce, when, int(use), int(run_at), int(count), int(still_open))


def _without(inputs: dict[str, str], jobs: set[str]) -> dict[str, str]:
    return {field: text for field, text in inputs.items() if field.partition(" ")[0] not in jobs or " " not in field}
