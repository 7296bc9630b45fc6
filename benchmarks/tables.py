"""Markdown tables from results.json, so that no figure is typed by hand.

python benchmarks/tables.py RESULTS.json                        prints all
python benchmarks/tables.py RESULTS.json --write FILE.md   puts each after its `<!-- table NAME -->`
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

Results = dict[str, Any]
_SLOT = re.compile(r"(<!-- table ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOT_MEASURED = "\N{EN DASH}"


def number(value: float | None) -> str:
    """Three significant figures, with separated thousands."""
    if value is None:
        return NOT_MEASURED
    if abs(value) >= 1000:
        digits = len(str(int(abs(value)))) - 3
        return f"{round(value, -digits):,.0f}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def cell(results: Results, peer: str, measure: str, *names: str) -> str:
    """Figures of one peer, `a / b`. † if all rounds were disturbed; failures in words."""
    found = results["summaries"].get(peer, {}).get(measure)
    if found is None:
        return NOT_MEASURED
    if "error" in found:
        return "failed"
    text = " / ".join(number(found.get(name)) for name in names)
    return text + _mark(found)


def _mark(found: Mapping[str, Any]) -> str:
    return " †" if found.get("disturbed") else ""


def speed(results: Results) -> str:
    head = ["", "enqueue /s", "bulk /s", "forq is", "drain /s, 1 process", "forq is", "2 processes"]
    head += ["worker µs/job", "server µs/job"]
    rows = [
        [
            peer,
            cell(results, peer, "enqueue", "per_second"),
            cell(results, peer, "bulk", "per_second"),
            times(results, peer, "bulk"),
            cell(results, peer, "drain", "per_second"),
            times(results, peer, "drain"),
            cell(results, peer, "drain2", "per_second"),
            cell(results, peer, "drain", "worker_us"),
            cell(results, peer, "drain", "redis_us"),
        ]
        for peer in results["peers"]
    ]
    return markdown(head, rows)


def times(results: Results, peer: str, measure: str) -> str:
    """How many times the rate of this peer forq has; empty for forq, or if either was not measured."""
    ours, theirs = _rate(results, "forq", measure), _rate(results, peer, measure)
    return f"{number(ours / theirs)}\N{MULTIPLICATION SIGN}" if ours and theirs and peer != "forq" else ""


def _rate(results: Results, peer: str, measure: str) -> float | None:
    rate: float | None = results["summaries"].get(peer, {}).get(measure, {}).get("per_second")
    return rate


def trickle(results: Results) -> str:
    """Jobs that come one by one, 200 a second."""
    head = ["", "server µs/job", "worker µs/job", "both", "pickup p50 / p99 ms"]
    rows = []
    for peer in results["peers"]:
        found = results["summaries"].get(peer, {}).get("trickle", {})
        costs = [found.get("redis_us"), found.get("worker_us")]
        both = number(sum(costs)) + _mark(found) if None not in costs else NOT_MEASURED
        single = [cell(results, peer, "trickle", name) for name in ("redis_us", "worker_us")]
        rows.append([peer, *single, both, cell(results, peer, "trickle", "p50_ms", "p99_ms")])
    return markdown(head, rows)


def waiting(results: Results) -> str:
    head = ["", "pickup p50 / p99 ms", "idle PSS MB", "idle CPU %", "idle requests/s"]
    head += ["job's process killed: again after s", "whole worker killed: s"]
    rows = []
    for peer in results["peers"]:
        idle = [cell(results, peer, "idle", name) for name in ("pss_mb", "cpu_percent", "requests_per_second")]
        crashes = [again(results, peer, f"crash_{death}") for death in ("process", "worker")]
        rows.append([peer, cell(results, peer, "pickup", "p50_ms", "p99_ms"), *idle, *crashes])
    return markdown(head, rows)


def again(results: Results, peer: str, measure: str) -> str:
    found = results["summaries"].get(peer, {}).get(measure)
    if found is not None and "error" not in found and "seconds" not in found:
        return f"not within {results['crash_cap_seconds']:.0f}" + _mark(found)
    return cell(results, peer, measure, "seconds")


def load(results: Results) -> str:
    names = ("p50_ms", "p99_ms", "p999_ms")
    measures = sorted(results["floors"])
    head = ["", *(f"{measure.removeprefix('load')} % load: p50 / p99 / p99.9 ms" for measure in measures)]
    rows = [
        [peer, *(cell(results, peer, measure, *names) for measure in measures)]
        for peer in results["peers"]
        if any(measure in results["summaries"].get(peer, {}) for measure in measures)
    ]
    floor = [" / ".join(number(results["floors"][measure].get(name)) for name in names) for measure in measures]
    return markdown(head, [*rows, ["if queues cost nothing", *floor]])


def steady(results: Results) -> str:
    """Jobs of 5 ms: the rate, and its share of the maximum of threads that only sleep."""
    measures = {"1 worker": "steady1", "20 workers": "steady20"}
    rows = [
        [peer, *(cell(results, peer, measure, "per_second", "percent") for measure in measures.values())]
        for peer in results["peers"]
        if any(measure in results["summaries"].get(peer, {}) for measure in measures.values())
    ]
    return markdown(["", *(f"{name}: jobs/s / % of the most" for name in measures)], rows)


def backlog(results: Results) -> str:
    head = ["server µs per job: enqueue / run", *(f"{size:,} waiting" for size in results["effort"]["backlogs"])]
    sizes = [f"backlog{size}" for size in results["effort"]["backlogs"]]
    rows = [
        [peer, *(cell(results, peer, size, "enqueue_redis_us", "run_redis_us") for size in sizes)]
        for peer in results["peers"]
        if any(size in results["summaries"].get(peer, {}) for size in sizes)
    ]
    return markdown(head, rows)


def versions(results: Results) -> str:
    """What was compared, how old it was, and what could not be."""
    rows = [[name, peer["version"], release(peer, results["taken_at"])] for name, peer in results["peers"].items()]
    rows += [[name, "left out", ""] for name in results["left_out"]]
    reasons = [f"Left out: {name}: {reason}" for name, reason in results["left_out"].items()]
    failed: dict[tuple[str, str], list[str]] = {}
    for trial in results["trials"]:
        if trial["error"]:
            failed.setdefault((trial["measure"], trial["error"]), []).append(trial["peer"])
    failures = [f"Failed: {', '.join(peers)}, {measure}: {error}" for (measure, error), peers in failed.items()]
    return "\n\n".join([markdown(["", "version", "released"], rows), *map(_wrapped, [*reasons, *failures])])


def settings(results: Results) -> str:
    rows = [[name, peer["settings"], peer["durable_settings"]] for name, peer in results["peers"].items()]
    return markdown(["", "settings", "when killed"], rows)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 140, break_long_words=False, break_on_hyphens=False)


def release(peer: Mapping[str, Any], taken_at: str) -> str:
    """The date of the peer's version, and its age at the time of the run."""
    note = peer.get("note", "")
    if day := peer.get("released"):
        age = (datetime.fromisoformat(taken_at).date() - date.fromisoformat(day)).days
        return f"{day}, {age} days before" + (f"; {note}" if note else "")
    return note or "unknown"


