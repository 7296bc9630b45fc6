"""The release number, and the version of the data and calls in Redis."""

VERSION = "0.1.0"
PROTOCOL = 3
