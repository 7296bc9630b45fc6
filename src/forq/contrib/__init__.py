"""Helpers for web frameworks. forq itself imports none of them."""
