"""What the commands do: one function per command, called with its arguments; it returns the exit code."""
