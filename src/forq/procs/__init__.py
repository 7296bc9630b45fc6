"""Shared by all processes: event loop, connections, scoreboard, process trees, control groups."""
