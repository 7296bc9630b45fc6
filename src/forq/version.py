"""The release number, and the number of the protocol spoken through Redis."""

VERSION = "0.1.0"
PROTOCOL = 1
