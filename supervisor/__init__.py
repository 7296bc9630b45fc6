"""The parent process: one loop, the table of children, the control socket."""

assert __name__ == "forq.supervisor", "import this package as forq.supervisor"
