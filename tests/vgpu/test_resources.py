"""Limits of the hardware that a run or a launch has to respect."""

from __future__ import annotations

import numpy as np
import pytest
from vgpu_harness import entry, run, u64_params

from megamoe.runtime.vgpu import LaunchError, SyncError, VgpuError

HEAD = ".shared .align 8 .b64 bars[4]; .shared .align 128 .b8 buf[512];\n"
ONE = "mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 0; @%p0 exit; mov.u32 %r1, bars;\n"
INIT = "mbarrier.init.shared.b64 [bars], 2;\n"


def refuse(code: str, error: type[Exception], text: str, **launch) -> None:
    with pytest.raises(error, match=text):
        run(entry(code, u64_params(1), head=HEAD), [np.zeros(4, np.uint32)], **launch)


@pytest.mark.parametrize(
    ("launch", "text"),
    [
        ({"block": 1056}, "1056 threads"),
        ({"block": 512, "registers": 168}, "86016 of 65536"),
        ({"smem": 240000}, "limit 232448"),
        ({"grid": 34, "cluster": 17}, "at most 16"),
    ],
)
def test_launches(launch, text):
    refuse("mov.u32 %r0, 1;", LaunchError, text, **launch)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("mbarrier.init.shared.b64 [bars], 0x100000;", "count 1048576"),
        ("mbarrier.init.shared.b64 [bars+4], 1;", "init at"),
        (INIT + "mbarrier.arrive.shared.b64 _, [bars]; " + INIT, "over a live mbarrier"),
        (INIT + "mbarrier.arrive.expect_tx.shared.b64 _, [bars], 0x100000;", "out of range"),
        (INIT + "mbarrier.expect_tx.relaxed.cta.shared.b64 [bars], 0x100000;", "out of range"),
        (INIT + "mbarrier.inval.shared.b64 [bars]; mbarrier.arrive.shared.b64 _, [bars];",
         "no initialised mbarrier"),
    ],
)  # fmt: skip
def test_mbarriers(code, text):
    refuse(ONE + code, SyncError, text)


@pytest.mark.parametrize("number", ["20", "41", "264"])
def test_setmaxnreg_values(number):
    refuse(f"setmaxnreg.inc.sync.aligned.u32 {number};", VgpuError, number, registers=40)
