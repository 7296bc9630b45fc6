"""Draws top-overview.svg and top-queue.svg in docs/guide: forqctl top of a real supervisor with something to see."""

import io
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text
from stage import HERE, CheckFailed, Stage

from forq.ctl.client import ControlClient
from forq.ctl.screen import NonBlockingClient, Screen

DOCS = HERE.parents[1] / "docs" / "guide"
WIDTH, HEIGHT = 120, 24
SECONDS = 4.0
# Without the fonts that rich would have a reader's browser fetch.
PAGE = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def make_queues(stage: Stage) -> None:
    queues = {
        "greetings": ("greet", "rate=50/1s"),
        "parcels": ("deliver", "concurrency=3"),
        "stuck": ("hang", "timeout=1s"),
        "polite": ("greet", "rate=5/1s"),
        "untidy": ("leave_daemons", "max_items=10"),
    }
    for name, (handler, option) in queues.items():
        stage.ctl("create", name, "--handler", f"handlers:{handler}", "--path", str(HERE), "--set", option)
    stage.ctl("set", "stuck", "max_timeouts=0")
    stage.ctl("pause", "untidy")
    stage.ctl("push", "untidy", "1")
    many = stage.directory / "many.jsonl"
    many.write_text("null\n" * 2000)
    for name in ("greetings", "polite"):
        stage.ctl("push", name, "--file", many.name)
    for number in range(5):
        stage.ctl("push", "parcels", '{"seconds": 60}', "--id", f"parcel-{number}")
    for number in range(3):
        stage.ctl("push", "stuck", "null", "--id", f"page-{number}")


def watch(feed: NonBlockingClient, screen: Screen, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        screen.tick(time.monotonic())
        feed.read()
        time.sleep(0.02)


def draw(screen: Screen, name: str, title: str) -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in screen.lines(WIDTH, HEIGHT):
        console.print(Text.assemble(line), no_wrap=True, crop=True)
    path = DOCS / name
    path.write_text(console.export_svg(title=title, code_format=PAGE, unique_id="top"))
    print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size} bytes")


def main() -> int:
    with Stage(fast=True) as stage:
        try:
            stage.start()
            make_queues(stage)
        except CheckFailed as exc:
            print(exc, file=sys.stderr)
            return 1
        feed = NonBlockingClient(lambda: ControlClient(str(Path(stage.state_dir, "control.sock"))))
        screen = Screen(feed, 1.0)
        watch(feed, screen, SECONDS)
        draw(screen, "top-overview.svg", "forqctl top")
        screen.press("down")
        screen.press("enter")
        watch(feed, screen, SECONDS)
        draw(screen, "top-queue.svg", "forqctl top: parcels")
        feed.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
