"""`forq app`: shows an app, explains why one cannot be read, and creates its queues."""

import json
import os
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from forq.client import Client
from forq.errors import QueueFull
from tests.support.drive.supervisor import BIN

SHOP = """
    import forq

    print("printed by user code")
    app = forq.App("shop")

    def notify(data, job): ...

    @app.task(queue="mails", timeout="30s", aliases=["old"])
    def send(to: str, subject: str = "hi") -> int:
        return 1

    @app.task(every="5m")
    async def refresh() -> None: ...

    @app.around
    def hook(job):
        yield

    app.queue("mails", max_items=7, on_dead=notify)
    app.schedule("nightly", send.prepare("a@b.c"), cron="0 2 * * *")
"""
SHOWN = """\
app shop (shop.tasks:app)

tasks:
  async refresh() -> None
      queue = shop  (shop/tasks.py, line 12)
  send(to: str, subject: str = 'hi') -> int
      queue = mails, aliases = old, timeout = 30s, keep_done = 1h  (shop/tasks.py, line 8)
queues:
  mails: max_items = 7, fail_handler = shop.tasks:notify
  shop: default options
schedules:
  nightly (queue mails): cron = 0 2 * * *, data = {"to": "a@b.c"}, type = send
  refresh (queue shop): every = 5m, data = {}, type = refresh
hooks: 1 around, 0 lifespan
"""


def run(folder: Path, *arguments: str, redis: str = "redis://nowhere.invalid") -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "FORQ_REDIS": redis}
    command = [str(BIN / "forq"), "app", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, SHOP)
    return tmp_path


def write(folder: Path, code: str) -> None:
    (folder / "shop").mkdir(exist_ok=True)
    (folder / "shop/tasks.py").write_text(dedent(code).lstrip("\n"))


def test_it_shows_the_app_without_redis(folder: Path) -> None:
    ran = run(folder, "shop.tasks:app")
    assert (ran.stdout, ran.stderr, ran.returncode) == (SHOWN, "printed by user code\n", 0)
    assert run(folder, "shop.tasks").stdout == SHOWN, "app is the default name"


def test_json_is_the_definitions(folder: Path) -> None:
    definitions = json.loads(run(folder, "shop.tasks:app", "--json").stdout)
    assert definitions["format"] == 1
    assert definitions["tasks"]["send"] == {
        "queue": "mails",
        "aliases": ["old"],
        "async": False,
        "signature": "(to: str, subject: str = 'hi') -> int",
        "place": "shop/tasks.py, line 8",
        "options": {"timeout": "30s", "keep_done": "1h"},
    }


@pytest.mark.parametrize(
    ("code", "path", "errors"),
    [
        (
            "def f(): return 1 / 0\nf()",
            "shop.tasks",
            ['tasks.py", line 2, in <module>', "ZeroDivisionError", "line 1)"],
        ),
        ("def f(:", "shop.tasks", ["SyntaxError", "tasks.py"]),
        ("raise SystemExit(0)", "shop.tasks", ["cannot be imported: SystemExit: 0"]),
        ("import missing", "shop.tasks", ["No module named 'missing' ("]),
        ("", "nope.tasks:app", ["No module named 'nope'; run the command in the directory that contains nope"]),
        ("", "shop.nope:app", ["No module named 'shop.nope'; run the command in the directory"]),
        ("", "shop.tasks", ["module shop.tasks has no app; it has no app; write app = forq.App(NAME) there"]),
        ("app = 5", "shop.tasks", ["has app = 5, which is not a forq.App"]),
        ("import forq\nshop = forq.App('shop')", "shop.tasks", ["has no app; its apps: shop.tasks:shop"]),
        (
            "import forq\napp = forq.App('shop')\n@app.task(timeot=5)\ndef send(): ...",
            "shop.tasks",
            ['tasks.py", line 3', "task send (shop/tasks.py, line 3): @app.task has no option 'timeot'; did you mean"],
        ),
        (
            "import forq\napp = forq.App('shop')\n@app.task\ndef send(order: object): ...",
            "shop.tasks",
            ["forq: task send: argument order:", "(shop/tasks.py, line 3)"],
        ),
    ],
)
def test_an_app_that_cannot_be_read_is_explained(tmp_path: Path, code: str, path: str, errors: list[str]) -> None:
    write(tmp_path, code)
    ran = run(tmp_path, path)
    assert (ran.stdout, ran.returncode) == ("", 78)
    for error in errors:
        assert error in ran.stderr
    assert "forq/app/" not in ran.stderr, "frames of forq are left out"


def test_a_wrong_path_is_a_wrong_argument(tmp_path: Path) -> None:
    ran = run(tmp_path, "shop tasks")
    assert (ran.returncode, ran.stderr) == (
        2,
        "forq: app 'shop tasks' is not allowed: package.module:app, such as shop.tasks:app\n",
    )


def test_create_makes_the_absent_queues_only(folder: Path, redis_url: str) -> None:
    client = Client(redis_url)
    client.create_queue("shop", max_items=3)
    ran = run(folder, "shop.tasks:app", "--create", redis=redis_url)
    assert (ran.stdout, ran.returncode) == ("mails: created\nshop: exists\n", 0)
    assert client.queues() == {"mails": "work", "shop": "work"}
    ran = run(folder, "shop.tasks:app", "--create", "--json", redis=redis_url)
    assert json.loads(ran.stdout) == {"mails": False, "shop": False}
    assert client.queue("mails").enqueue_many(range(7))
    with pytest.raises(QueueFull, match="max_items = 7"):
        client.queue("mails").enqueue(8)
    assert client.queue("shop").enqueue_many(range(3))
    with pytest.raises(QueueFull, match="max_items = 3"):
        client.queue("shop").enqueue(4)
    client.close()


def test_create_makes_a_deleted_queue_again(folder: Path, redis_url: str) -> None:
    client = Client(redis_url)
    client.create_queue("mails")
    client.delete_queue("mails")
    assert run(folder, "shop.tasks:app", "--create", redis=redis_url).stdout == "mails: created\nshop: created\n"
    client.close()


def test_create_reports_every_queue_that_cannot_be_created(folder: Path, redis_url: str) -> None:
    client = Client(redis_url)
    client.create_queue("mails", mode="on_request")
    ran = run(folder, "shop.tasks:app", "--create", redis=redis_url)
    assert (ran.stdout, ran.returncode) == ("shop: created\n", 1)
    assert "forq: queue 'mails': queue 'mails' exists with mode 'on_request'" in ran.stderr
    client.close()