def cost(results: Results) -> str:
    """The cost of one job of forq."""
    found = results["summaries"]["forq"]

    def figure(measure: str, name: str) -> str:
        value = found.get(measure, {}).get(name)
        return number(value) + _mark(found.get(measure, {}))

    rows = [
        ["worker, with its supervisor and services: CPU µs", figure("drain", "worker_us")],
        ["server, claim and settle: CPU µs", figure("drain", "redis_us")],
        ["server, enqueue one by one: CPU µs", figure("enqueue", "redis_us")],
        ["server's memory while it waits, with its journal entry: bytes", figure("bulk", "bytes_per_job")],
    ]
    return markdown(["one no-op job", "costs"], rows)


def prototype(results: Results) -> str:
    """A loop without features beside forq, which claims up to 128 at a time."""
    head = ["", "jobs/s", "forq reaches", "worker µs/job", "server µs/job"]
    costs = ("worker_us", "redis_us")
    ours = _rate(results, "forq", "limit")
    rows = []
    for batch, found in results["prototype"].items():
        rate = found.get("per_second")
        share = f"{ours / rate:.0%}".replace("%", " %") if ours and rate else NOT_MEASURED
        figures = [number(found.get(name)) + _mark(found) for name in ("per_second", *costs)]
        rows.append([f"bare loop, {batch} at a time", figures[0], share, *figures[1:]])
    forq = [cell(results, "forq", "limit", name) for name in ("per_second", *costs)]
    return markdown(head, [*rows, ["forq", forq[0], "", *forq[1:]]])


def conditions(results: Results) -> str:
    """Place, time and reliability of the figures."""
    machine, average = results["machine"], results["load_average"]
    disturbed, trials = results["disturbed_trials"], len(results["trials"])
    text = (
        f"{results['taken_at']}, forq {results['commit']}, {machine['cores']} cores ({machine['cpu']}), "
        f"{machine['memory_gb']} GB, Linux {machine['kernel']}, {results['server']}, Python {results['python']}; "
        f"{results['rounds']} round(s), {results['took_seconds']} s. Load average {average['before']:.2f} before and "
        f"{average['after']:.2f} after; {disturbed} of {trials} trials were disturbed by other processes. "
        f"† marks figures of which there was no undisturbed round."
    )
    return _wrapped(text)


TABLES: dict[str, Callable[[Results], str]] = {
    "conditions": conditions,
    "speed": speed,
    "waiting": waiting,
    "trickle": trickle,
    "steady": steady,
    "load": load,
    "backlog": backlog,
    "cost": cost,
    "prototype": prototype,
    "versions": versions,
    "settings": settings,
}


def all_tables(results: Results) -> str:
    return "\n\n".join(table(results) for table in TABLES.values()) + "\n"


def filled(document: str, results: Results) -> str:
    """The document with every table filled in; KeyError names an unknown one."""
    return _SLOT.sub(lambda slot: f"{slot[1]}{TABLES[slot[2]](results)}\n{slot[3]}", document)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--write", type=Path, metavar="FILE.md")
    given = parser.parse_args()
    results = json.loads(given.results.read_text())
    if given.write is None:
        sys.stdout.write(all_tables(results))
    else:
        given.write.write_text(filled(given.write.read_text(), results))


if __name__ == "__main__":
    main()
