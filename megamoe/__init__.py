"""megamoe: the expert-parallel MoE FFN of a transformer layer as one persistent GPU kernel."""

__version__ = "0.1.0"
