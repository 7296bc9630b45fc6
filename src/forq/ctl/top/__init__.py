"""forqctl top: the queues as they are now, on a screen with keys, or as plain or JSON blocks. Asks the control socket
only, with one status call per interval."""
