"""forqctl, the command line of a supervisor: a client of its control socket.

It starts in 30 ms. `socket` would add 8 ms (it builds enums), `typing` 10 ms, both together 13. So no command imports
them before its first answer:

1. client.py uses `_socket`, the C module below `socket`.
2. `TYPE_CHECKING = False` replaces the import from typing; type checkers know the name.
3. commands/__init__.py maps each command to its module, so that only that one is imported. Rarely needed modules are
   imported where they are used.
"""
