-- The Lua library (src/forq/broker/lua), checked as a whole: `make lint`.
std = "none"
read_globals = { "redis", "cjson", "math", "string", "table", "ipairs", "next", "pairs", "tonumber", "tostring", "unpack" }
max_line_length = 120
-- Set by EVAL only.
ignore = { "221/EVAL_.*" }
