"""Rules for the source of the Lua library."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from forq.broker import scripts
from forq.broker.keys import CHANNELS, CONTROL_CHANNELS, CONTROL_KEYS, QUEUE_KEYS, queue_base
from forq.broker.link import Link
from forq.broker.scripts import FILES, LUA_CONSTANTS, error_for, flags, script
from forq.errors import ForqError
from tests.support.drive.one_queue import OneQueue, one_queue
from tests.support.drive.release_queue import ReleaseQueue
from tests.support.models.mutants import forget_texts

LUA = Path(scripts.__file__).parent / "lua"
VERBS = sorted(flags())
# The cost of a call must not depend on the number of waiting jobs.
FORBIDDEN = [
    "KEYS",
    "SCAN",
    "HSCAN",
    "SSCAN",
    "ZSCAN",
    "HGETALL",
    "HVALS",
    "SMEMBERS",
    "SORT",
    "LREM",
    "LINSERT",
    "LPOS",
    "LSET",
    "FLUSHDB",
    "FLUSHALL",
]
IN_LUA = re.compile(r"function verbs\.(\w+)\(\)\n")


def source(name: str) -> str:
    return scripts._read(name)


def whole() -> str:
    return "".join(source(name) for name in FILES)


def without_comments(text: str) -> str:
    return re.sub(r"--[^\n]*", "", text)


def test_every_file_is_part_of_the_library_and_every_verb_is_registered() -> None:
    assert {path.stem for path in LUA.glob("*.lua")} == set(FILES)
    assert {"turn", "enqueue", "recover"} <= set(VERBS)
    assert sorted(IN_LUA.findall(whole())) == VERBS
    assert set(flags().values()) == {"", "allow-oom", "no-writes"}


@pytest.mark.parametrize("verb", VERBS)
def test_the_header_of_a_verb_has_purpose_keys_argv_and_returns(verb: str) -> None:
    before, _, after = whole().partition(f"function verbs.{verb}()\n")
    body = after.partition("\nend\n")[0]
    lines = before.rstrip("\n").splitlines()
    header: list[str] = []
    while lines and lines[-1].startswith("--"):
        header.insert(0, lines.pop())
    assert header[0].startswith(f"-- {verb}: ")
    wanted = ["KEYS[1]  ", "Returns  "] + ["ARGV     "] * ("ARGV" in without_comments(body))
    for part in wanted:
        assert any(line.startswith(f"-- {part}") for line in header), f"{verb} lacks {part.strip()}"


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_listed_in_keys(name: str) -> None:
    named = set(re.findall(r"\bkey\('([^']+)'\)", source(name)))
    assert named <= set(CONTROL_KEYS if name == "control" else QUEUE_KEYS)
    published = set(re.findall(r"'PUBLISH', (\S+)", source(name))) - {"queue.due_channel,"}
    assert "cached.due_channel = channel('due')" in source("call")
    channels = [f"channel('{channel.partition(':')[0]}" for channel in (*CHANNELS, *CONTROL_CHANNELS)]
    assert all(called.startswith(tuple(channels)) for called in published), "a channel lacks its database number"


def test_only_fixed_key_names_are_cached() -> None:
    """`key` caches names without a limit, so names with a job id or an awaiter must not go through it."""
    assert set(re.findall(r"key\('([^']+)' \.\.", whole())) == {"pending:"}


def test_keys_with_parts_are_built_as_listed() -> None:
    built = {f"{kind}:" for kind in re.findall(r"key_of\('([^']+)', ", whole())} | {"pending:"}
    names = (*QUEUE_KEYS, *CONTROL_KEYS)
    listed = {re.split(r"(?<=:)(?:[A-Z]|0-9)", name)[0] for name in names if re.search(r":(?:[A-Z]|0-9)", name)}
    assert built == listed


def test_the_library_caches_a_limited_number_of_queues(queue: OneQueue) -> None:
    """The limit is in call.lua. Measured as Lua memory, with a verb that caches only key names."""
    queue.enqueue("a")

    def cached_bytes() -> int:
        return int(queue.redis.info("memory")["used_memory_vm_functions"])

    def read_queues(numbers: range) -> None:
        bases = [queue_base("other:", f"q{number}") for number in numbers]
        queue.link.run_each(script("counts"), bases)

    read_queues(range(900))
    before = cached_bytes()
    for first in range(1000, 9000, 1000):
        read_queues(range(first, first + 1000))
    assert cached_bytes() < 3 * before
    assert queue.inspector.counts().waiting == 1


@pytest.mark.parametrize("name", FILES)
def test_a_verb_returns_only_defined_codes(name: str) -> None:
    code = without_comments(source(name))
    answered = set(re.findall(r"return \{ ([A-Z_]+)", code)) | set(re.findall(r"paused and ([A-Z_]+)", code))
    assert answered <= set(LUA_CONSTANTS)
    assert not re.search(r"return \{ -?\d", code)


@pytest.mark.spec("R1")
@pytest.mark.parametrize("name", FILES)
def test_no_verb_searches_a_list_or_the_keyspace(name: str) -> None:
    # The number of options does not depend on the jobs; graves are visited in slices.
    text = source(name).replace("redis.call('HGETALL', key('options'))", "")
    text = text.replace("redis.call('ZSCAN', key('graves'), at, 'COUNT', GRAVES_PER_CALL)", "")
    used = set(re.findall(r"redis\.call\('(\w+)'", text))
    assert not used & set(FORBIDDEN)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_runs_as_a_function_and_through_eval(redis_url: str, verb: str) -> None:
    """For an unknown queue both must return the same."""
    link = Link(redis_url)
    its, base = script(verb), queue_base("none:", "q")
    args = ["0"] * 10
    assert link.call("FUNCTION", "LOAD", "REPLACE", its.library, at=base) == its.name.replace(f"_{verb}", "").encode()
    answers = [
        link.call("FCALL", its.name, 1, base, *args),
        link.call("EVAL", its.source, 1, base, *args, verb),
    ]
    link.call("FUNCTION", "FLUSH", at=base)
    link.call("DEL", base)
    link.close()
    assert answers[0][0] == answers[1][0]
    assert isinstance(answers[0][0], int)


@pytest.mark.one_server
def test_a_server_has_one_library_with_a_function_for_each_verb(redis_url: str) -> None:
    link = Link(redis_url)
    link.call("FUNCTION", "FLUSH")
    for _ in range(2):
        link.load_library(script("turn"))
    [library] = link.call("FUNCTION", "LIST")
    found = dict(zip(library[::2], library[1::2], strict=True))
    functions = [dict(zip(function[::2], function[1::2], strict=True)) for function in found[b"functions"]]
    link.close()
    its = {function[b"name"].decode(): [flag.decode() for flag in function[b"flags"]] for function in functions}
    assert its == {script(verb).name: [flag] if flag else [] for verb, flag in flags().items()}


def test_a_library_with_another_text_has_other_function_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {script("turn").name}
    read = scripts._read
    try:
        monkeypatch.setattr(scripts, "_read", lambda name: read(name) + ("-- changed\n" if name == "turn" else ""))
        forget_texts()
        names.add(script("turn").name)
    finally:
        monkeypatch.undo()
        forget_texts()
    assert len(names) == 2


def test_every_refusal_code_has_its_own_error() -> None:
    refusals = {name: value for name, value in LUA_CONSTANTS.items() if value < 0}
    texts = {str(error_for("q", [value, b"1", 2, 1])) for value in refusals.values()}
    assert len(texts) == len(refusals)
    assert not any("unexpected" in text for text in texts)
    assert type(error_for("q", [-99])) is ForqError


def test_every_per_call_variable_is_reset_when_the_call_begins() -> None:
    """Variables of all verbs in `begin`, which every call runs, or with the summary, which `open` reads; those of
    turn.lua at the start of the turn."""
    declared = re.findall(r"^local ([a-z_, ]+|KEYS, ARGV)$", source("call"), re.MULTILINE)
    variables = {name for line in declared for name in line.split(", ")}
    assert {"KEYS", "events", "bucket", "has_progress"} <= variables
    begin = source("call").partition("local function begin(")[2].partition("\nend\n")[0]
    read = source("summary").partition("function summary.read()")[2].partition("\nend\n")[0]
    assert assigned(begin) | assigned(read) >= variables
    assert "version" in assigned(begin), "summary.save does nothing in calls that have not read the summary"
    assert not re.search(r"^local [a-z_, ]+$", whole().replace(source("call"), "").replace(source("turn"), ""), re.M)
    own = re.findall(r"^local ([a-z_, ]+)$", source("turn"), re.MULTILINE)
    start = source("turn").partition("function verbs.turn()")[2].partition("turns.register()")[0]
    assert assigned(start) >= {name for line in own for name in line.split(", ")}


def test_no_global_is_written() -> None:
    """Redis would refuse it in the middle of a call."""
    code = without_comments(whole())
    while (outside := re.sub(r"\{[^{}]*\}", "", code)) != code:
        code = outside
    declared = {name for line in re.findall(r"\blocal ([\w, ]*\w)", code) for name in line.split(", ")}
    given = {name for line in re.findall(r"\bfunction[ \w.]*\(([\w, ]*)\)", code) for name in line.split(", ")}
    assert len(declared) > 100
    assert assigned(code) <= declared | given


def assigned(code: str) -> set[str]:
    lines = re.findall(r"^\s*((?:[A-Za-z_]\w*, )*[A-Za-z_]\w*) = ", code, re.MULTILINE)
    return {name for line in lines for name in line.split(", ")}


def fail_calls_midway(url: str) -> None:
    """Makes calls about other queues that fail midway, after they have noted events and set once-per-call state."""
    other = ReleaseQueue(url, "on_request", name="other", rate_count=1, rate_ms=3_600_000, burst=5, max_active=3)
    broken = OneQueue(url, "broken", fail_handler=1)
    try:
        other.enqueue("a", "b")
        lease = other.ask("x")
        other.redis.set(other.key("awaiting"), "no zset")
        worker = broken.worker()
        broken.enqueue("c", "d")
        worker.turn(want=1)
        broken.redis.set(broken.key("dead:jobs"), "no hash")
        broken.redis.set(broken.key("stale"), "no hash")
        calls: tuple[Callable[[], object], ...] = (
            lambda: other.enqueue("e"),
            lambda: other.ask("y"),
            lambda: other.ack("x", lease),
            lambda: worker.turn(failed="c", kind="permanent"),
            lambda: broken.producer.cancel("d"),
            lambda: broken.recovery("p2").evict("broken", "p1", "supervisor_lost"),
        )
        ended = [1 for call in calls if not _succeeds(call)]
        assert len(ended) >= 4, "too few calls failed midway for this test to be valid"
    finally:
        other.redis.delete(*other.redis.keys("*{other}*"), *other.redis.keys("*{broken}*"))
        other.redis.hdel("forq:queues", "other", "broken")
        other.close()
        broken.close()


def _succeeds(call: Callable[[], object]) -> bool:
    with suppress(ForqError):
        call()
        return True
    return False


@pytest.mark.one_server  # the other queues must be on the same server
def test_state_of_a_failed_call_does_not_leak_into_the_next(redis_url: str) -> None:
    """The same steps leave the same journal and state with and without failed calls between them."""

    def steps(between: Callable[[], None]) -> tuple[object, ...]:
        with one_queue(redis_url, max_retries=1, min_backoff_ms=0, max_stalls=1) as queue:
            worker, answers = queue.worker(), []
            acts: tuple[Callable[[], object], ...] = (
                lambda: queue.enqueue(*"abcdef"),
                lambda: queue.enqueue("g", priority=2),
                lambda: queue.producer.cancel("b"),
                lambda: worker.turn(want=2),
                lambda: worker.turn(done="g", failed="a", want=2),
                lambda: queue.enqueue("c", if_exists="update"),
                lambda: queue.recover(worker, 0, running=True),
                lambda: queue.recovery().heartbeat(queue.name, 15_000, []).evicted,
                lambda: queue.worker("w2").turn(want=9),
                lambda: queue.inspector.counts().waiting,
            )
            for act in acts:
                between()
                answers.append(act())
            state, events = queue.state(), queue.journal_events()
            queue.registry.delete(queue.name, force=True)
            queue.redis.delete(*queue.redis.keys("*{q}*"))
            queue.redis.hdel("forq:queues", "q")
        return answers, state, events

    alone = steps(lambda: None)
    assert steps(lambda: fail_calls_midway(redis_url)) == alone
