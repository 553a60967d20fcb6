"""Errors a call can end with. Bad arguments are ``ValueError``; these are about the group."""


class MegaMoEError(RuntimeError):
    """Base of the errors below."""


class MegaMoETimeout(MegaMoEError):
    """A wait for another CTA or PE passed its deadline. The session is unusable until all PEs
    rebuild it together: late signals of the lost epoch could otherwise satisfy a later one."""


class PoolCapacityError(MegaMoEError):
    """Some PE's pool is too small for this call's routing; raised alike on every PE."""


class InvalidExpertId(MegaMoEError, ValueError):
    """The kernel met an expert id ≥ E. The slot was treated as masked."""


class CompilerMissing(MegaMoEError):
    """An image is in no cache and this machine has no compiler to make it."""
