"""forqctl, the command line of a supervisor: a client of its control socket.

Its start takes 30 ms. `socket` would add 8 ms (it builds enums), `typing` 10 ms; both together 13. So everything that a
command needs before its first answer does without them:

1. client.py uses `_socket`, the C module below `socket`.
2. `TYPE_CHECKING = False` stands instead of its import from typing: type checkers know the name.
3. commands/__init__.py names the module of each command, so that only that one is imported; what a command needs seldom
   is imported where it is used.
"""
