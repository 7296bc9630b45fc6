"""A shop under systemd."""
