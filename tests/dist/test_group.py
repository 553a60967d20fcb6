"""Groups, agreement and ``MegaMoE`` over gloo processes (CASES X1, X11, X14)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megamoe import MegaMoE, MoEConfig
from megamoe.error_bound import error_bound
from megamoe.reference import moe_oracle
from megamoe.runtime.errors import MegaMoEError, TransportError
from megamoe.runtime.group import DistGroup, agree, group_of
from megamoe.runtime.transports.choose import choose_transport
from megamoe.verify.inputs import make_inputs

pytestmark = pytest.mark.dist
CPU = torch.device("cpu")


def config(**changes: Any) -> MoEConfig:
    sizes: dict[str, Any] = {
        "hidden": 64,
        "intermediate": 64,
        "num_experts": 6,
        "top_k": 2,
        "num_pes": 2,
        "max_tokens": 32,
    }
    return MoEConfig(**(sizes | changes))


def split_experts(
    cfg: MoEConfig, w13: torch.Tensor, w2: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    mine = [list(cfg.local_experts(pe)) for pe in range(cfg.num_pes)]
    return [w13[experts] for experts in mine], [w2[experts] for experts in mine]


def begin(rank: int, size: int, folder: str, seconds: float = 60) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )


def groups_worker(rank: int, size: int, folder: str) -> None:
    begin(rank, size, folder)
    for members in ([0, 2], [1, 3], [0, 1, 2], [3, 1], list(range(size))):
        process_group = dist.new_group(members)
        if rank not in members:
            with pytest.raises(MegaMoEError, match=f"rank {rank} of the world is not in"):
                DistGroup(process_group)
            continue
        group = group_of(process_group, num_pes=len(members))
        assert isinstance(group, DistGroup)
        # torch orders a group by global rank.
        assert group.global_ranks == tuple(sorted(members))
        assert group.gather("ranks", rank) == sorted(members)
        assert group.global_ranks[group.rank] == rank
        agree(group, {"same": 1})
        with pytest.raises(ValueError, match="max_tokens: rank 0 has 0, rank 1 has 1"):
            agree(group, {"max_tokens": group.rank})
        with pytest.raises(ValueError, match=f"num_pes=9: .*size of the group, {len(members)}"):
            group_of(process_group, num_pes=9)
        with pytest.raises(TransportError, match="the device is cpu, not a GPU"):
            choose_transport("auto", group=group, device=None, memory=CPU)  # type: ignore[arg-type]
    dist.destroy_process_group()


def test_a_pe_is_a_rank_in_its_group(tmp_path: Path) -> None:
    mp.spawn(groups_worker, args=(4, str(tmp_path)), nprocs=4)


def module_worker(rank: int, size: int, folder: str) -> None:
    begin(rank, size, folder)
    cfg = config(num_pes=size)
    data = make_inputs(cfg, tokens=[0, 20], seed=3)
    w13, w2 = split_experts(cfg, data.w13, data.w2)
    layer = MegaMoE(cfg, w13[rank], w2[rank])
    y_TH = layer(data.x[rank], data.topk_ids[rank], data.topk_weights[rank])
    assert y_TH.dtype == torch.bfloat16
    error_TH = (y_TH.double() - moe_oracle(cfg, **data.kwargs)[rank]).abs()
    assert bool((error_TH <= error_bound(cfg, **data.kwargs)[rank]).all())
    # The process ends here without destroying the group.


def test_the_module_on_the_cpu_equals_the_oracle(tmp_path: Path) -> None:
    mp.spawn(module_worker, args=(2, str(tmp_path)), nprocs=2)


def missing_worker(rank: int, size: int, folder: str) -> None:
    begin(rank, size, folder, seconds=2)
    if rank == 1:
        time.sleep(5)
        os._exit(0)
    with pytest.raises(MegaMoEError, match=r"exchanging the settings of 2 ranks failed on rank 0"):
        agree(group_of(None, num_pes=2), {"a": 1})
    os._exit(0)


def test_a_missing_rank_is_an_error_not_a_hang(tmp_path: Path) -> None:
    started = time.monotonic()
    mp.spawn(missing_worker, args=(2, str(tmp_path)), nprocs=2)
    assert time.monotonic() - started < 45


EXIT = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[3])
sys.path.insert(0, sys.argv[3] + "/../cpu")
from test_group import begin, config, make_inputs, split_experts, MegaMoE
rank = int(sys.argv[1])
begin(rank, 2, sys.argv[2])
cfg = config()
data = make_inputs(cfg, tokens=[3, 4])
w13, w2 = split_experts(cfg, data.w13, data.w2)
MegaMoE(cfg, w13[rank], w2[rank])(data.x[rank], data.topk_ids[rank], data.topk_weights[rank])
if rank == 1:
    raise KeyError("only rank 1")
"""


def test_an_error_on_one_rank_stays_visible_and_hangs_nobody(tmp_path: Path) -> None:
    tests = Path(__file__).parent
    children = [
        subprocess.Popen(
            [sys.executable, "-c", EXIT, str(rank), str(tmp_path), str(tests)],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(tests.parent)},
        )
        for rank in range(2)
    ]
    ends = [child.communicate(timeout=60)[1] for child in children]
    assert [child.returncode for child in children] == [0, 1], ends
    assert "KeyError: 'only rank 1'" in ends[1]
