"""The commands flow and batch, for jobs that belong together."""

from __future__ import annotations

from forq.ctl.client import connect
from forq.ctl.command import NAME, Argument, Command
from forq.ctl.output import iso_time, print_json, print_result, print_table, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

# Dependencies that a row names; the number of the others follows.
NAMED = 3


@Command(
    "flow",
    "show the jobs of a flow, with their states",
    Argument("id", metavar="FLOW", help="the flow's id"),
    Argument("--mermaid", action="store_true", help="print a Mermaid diagram"),
    more="Jobs are indented below those that they wait for. A flow is known for a week.",
    examples=["flow 01JD0Z", "flow 01JD0Z --mermaid > flow.mmd"],
    json="flow",
    exits={4: "no such flow"},
)
def flow(args: Namespace) -> int:
    result = connect(args).call("flow", {"id": args.id})
    if args.json:
        print_json(result)
    elif args.mermaid:
        print("\n".join(_mermaid(result["jobs"])))
    else:
        depths = _depths(result["jobs"])
        rows = [
            (
                "  " * depth + printable(job["label"] or "job"),
                job["id"],
                job["queue"],
                job["state"],
                _dependencies(job, result["jobs"]),
            )
            for job, depth in zip(result["jobs"], depths, strict=True)
        ]
        print_table(("TASK", "ID", "QUEUE", "STATE", "WAITS FOR"), rows)
    return 0


def _depths(jobs: list[dict[str, Any]]) -> list[int]:
    """The longest path to each job. Dependencies come before."""
    depths: list[int] = []
    for job in jobs:
        depths.append(max((depths[needed] + 1 for needed in job["needs"]), default=0))
    return depths


def _dependencies(job: dict[str, Any], jobs: list[dict[str, Any]]) -> str | None:
    if not job["needs"]:
        return None
    names = [printable(jobs[needed]["id"]) for needed in job["needs"][:NAMED]]
    more = len(job["needs"]) - NAMED
    text = " ".join(names) + (f" and {more} more" if more > 0 else "")
    return text if job["when"] == "done" else f"{text} ({job['when']})"


def _mermaid(jobs: list[dict[str, Any]]) -> list[str]:
    lines = ["graph TD"]
    for number, job in enumerate(jobs):
        text = printable(job["label"] or job["id"]).replace('"', "#quot;")
        lines.append(f'  j{number}["{text}<br/>{printable(job["state"])}"]')
    for number, job in enumerate(jobs):
        label = "" if job["when"] == "done" else f"|{job['when']}|"
        lines += [f"  j{needed} -->{label} j{number}" for needed in job["needs"]]
    return lines


@Command(
    "batch",
    "show a batch, or cancel it",
    NAME,
    Argument("id", metavar="BATCH", help="the batch's id"),
    Argument("--cancel", action="store_true", help="cancel its members that have not begun; running ones end"),
    more="NAME is the queue of its callbacks. A batch is known for a day after its end.",
    examples=["batch reports 01JD0Z", "batch reports 01JD0Z --cancel"],
    json="batch",
    exits={4: "no such queue or batch"},
)
def batch(args: Namespace) -> int:
    client, params = connect(args), {"name": args.name, "id": args.id}
    if args.cancel:
        cancelled, more = 0, True
        while more:
            answer = client.call("batch.cancel", params)
            cancelled, more = cancelled + answer["cancelled"], answer["more"]
        jobs = "1 job" if cancelled == 1 else f"{cancelled} jobs"
        return print_result(args, {"cancelled": cancelled}, f"cancelled {jobs} of batch {printable(args.id)}")
    info = client.call("batch", params)
    if args.json:
        print_json(info)
        return 0
    ended = "" if info["ended_at"] is None else f", ended at {iso_time(info['ended_at'])}"
    print(f"batch {printable(info['id'])} of queue {printable(info['queue'])}: {info['state']}{ended}")
    print_table(
        ("MEMBERS", "OPEN", "DONE", "DEAD", "OTHER", "PROGRESS"),
        [
            (
                info["members"],
                info["open"],
                info["done"],
                info["dead"],
                info["other"],
                f"{100 * info['progress']:.0f} %",
            )
        ],
    )
    return 0
