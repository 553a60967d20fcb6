"""Bad tensors are refused by name, value and rule; good ones are left alone (CASES I2, I5, I6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megamoe import MoEConfig
from megamoe.checks import check_group, check_inputs, check_weights

CFG = MoEConfig(hidden=64, intermediate=128, num_experts=8, top_k=2, num_pes=2, max_tokens=5)


def good(num_tokens: int = 3) -> dict[str, Any]:
    return {
        "x_TH": torch.zeros(num_tokens, 64, dtype=torch.bfloat16),
        "topk_ids_TK": torch.zeros(num_tokens, 2, dtype=torch.int32),
        "topk_weights_TK": torch.zeros(num_tokens, 2),
    }


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
def test_accepted(num_tokens: int, ids: torch.dtype, weights: torch.dtype) -> None:
    args = good(num_tokens)
    args["topk_ids_TK"] = args["topk_ids_TK"].to(ids)
    args["topk_weights_TK"] = args["topk_weights_TK"].to(weights)
    check_inputs(CFG, **args)


def test_any_row_stride_is_accepted() -> None:
    args = good()
    args["x_TH"] = torch.zeros(3, 200, dtype=torch.bfloat16)[:, 5:69]
    args["topk_ids_TK"] = torch.zeros(3, 7, dtype=torch.int64)[:, 2:4]
    check_inputs(CFG, **args)
    check_inputs(CFG, **{**args, "x_TH": torch.zeros(1, 64, dtype=torch.bfloat16).expand(3, -1)})


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("x_TH", lambda x: x[:, :63], r"x has shape \[3, 63\]: must be \[T, 64\]"),
        ("x_TH", lambda x: x[0], r"x has shape \[64\]: must be \[T, 64\]"),
        ("x_TH", lambda x: x.float(), "x has dtype float32: must be bfloat16"),
        ("x_TH", lambda x: x.repeat(2, 1), "x has 6 tokens: must be <= max_tokens=5"),
        ("x_TH", lambda x: torch.zeros(64, 3).bfloat16().T, "x has strides .1, 3.: its last dim"),
        ("x_TH", lambda x: x.numpy, "x is a builtin_function_or_method: must be a torch.Tensor"),
        ("topk_ids_TK", lambda i: i[:2], r"topk_ids has shape \[2, 2\]: must be \[3, 2\]"),
        ("topk_ids_TK", lambda i: i[:, :1], r"topk_ids has shape \[3, 1\]: must be \[3, 2\]"),
        ("topk_ids_TK", lambda i: i.to(torch.int16), "topk_ids has dtype int16: .*int32, int64"),
        ("topk_ids_TK", lambda i: i.to(torch.uint32), "topk_ids has dtype uint32"),
        ("topk_ids_TK", lambda i: i.float(), "topk_ids has dtype float32"),
        ("topk_ids_TK", lambda i: i.to("meta"), "topk_ids is on meta: must be on cpu"),
        ("topk_weights_TK", lambda w: w.double(), "topk_weights has dtype float64: must be"),
        ("topk_weights_TK", lambda w: w[:, :1], r"topk_weights has shape \[3, 1\]"),
    ],
)  # fmt: skip
def test_refused(name: str, change: Callable[[Any], Any], match: str) -> None:
    args = good()
    args[name] = change(args[name])
    with pytest.raises(ValueError, match=match):
        check_inputs(CFG, **args)


@pytest.mark.parametrize("bad", [8, 9, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_past_the_last_expert(bad: int, dtype: torch.dtype) -> None:
    """I2: an error that names token, slot and id, or a masked slot; never an index."""
    args = good()
    args["topk_ids_TK"] = torch.tensor([[0, 7], [-1, bad], [bad, 0]], dtype=dtype)
    before = args["topk_ids_TK"].clone()
    check_inputs(replace(CFG, invalid_ids="mask"), **args)
    with pytest.raises(
        ValueError, match=rf"topk_ids\[1\]\[1, 1\]={bad} \(token 1, slot 1\).*< num"
    ):
        check_inputs(CFG, **args, pe=1)
    assert torch.equal(args["topk_ids_TK"], before)
    args["topk_ids_TK"] = torch.tensor([[0, 7], [-1, -5], [7, 0]], dtype=dtype)
    check_inputs(CFG, **args)


def test_group_lists() -> None:
    def group(count: int) -> dict[str, Any]:
        args = [good(pe) for pe in range(count)]
        return {
            "x": [a["x_TH"] for a in args],
            "topk_ids": [a["topk_ids_TK"] for a in args],
            "topk_weights": [a["topk_weights_TK"] for a in args],
        }

    check_group(CFG, **group(2))
    with pytest.raises(ValueError, match="x has 3 entries: must be a list of num_pes=2"):
        check_group(CFG, **group(3))
    with pytest.raises(ValueError, match="x has 2 entries: must be a list"):
        check_group(CFG, **{**group(2), "x": torch.zeros(2, 3, 64)})
    broken = group(2)
    broken["topk_weights"][1] = broken["topk_weights"][1].double()
    with pytest.raises(ValueError, match=r"topk_weights\[1\] has dtype float64"):
        check_group(CFG, **broken)


def test_weights() -> None:
    w13_LGH = torch.zeros(3, 256, 64, dtype=torch.bfloat16)
    w2_LHI = torch.zeros(3, 64, 128, dtype=torch.bfloat16)
    check_weights(CFG, w13_LGH, w2_LHI, num_experts=3)
    with pytest.raises(ValueError, match=r"w13\[1\] has shape \[3, 256, 64\]: must be \[4, 256"):
        check_weights(CFG, w13_LGH, w2_LHI, num_experts=4, pe=1)
    with pytest.raises(ValueError, match=r"w2 has shape \[3, 128, 64\]: must be \[3, 64, 128\]"):
        check_weights(CFG, w13_LGH, w2_LHI.mT.contiguous(), num_experts=3)
    with pytest.raises(ValueError, match="w2 has strides"):
        check_weights(CFG, w13_LGH, w2_LHI.mT.contiguous().mT, num_experts=3)
    with pytest.raises(ValueError, match="w13 has dtype float32: must be bfloat16"):
        check_weights(CFG, w13_LGH.float(), w2_LHI, num_experts=3)
    with pytest.raises(ValueError, match="w13 is on cpu: must be on cuda:0"):
        check_weights(CFG, w13_LGH, w2_LHI, num_experts=3, device=torch.device("cuda:0"))
