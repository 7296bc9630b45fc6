"""Rules that every script keeps."""

import re
from pathlib import Path

import pytest

import forq.broker
from forq.broker.codes import LUA_CONSTANTS, error_for
from forq.broker.keys import CHANNELS, QUEUE_KEYS, queue_base
from forq.broker.link import Link
from forq.broker.scripts import as_function, script
from forq.errors import ForqError
from tests.support.one_queue import OneQueue

LUA = Path(forq.broker.__file__).parent / "lua"
SCRIPTS = sorted(path.stem for path in LUA.glob("*.lua"))
FILES = sorted(LUA.rglob("*.lua"))
assert len(SCRIPTS) > 30, f"no scripts in {LUA}"
# What one call does must not depend on how many jobs wait.
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


def without_comments(text: str) -> str:
    return re.sub(r"--[^\n]*", "", text)


def test_there_are_scripts() -> None:
    assert {"turn", "enqueue", "recover"} <= set(SCRIPTS)


@pytest.mark.parametrize("verb", SCRIPTS)
def test_a_script_says_what_it_does_takes_and_returns(verb: str) -> None:
    lines = (LUA / f"{verb}.lua").read_text().splitlines()
    assert re.fullmatch(r"#!lua( flags=(allow-oom|no-writes))?", lines[0])
    assert lines[1].startswith(f"-- {verb}: ")
    header = [line for line in lines if line.startswith("-- ")]
    wanted = ["KEYS[1]  ", "Returns  "] + ["ARGV     "] * ("ARGV" in without_comments("\n".join(lines)))
    for part in wanted:
        assert any(line.startswith(f"-- {part}") for line in header), f"{verb}.lua lacks {part.strip()}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_key_is_listed_in_keys(path: Path) -> None:
    named = set(re.findall(r"\bkey\('([^']+)'\)", path.read_text()))
    assert named <= set(QUEUE_KEYS)
    published = set(re.findall(r"'PUBLISH', (\S+)", path.read_text()))
    channels = [f"channel('{name.partition(':')[0]}" for name in CHANNELS]
    assert all(called.startswith(tuple(channels)) for called in published), "only on channels of its database"


def test_only_keys_that_stay_are_remembered() -> None:
    """`key` keeps the names it was given: those of a job or an awaiter would be ever more."""
    text = "".join(path.read_text() for path in FILES)
    assert set(re.findall(r"key\('([^']+)' \.\.", text)) == {"pending:"}


def test_keys_with_parts_are_built_as_listed() -> None:
    text = "".join(path.read_text() for path in FILES)
    built = {f"{kind}:" for kind in re.findall(r"key_of\('([^']+)', ", text)} | {"pending:"}
    listed = {re.split(r"(?<=:)(?:[A-Z]|0-9)", name)[0] for name in QUEUE_KEYS if re.search(r":(?:[A-Z]|0-9)", name)}
    assert built == listed


def test_of_very_many_queues_only_so_many_are_remembered(queue: OneQueue) -> None:
    """As many as base.lua says, and a few; a script that remembers nothing but its keys shows it in what it takes."""
    queue.enqueue("a")

    def remembered_bytes() -> int:
        return int(queue.redis.info("memory")["used_memory_vm_functions"])

    def look_at(numbers: range) -> None:
        bases = [queue_base("other:", f"q{number}") for number in numbers]
        queue.link.run_each(script("counts"), bases)

    look_at(range(900))
    before = remembered_bytes()
    for first in range(1000, 9000, 1000):
        look_at(range(first, first + 1000))
    assert remembered_bytes() < 3 * before
    assert queue.viewer.counts().waiting == 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_script_answers_only_with_codes_that_are_defined(path: Path) -> None:
    code = without_comments(path.read_text())
    answered = set(re.findall(r"return \{ ([A-Z_]+)", code)) | set(re.findall(r"paused and ([A-Z_]+)", code))
    assert answered <= set(LUA_CONSTANTS)
    assert not re.search(r"return \{ -?\d", code)


