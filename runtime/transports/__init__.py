"""Transports: symmetric memory and peer addresses for the PEs of a group."""
