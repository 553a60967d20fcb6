"""Verification of the shipped kernel on vgpu: cases, runs under the race detector, mutation.

>>> megamoe verify --all          # doctest: +SKIP
"""
