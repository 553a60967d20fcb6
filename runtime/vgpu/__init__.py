"""vgpu: run compiled PTX without a GPU. A test instrument, not a backend.

>>> from megamoe.runtime.vgpu import Kernel, TensorMap, World
"""

from megamoe.runtime.vgpu.errors import (
    Deadlock,
    LaunchError,
    MemoryFault,
    PtxSyntaxError,
    SyncError,
    UnsupportedInstruction,
    VgpuError,
)
from megamoe.runtime.vgpu.findings import AccessPlace, Finding, FindingError
from megamoe.runtime.vgpu.kernel import Kernel
from megamoe.runtime.vgpu.race_detector import RaceDetector
from megamoe.runtime.vgpu.report import Report
from megamoe.runtime.vgpu.tensormap import TensorMap
from megamoe.runtime.vgpu.world import World

__all__ = [
    "AccessPlace",
    "Deadlock",
    "Finding",
    "FindingError",
    "Kernel",
    "LaunchError",
    "MemoryFault",
    "PtxSyntaxError",
    "RaceDetector",
    "Report",
    "SyncError",
    "TensorMap",
    "UnsupportedInstruction",
    "VgpuError",
    "World",
]
