"""Values, the table of settings, and the definition of a queue."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forq.errors import InvalidName, InvalidOption, RetryAt, UsageError
from forq.queue_spec import QueueSpec, read_program
from forq.settings import OPTIONS, Setting, check_changes, defaults, fixed_options, parse_options, stored
from forq.values import parse_duration, parse_size, show_duration, show_size, show_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("10s", 10),
        ("5m", 300),
        ("2h", 7200),
        ("7d", 604800),
        ("1.5s", 1.5),
        ("3", 3),
        (3, 3),
        (0.5, 0.5),
    ],
)
def test_a_duration_is_read_in_seconds(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "value", [True, -1, "-1s", math.nan, math.inf, "nan", "inf", "1e9", "", "5 weeks", "5mm", "٣s", 10**400, None, [1]]
)
def test_a_duration_that_makes_no_sense_is_refused_with_what_is_allowed(value: object) -> None:
    with pytest.raises(UsageError, match='"250ms", "10s", "5m"'):
        parse_duration(value)  # type: ignore[arg-type]


@given(st.integers(min_value=0, max_value=10**12))
def test_a_shown_duration_is_read_back_exactly(milliseconds: int) -> None:
    assert round(parse_duration(show_duration(milliseconds / 1000)) * 1000) == milliseconds


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (0.25, "250ms"), (90, "90s"), (120, "2m"), (86400, "1d"), (1.5, "1500ms")]
)
def test_a_duration_is_shown_in_its_largest_exact_unit(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (1794926402.9, "2026-11-17T14:40:02Z"),
        (0, "1970-01-01T00:00:00Z"),
        (1e30, f"{1e30:.0f} s after 1970"),
        (math.inf, "inf s after 1970"),
        (math.nan, "nan s after 1970"),
    ],
)
def test_sentences_have_times_in_iso_8601(moment: float, text: str) -> None:
    assert show_time(moment) == text
    assert str(RetryAt(moment)) == f"retry at {text}"


@pytest.mark.parametrize(("text", "size"), [("1mb", 1 << 20), ("64KB", 65536), ("10", 10), (10, 10), ("2 gb", 2 << 30)])
def test_a_size_is_read_in_bytes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("value", [True, -1, "-1", 1.5, "1.5mb", "mb", "1tb", None])
def test_a_size_that_makes_no_sense_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="size"):
        parse_size(value)


@given(st.integers(min_value=0, max_value=10**15))
def test_a_shown_size_is_read_back_exactly(size: int) -> None:
    assert parse_size(show_size(size)) == size


@pytest.mark.spec("Q30", "Q32")
def test_the_defaults_are_those_of_the_release() -> None:
    assert defaults() == {
        "max_items": 0,
        "processes": 1,
        "concurrency": 1,
        "size": 10,
        "priority": 0,
        "timeout": 60.0,
        "max_timeouts": 3,
        "max_stalls": 3,
        "max_jobs": 0,
        "max_age": 0.0,
        "max_memory": 0,
        "memory_limit": 0,
        "pids_limit": 0,
        "address_limit": 0,
        "open_files_limit": 0,
        "nice": 0,
        "stop_grace": 10.0,
        "max_retries": 10,
        "min_backoff": 2.0,
        "max_backoff": 300.0,
        "jitter": 0,
        "keep_done": 0.0,
        "done_max": 10_000,
        "rate": "off",
        "burst": 0,
        "max_active": 0,
        "retry_lane_retries": 0,
        "fail_max_retries": 100,
        "fail_min_backoff": 10.0,
        "fail_max_backoff": 900.0,
        "fail_timeout": 60.0,
        "fail_size": 2,
        "max_data": 1024 * 1024,
        "dead_max": 10_000,
        "dead_ttl": 604800.0,
        "dedup_ttl": 86400.0,
        "flows": "auto",
        "journal": True,
        "journal_max": 16 * 1024 * 1024,
    }


def test_a_limit_that_is_off_by_default_has_a_lowest_value_of_its_own() -> None:
    assert parse_options({"memory_limit": 0, "open_files_limit": 64}, "here") == {
        "memory_limit": 0,
        "open_files_limit": 64,
    }
    with pytest.raises(InvalidOption, match=r"memory_limit = '1mb' is not allowed: a size from 16mb to .*, or 0$"):
        parse_options({"memory_limit": "1mb"}, "here")
    with pytest.raises(InvalidOption, match=r"open_files_limit = 63 is not allowed: a whole number from 64 .*, or 0$"):
        parse_options({"open_files_limit": 63}, "here")


@pytest.mark.parametrize("option", OPTIONS.values(), ids=lambda option: option.name)
def test_each_default_and_each_end_of_a_range_is_allowed(option: Setting) -> None:
    ends = () if option.kind == "rate" else (option.lowest, option.highest)
    for value in (option.default, *ends):
        assert parse_options({option.name: value}, "here") == {option.name: value}


@pytest.mark.parametrize(
    ("text", "shown"),
    [("100/1m", "100/1m"), ("5/s", "5/1s"), (" 7 / 250ms", "7/250ms"), ("60/60s", "60/1m"), ("off", "off"), (0, "off")],
)
def test_a_rate_is_read_and_shown(text: object, shown: str) -> None:
    assert parse_options({"rate": text}, "here") == {"rate": shown}
    assert stored({"rate": shown})["rate_count"] == (0 if shown == "off" else int(shown.split("/")[0]))


def test_processes_is_a_number_or_cpus() -> None:
    assert parse_options({"processes": "cpus"}, "here") == {"processes": "cpus"}
    assert parse_options({"processes": "4"}, "here") == {"processes": 4}
    for wrong in (0, 257, "all", True):
        with pytest.raises(InvalidOption, match=r'is not allowed: a whole number from 1 to 256, or "cpus"$'):
            parse_options({"processes": wrong}, "here")


def test_options_are_read_from_toml_values_and_from_text_alike() -> None:
    typed = {"max_items": 5, "concurrency": 2, "stop_grace": 1.5, "max_data": 2048, "journal": False}
    text = {"max_items": "5", "concurrency": "2", "stop_grace": "1500ms", "max_data": "2kb", "journal": "off"}
    assert parse_options(typed, "here") == parse_options(text, "--set") == typed


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        *(
            ("rate", bad, '"50/1s"')
            for bad in (50, True, "50", "0/1s", "-1/s", "1/0s", "1/s/s", "9/31d", "10000000/1s", "²/s")
        ),
        ("concurrency", 0, "a whole number from 1 to 256"),
        ("concurrency", 257, "a whole number from 1 to 256"),
        ("concurrency", 2.0, "a whole number"),
        ("concurrency", True, "a whole number"),
        ("max_items", "many", "a whole number from 0"),
        ("max_data", "65mb", "to 64mb"),
        ("stop_grace", "soon", "a duration from 0s to 1d"),
        ("stop_grace", -1, "a duration"),
        ("journal", "maybe", "true or false"),
        ("journal", 2, "true or false"),
        ("dead_ttl", [], "a duration"),
    ],
)
def test_a_wrong_value_is_refused_with_option_value_and_what_is_allowed(name: str, value: object, allowed: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_options({name: value}, "the place")
    text = str(caught.value)
    assert text.startswith(f"the place: {name} = {value!a} is not allowed: ")
    assert allowed in text


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InvalidOption, match=r"here: there is no option 'concurency'; did you mean concurrency\?"):
        parse_options({"concurency": 2}, "here")


def test_a_queue_spec_survives_json_and_keeps_only_the_options_that_were_given() -> None:
    given = {"handler": "mail.send:now", "handlers": {"big": "mail.big"}, "path": "/srv/app", "stop_grace": "5s"}
    spec = QueueSpec.from_mapping("emails", given, "here")
    assert spec.options == {"stop_grace": 5.0}
    assert spec.path == ("/srv/app",)
    stored = json.loads(json.dumps(spec.to_mapping()))
    assert QueueSpec.from_mapping("emails", stored, "there") == spec


def test_a_queue_that_releases_needs_no_handler_and_keeps_its_mode_in_json() -> None:
    spec = QueueSpec.from_mapping("gate", {"release_interval": "1s", "handlers": {}}, "here", "auto_release")
    assert (spec.mode, spec.options) == ("auto_release", {"release_interval": 1.0})
    stored = json.loads(json.dumps(spec.to_mapping()))
    assert QueueSpec.from_mapping("gate", stored, "there", "on_request") == spec


@pytest.mark.spec("N9")
def test_the_release_modes_have_their_own_options_and_what_every_queue_has() -> None:
    every = {
        "max_items",
        "max_data",
        "stop_grace",
        "dead_max",
        "dead_ttl",
        "dedup_ttl",
        "flows",
        "journal",
        "journal_max",
    }
    assert {name: value for name, value in defaults("auto_release").items() if name not in every} == {
        "release_interval": 0.1,
        "release_retries": 10,
        "retry_interval": 0.2,
        "retry_lane_retries": 3,
        "lease": 10.0,
        "item_timeout": 0.0,
    }
    assert {name: value for name, value in defaults("on_request").items() if name not in every} == {
        "lease": 10.0,
        "item_timeout": 0.0,
    }
    for mode in ("auto_release", "on_request"):
        assert fixed_options(mode) == set(defaults(mode)) - every
    assert fixed_options("work") == set()


@pytest.mark.spec("N24", "N25")
@pytest.mark.parametrize(
    ("name", "mode", "text"),
    [
        ("retry_lane_retries", "auto_release", "retry_lane_retries of queue 'q' cannot be changed: it is fixed"),
        ("lease", "on_request", "lease of queue 'q' cannot be changed: it is fixed while the queue exists"),
        (
            "lease",
            "work",
            "lease is an option of mode auto_release or on_request or external, not of",
        ),
        (
            "concurrency",
            "work",
            "concurrency of queue 'q' takes effect only in a new process: use `forqctl create` again",
        ),
        ("max_items", "on_request", None),
        ("retry_lane_retries", "work", None),
    ],
)
def test_what_may_be_changed_depends_on_option_and_mode(name: str, mode: str, text: str | None) -> None:
    if text is None:
        check_changes([name], mode, "queue 'q'")
        return
    with pytest.raises(InvalidOption, match=text):
        check_changes([name], mode, "queue 'q'")


def test_handlers_may_be_given_with_dotted_keys_beside_or_inside_options() -> None:
    spec = QueueSpec.from_mapping("q", {"handlers.a": "m:a", "options": {"handlers.b.c": "m:b"}}, "here")
    assert spec.handlers == {"a": "m:a", "b.c": "m:b"}
    assert spec.handler is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "needs handler"),
        ({"handler": "m:f", "mode": "play"}, 'is not allowed: "work", "auto_release", "on_request"'),
        ({"mode": "on_request", "handler": "m:f"}, "handler is not allowed: a queue of mode on_request runs no code"),
        ({"mode": "auto_release", "handlers.a": "m:f"}, "handlers is not allowed"),
        ({"mode": "on_request", "fail_handler": "m:f"}, "fail_handler is not allowed"),
        ({"mode": "auto_release", "path": "/srv"}, "path is not allowed"),
        ({"mode": "on_request", "release_retries": 1}, "release_retries is an option of mode auto_release, not of"),
        (
            {"mode": "on_request", "retry_lane_retries": 1},
            "of mode work or auto_release or external, not of mode on_request",
        ),
        ({"mode": "auto_release", "max_retries": 1}, "max_retries is an option of mode work or external, not"),
        (
            {"handler": "m:f", "lease": 1},
            "lease is an option of mode auto_release or on_request or external, not of",
        ),
        ({"mode": "auto_release", "max_reties": 1}, "no option 'max_reties'; did you mean"),
        ({"handler": "exec:prog"}, "the program must be an absolute path"),
        ({"handler": "exec:"}, "the program must be an absolute path"),
        ({"handler": "exec-once: ./prog"}, "the program must be an absolute path"),
        ({"handler": "exec:/bin/a\0b"}, "the program must be an absolute path"),
        ({"handlers": {"t": "exec:/bin/prog 'x"}}, "No closing quotation"),
        ({"fail_handler": "exec:prog", "handler": "m:f"}, "fail_handler = 'exec:prog'"),
        ({"handler": "exec-twice:/bin/true"}, "package.module:function"),
        ({"handler": "no module"}, "package.module:function"),
        ({"handler": "m:f:g"}, "package.module:function"),
        ({"handler": "m:f\n"}, "package.module:function"),
        ({"handler": 3}, "package.module:function"),
        ({"handlers": {"t": "../x"}}, "handlers.t = '../x'"),
        ({"handlers": "m:f"}, "a table"),
        ({"handler": "m:f", "path": "relative"}, "an absolute directory"),
        ({"handler": "m:f", "path": 3}, "a directory"),
        ({"handler": "m:f", "options": []}, "a table"),
        ({"handler": "m:f", "max_items": 1, "options": {"max_items": 2}}, "given twice"),
        ({"handlers": {"a": "m:f"}, "handlers.a": "m:g"}, "given twice"),
        ({"handler": "m:f", "handlr": "m:f"}, "no option 'handlr'"),
    ],
)
def test_a_queue_spec_that_makes_no_sense_is_refused(given: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        QueueSpec.from_mapping("q", given, "the place")
    assert str(caught.value).startswith("the place: ")
    assert text in str(caught.value)


def test_a_queue_spec_refuses_a_name_that_is_not_allowed() -> None:
    with pytest.raises(InvalidName, match="here: queue name"):
        QueueSpec.from_mapping("a b", {"handler": "m:f"}, "here")


def test_a_handler_may_be_a_program_with_arguments_and_is_kept_as_it_was_written() -> None:
    given = {"handler": "exec:/bin/node '/srv/my app/x.js' --a=b", "handlers": {"t": "exec-once:/bin/true"}}
    spec = QueueSpec.from_mapping("q", {**given, "fail_handler": "exec:/bin/false"}, "here")
    assert read_program(str(spec.handler)) == (False, ("/bin/node", "/srv/my app/x.js", "--a=b"))
    assert read_program(spec.handlers["t"]) == (True, ("/bin/true",))
    assert QueueSpec.from_mapping("q", spec.to_mapping(), "again") == spec