@pytest.mark.spec("R1")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_script_searches_a_list_or_the_keyspace(path: Path) -> None:
    # How many options there are does not depend on the jobs; graves are visited some per call.
    text = path.read_text().replace("redis.call('HGETALL', key('options'))", "")
    text = text.replace("redis.call('ZSCAN', key('graves'), at, 'COUNT', GRAVES_PER_CALL)", "")
    used = set(re.findall(r"redis\.call\('(\w+)'", text))
    assert not used & set(FORBIDDEN)


@pytest.mark.parametrize("verb", SCRIPTS)
def test_a_script_compiles_as_a_script_and_as_a_function(redis_url: str, verb: str) -> None:
    link = Link(redis_url)
    assert link.call("FUNCTION", "LOAD", "REPLACE", script(verb).library) == script(verb).name.encode()
    assert link.call("SCRIPT", "LOAD", script(verb).source)
    link.close()


def test_functions_and_constants_are_defined_once_and_variables_in_each_call(redis_url: str) -> None:
    link = Link(redis_url)
    source = """#!lua
-- counter: does not count
local STEP = 2
local first, seen = ARGV[1], {}
local last
local function add(text)
  seen[#seen + 1] = text .. STEP
  last = text
end
if first == 'early' then return { 'early', last } end
add(first)
for _, word in ipairs({ 'a' }) do
  add(word)
end
return { KEYS[1], last, #seen, seen[1] }
"""
    counter = as_function("counter", source)
    # What came before is not there any more, whatever way a call went.
    for word in ("x", "early", "y"):
        expected = [b"early"] if word == "early" else [b"base", b"a", 2, f"{word}2".encode()]
        assert link.run(counter, "base", word) == expected
        assert link.call("EVAL", counter.source, 1, "base", word) == expected
    link.close()


@pytest.mark.parametrize("line", ["local key = 1", "local base = 1\nlocal base = 2", "local error = 1"])
def test_a_name_that_would_hide_another_one_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="declared twice"):
        as_function("wrong", f"#!lua\n--@include base\n{line}\nreturn 1\n")


def test_a_function_or_constant_that_nothing_uses_is_left_out() -> None:
    source = """#!lua
local LIMIT, UNUSED = 3, 4
local LONELY = 5
local function inner() return LONELY end
local function outer() return inner() end
local function needed() return LIMIT end
local kept = 1
return needed()
"""
    made = as_function("lean", source)
    for text in (made.source, made.library):
        assert "needed" in text
        assert "return 3 end" in text
        assert "kept" in text
        assert not any(name in text for name in ("outer", "inner", "LONELY"))


def test_a_constant_is_replaced_by_its_value_but_not_in_text() -> None:
    source = """#!lua
local CODE = -4
local LONG_MS = 2 * 3600  -- why
local MARK, TABLE = 'x ', { 1 }
local WORD = 'CODE'
return { CODE, 'CODE LONG', 10 - LONG_MS, MARK, WORD, TABLE[1] }
"""
    made = as_function("plain", source)
    for text in (made.source, made.library):
        assert "return { (-4), 'CODE LONG', 10 - (2 * 3600), MARK, ('CODE'), TABLE[1] }" in text
        assert "LONG_MS =" not in text
    with pytest.raises(ValueError, match="declared twice"):
        as_function("plain", "#!lua\nlocal LIMIT = 1\nlocal LIMIT = 2\nreturn LIMIT\n")


def test_another_source_or_another_flag_is_another_function() -> None:
    sources = ["#!lua\nreturn 1\n", "#!lua\nreturn 2\n", "#!lua flags=allow-oom\nreturn 1\n"]
    assert len({as_function("same", source).name for source in sources}) == len(sources)


def test_every_refusal_has_its_own_error() -> None:
    refusals = {name: value for name, value in LUA_CONSTANTS.items() if value < 0}
    texts = {str(error_for("q", [value, b"1", 2])) for value in refusals.values()}
    assert len(texts) == len(refusals)
    assert not any("unexpected" in text for text in texts)
    assert type(error_for("q", [-99])) is ForqError
