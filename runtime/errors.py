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


class DriverError(MegaMoEError):
    """A call of the CUDA driver failed; names the call and the driver's error."""


class DriverMissing(DriverError):
    """This machine has no CUDA driver."""


class UnsupportedDevice(MegaMoEError):
    """This GPU cannot run the image; says what was found, what is needed, and what else works."""


class LaunchRefused(MegaMoEError):
    """The grid cannot be resident at once, so its waits could hang."""


class TransportError(MegaMoEError):
    """Symmetric memory could not be set up; raised alike on every rank."""


class SymmetricMemoryError(TransportError):
    """A rank has too little memory; names asked and free bytes, and what lowers the need."""


class SessionClosed(MegaMoEError):
    """The session was used after ``close()``."""


class SavedStateError(MegaMoEError):
    """What a forward saved was used twice, after it was freed, out of order, or with a session that
    did not make it."""
