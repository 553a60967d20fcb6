"""megamoe: the expert-parallel MoE FFN of a transformer layer as one persistent GPU kernel."""

from megamoe.config import MoEConfig

__version__ = "0.1.0"
__all__ = ["MoEConfig", "__version__"]
