"""Import and exit of a process that uses megamoe (CASES X17)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parent,
    )


def test_importing_megamoe_is_light():
    code = (
        "import sys, megamoe; megamoe.MoEConfig; dir(megamoe)\n"
        "heavy = {'torch', 'cutlass', 'cuda', 'nvshmem', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "megamoe.plan; assert 'torch' not in sys.modules\n"
        "megamoe.MegaMoE, megamoe.Session, megamoe.forward; assert 'cutlass' not in sys.modules\n"
        "try: megamoe.nothing\nexcept AttributeError as e: print(e)\n"
    )
    ran = run_python(code)
    assert ran.returncode == 0, ran.stderr
    assert "no attribute 'nothing'" in ran.stdout


def test_the_interpreter_leaves_an_open_session_behind(tmp_path):
    """Neither a hang nor a crash, with and without an exception on the way."""
    code = (
        "import torch; from api_helpers import *\n"
        f"layer, api = recording_layer(config(), {str(tmp_path)!r})\n"
        "torch.set_grad_enabled(False); layer(*inputs(config()))\n"
        "print(len(api.launches), flush=True)\n"
    )
    ran = run_python(code)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "2\n", "")
    ran = run_python(code + "raise KeyError('mine')\n")
    assert ran.returncode == 1 and "KeyError: 'mine'" in ran.stderr
