"""megamoe: the expert-parallel MoE FFN of a transformer layer as one persistent GPU kernel.

Importing this needs neither torch nor the compiler; both are loaded by what uses them.
"""

from typing import TYPE_CHECKING, Any

from megamoe._version import __version__
from megamoe.config import MoEConfig

if TYPE_CHECKING:
    from megamoe.module import MegaMoE, forward
    from megamoe.planning import plan
    from megamoe.runtime.errors import MegaMoEError
    from megamoe.session import Session

_LAZY = {
    "MegaMoE": "megamoe.module",
    "forward": "megamoe.module",
    "Session": "megamoe.session",
    "plan": "megamoe.planning",
    "MegaMoEError": "megamoe.runtime.errors",
}

__all__ = [
    "MegaMoE",
    "MegaMoEError",
    "MoEConfig",
    "Session",
    "__version__",
    "forward",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'megamoe' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
