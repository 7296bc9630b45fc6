"""What a real browser sends with the forms of our pages and of an attacker's: Chromium, if it is installed."""

import http.server
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.web.serving import Served

Serve = Callable[..., Served]

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
# Under this name Chromium sends no Sec-Fetch-Site, as the connection is neither encrypted nor to a loopback address.
LAN = "lan.example"


@pytest.fixture
def submitting(static: Path) -> None:
    """/static/form.html sends a form to /pause; the policy forbids scripts inside of pages."""
    (static / "form.html").write_text(
        '<form method="post" action="/pause"><input name="queue" value="mails"></form><script src="form.js"></script>'
    )
    (static / "form.js").write_text("document.forms[0].submit();")
    (static / "inline.html").write_text(
        '<form method="post" action="/pause"></form><script>document.forms[0].submit();</script>'
    )


SENDING = '<form method="post" action="{}"></form><script>document.forms[0].submit()</script>'
FRAMING = '<iframe src="{}"></iframe>'


@pytest.fixture
def attacker() -> Iterator[Callable[..., str]]:
    """The address of a page of another site that sends a form to this address, or contains something else with it."""
    content = ""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def page(url: str, template: str = SENDING) -> str:
        nonlocal content
        content = template.format(url)
        return f"http://evil.example:{server.server_port}/"

    yield page
    server.shutdown()
    server.server_close()


def visit(url: str, profile: Path) -> str:
    """The page that the browser shows at the end."""
    return run_browser(url, profile).stdout


def run_browser(url: str, profile: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
    options += ["--host-resolver-rules=MAP *.example 127.0.0.1", "--virtual-time-budget=3000", "--dump-dom", *more]
    return subprocess.run([CHROMIUM, *options, url], capture_output=True, text=True, timeout=60)


@pytest.mark.usefixtures("submitting")
@pytest.mark.parametrize("name", ["127.0.0.1", LAN])
def test_our_own_form_is_carried_out(serve: Serve, tmp_path: Path, name: str) -> None:
    served = serve(hosts=(LAN,))
    shown = visit(f"http://{name}:{served.port}/static/form.html", tmp_path / "profile")
    assert "paused" in shown
    assert [body for _, body in served.site.acted] == ["queue=mails"]


@pytest.mark.parametrize("name", ["127.0.0.1", LAN])
def test_the_form_of_another_site_is_refused(
    serve: Serve, attacker: Callable[..., str], tmp_path: Path, name: str
) -> None:
    served = serve(hosts=(LAN,))
    shown = visit(attacker(f"http://{name}:{served.port}/pause"), tmp_path / "profile")
    assert "403 Forbidden" in shown
    assert served.site.acted == []


def test_a_page_of_another_site_cannot_frame_ours(serve: Serve, attacker: Callable[..., str], tmp_path: Path) -> None:
    # Under this name the server cannot tell the request from one for a tab: only the headers of the answer prevent it.
    served = serve(hosts=(LAN,))
    page = attacker(f"http://{LAN}:{served.port}/", FRAMING)
    console = run_browser(page, tmp_path / "profile", "--enable-logging=stderr").stderr
    assert f"http://{LAN}:{served.port}/" in console
    assert "frame-ancestors 'none'" in console


@pytest.mark.usefixtures("submitting")
def test_a_script_inside_of_a_page_does_not_run(serve: Serve, tmp_path: Path) -> None:
    served = serve()
    shown = visit(f"http://127.0.0.1:{served.port}/static/inline.html", tmp_path / "profile")
    assert 'action="/pause"' in shown
    assert served.site.acted == []


def test_a_name_that_an_attacker_points_here_shows_nothing(serve: Serve, tmp_path: Path) -> None:
    served = serve()
    shown = visit(f"http://evil.example:{served.port}/", tmp_path / "profile")
    assert "not a name of this dashboard" in shown
    assert "act local" not in shown
