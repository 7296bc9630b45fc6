"""The parent process: starts and supervises all children and serves the control socket, in one loop."""

assert __name__ == "forq.supervisor", "import this package as forq.supervisor"
