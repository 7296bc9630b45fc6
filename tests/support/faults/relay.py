"""A port in front of a test server: TLS for a server that has none, and answers that get lost."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.support.drive.server import Server


@contextmanager
def relay(
    server: Server, *, context: ssl.SSLContext | None = None, drop_answers: bool = False, port: int = 0
) -> Iterator[int]:
    """A TCP port on loopback that passes everything to the server, through TLS if a context is given."""
    listener = socket.create_server(("127.0.0.1", port))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=pass_on, args=(client,), daemon=True).start()

    def pass_on(client: socket.socket) -> None:
        try:
            near: socket.socket = context.wrap_socket(client, server_side=True) if context else client
        except OSError:
            client.close()
            return
        far = socket.socket(socket.AF_UNIX)
        far.connect(str(server.socket))
        answers = threading.Thread(target=copy, args=(far, near, drop_answers), daemon=True)
        answers.start()
        copy(near, far, False)

    def copy(source: socket.socket, target: socket.socket, drop: bool) -> None:
        try:
            while data := source.recv(65536):
                if drop and b"+PONG" in data:
                    break
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            # The other direction's thread is reading: closing alone would not end the connection.
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()
