"""Integer helpers shared by host tables and traced code."""


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉ for non-negative integers."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``a``."""
    return ceil_div(a, multiple) * multiple
