"""From a status record to one clear error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megamoe.cute_kernels.abi import PHASE_TEXT, Phase, Status, StatusWord
from megamoe.runtime.errors import InvalidExpertId, MegaMoETimeout, PoolCapacityError

if TYPE_CHECKING:
    from megamoe.runtime.session import PeSession


def timeout_text(words: dict[StatusWord, int], *, pe: int, timeout_s: float) -> str:
    """Who waited for whom, in which phase and epoch, what was expected and seen."""
    phase = Phase(words[StatusWord.PHASE])
    peer, index = words[StatusWord.PEER], words[StatusWord.INDEX]
    where = {
        Phase.COUNT: f", CTA {index}",
        Phase.X_READY: f", block {index}",
        Phase.H_READY: f", block {index}",
        Phase.FREE: f", block {index}",
        Phase.Y_READY: f", block {index}",
        Phase.DONE: f", token {index}",
    }.get(phase, f" {peer}")
    return (
        f"PE {pe}, CTA {words[StatusWord.CTA]}, epoch {words[StatusWord.EPOCH]}: "
        f"{PHASE_TEXT[phase]}{where}: expected {words[StatusWord.EXPECTED]}, "
        f"seen {words[StatusWord.SEEN]} after {timeout_s:g} s. "
        "All PEs must rebuild the session together."
    )


def raise_on_status(session: PeSession) -> None:
    """Raise the error of the session's status record, if any. A timeout poisons the session.

    The record may be seen while the kernel writes it, so the device is waited for, but only when
    there is an error to tell."""
    if session.poisoned is not None:
        raise MegaMoETimeout(session.poisoned)
    words = session.status_words()
    if not any(words.values()):
        return
    session.device.synchronize()
    words = session.status_words()
    code = Status(words[StatusWord.CODE])
    if code == Status.TIMEOUT:
        session.poisoned = timeout_text(words, pe=session.pe, timeout_s=session.timeout_s)
        raise MegaMoETimeout(session.poisoned)
    if code == Status.CAPACITY:
        session.clear_status()
        raise PoolCapacityError(
            f"epoch {words[StatusWord.EPOCH]}: the pool of PE {words[StatusWord.PEER]} needs "
            f"{words[StatusWord.EXPECTED]} rows, available are {words[StatusWord.SEEN]}; "
            "raise MoEConfig(capacity=...) or leave it None. No PE computed this call."
        )
    if words[StatusWord.INVALID_IDS]:
        session.clear_status()
        if session.check_invalid_ids:
            raise InvalidExpertId(
                f"topk_ids[{words[StatusWord.INVALID_TOKEN]}, {words[StatusWord.INVALID_SLOT]}]="
                f"{words[StatusWord.INVALID_ID]} on PE {session.pe}: must be below "
                f"num_experts={session.problem.num_experts}; the slot was treated as masked"
            )
