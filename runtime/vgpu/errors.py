"""The errors vgpu raises, all of one family, each with the place it happened."""

from __future__ import annotations

from typing import Any


class VgpuError(Exception):
    """Anything wrong that the interpreter found in a kernel or in how it was launched.

    ``report`` holds the run's :class:`~megamoe.runtime.vgpu.report.Report` when the error came out
    of ``World.run``.
    """

    report: Any = None


class PtxSyntaxError(VgpuError):
    """The text is not PTX that the parser understands."""


class UnsupportedInstruction(VgpuError):
    """An opcode, modifier or operand shape that the interpreter does not implement."""


class LaunchError(VgpuError):
    """The launch configuration or the arguments do not fit the kernel."""


class MemoryFault(VgpuError):
    """An access outside every allocation, misaligned, or to released or read-only memory."""


class SyncError(VgpuError):
    """A synchronisation object is used in a way the ISA leaves undefined."""


class Deadlock(VgpuError):
    """Nothing that is alive can go on; the text lists every warp and what it waits for."""
