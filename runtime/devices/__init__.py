"""Devices that run an image: the same launch code, different drivers."""
