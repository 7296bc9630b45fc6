"""The Redis data model: keys, job records, Lua scripts. Only this package imports redis-py."""

assert __name__ == "forq.broker", "import this package as forq.broker"
