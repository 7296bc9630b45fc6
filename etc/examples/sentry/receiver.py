"""Stands in for Sentry: prints the errors that it receives, one JSON line each. Usage: receiver.py --port N"""

import argparse
import gzip
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        # An envelope: a header, then a header and a payload for each item.
        lines = [json.loads(line) for line in body.splitlines()[1:] if line]
        for header, payload in zip(lines[::2], lines[1::2], strict=True):
            if header["type"] == "event":
                exceptions = payload.get("exception", {}).get("values", [])
                error = exceptions[-1]["value"] if exceptions else payload["message"]
                print(json.dumps({"error": error, "tags": payload["tags"]}), flush=True)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing but errors."""


parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
with ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Receiver) as server:
    server.serve_forever()
