"""The Redis data model: keys, job records, Lua scripts. Only this package imports redis."""

assert __name__ == "forq.broker", "import this package as forq.broker"
