"""Bad tensors are refused by name, value and rule; good ones are left alone (CASES I2, I5, I6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megamoe import MoEConfig
from megamoe.checks import (
    check_group,
    check_group_weights,
    check_inputs,
    check_residual,
    check_weights,
)

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


def test_weights_follow_layout_and_gating() -> None:
    turned = replace(CFG, w13_transposed=True, w13_layout="interleaved")
    w13, w2 = torch.zeros(3, 64, 256).bfloat16(), torch.zeros(3, 64, 128).bfloat16()
    check_weights(turned, w13, w2, num_experts=3)
    with pytest.raises(ValueError, match=r"w13 has shape \[3, 64, 256\]: must be \[3, 256, 64\]"):
        check_weights(CFG, w13, w2, num_experts=3)
    check_weights(replace(CFG, w2_transposed=True), w13.mT.contiguous(), w2.mT.contiguous(),
                  num_experts=3)  # fmt: skip
    plain = replace(CFG, activation="relu2")
    check_weights(plain, torch.zeros(3, 128, 64).bfloat16(), w2, num_experts=3)
    with pytest.raises(ValueError, match=r"w13 has shape \[3, 256, 64\]: must be \[3, 128, 64\]"):
        check_weights(plain, w13.mT.contiguous(), w2, num_experts=3)


def test_biases() -> None:
    cfg = replace(CFG, fc1_bias=True, fc2_bias=True)
    w13, w2 = torch.zeros(4, 256, 64).bfloat16(), torch.zeros(4, 64, 128).bfloat16()
    biases = {"b13": torch.zeros(4, 256), "b2": torch.zeros(4, 64).bfloat16()}
    check_weights(cfg, w13, w2, num_experts=4, **biases)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"b13": None}, r"b13\[1\] is None: must be a tensor, as fc1_bias=True"),
        ({"b2": None}, r"b2\[1\] is None: must be a tensor, as fc2_bias=True"),
        ({"b13": torch.zeros(4, 128)}, r"b13\[1\] has shape \[4, 128\]: must be \[4, 256\]"),
        (
            {"b2": torch.zeros(4, 64).half()},
            r"b2\[1\] has dtype float16: must be bf.*, float32",
        ),
        ({"b2": torch.zeros(64, 4).T}, r"b2\[1\] has strides"),
    ]
    for change, match in changes:
        with pytest.raises(ValueError, match=match):
            check_weights(cfg, w13, w2, num_experts=4, pe=1, **{**biases, **change})
    with pytest.raises(ValueError, match="b13 is given: must be None, as fc1_bias=False"):
        check_weights(CFG, w13, w2, num_experts=4, b13=biases["b13"])


def test_group_weights_and_residual() -> None:
    cfg = replace(CFG, fc2_bias=True, expert_map=[(0, 0), (0, 1), *((1, i) for i in range(6))])
    w13 = [torch.zeros(n, 256, 64).bfloat16() for n in (2, 6)]
    w2 = [torch.zeros(n, 64, 128).bfloat16() for n in (2, 6)]
    b2 = [torch.zeros(n, 64) for n in (2, 6)]
    check_group_weights(cfg, w13=w13, w2=w2, b2=b2)
    with pytest.raises(ValueError, match=r"w13\[0\] has shape \[6, 256, 64\]: .*\[2, 256, 64\]"):
        check_group_weights(cfg, w13=w13[::-1], w2=w2, b2=b2)
    with pytest.raises(ValueError, match="b2 has 1 entries: must be a list of num_pes=2"):
        check_group_weights(cfg, w13=w13, w2=w2, b2=b2[:1])
    x = [torch.zeros(n, 64).bfloat16() for n in (3, 0)]
    check_residual(cfg, None, x=x)
    check_residual(cfg, [torch.ones(3, 64).bfloat16(), x[1]], x=x)
    with pytest.raises(ValueError, match=r"residual\[0\] has shape \[0, 64\]: must be \[3, 64\]"):
        check_residual(cfg, x[::-1], x=x)
    with pytest.raises(ValueError, match=r"residual\[0\] has dtype float32: must be bfloat16"):
        check_residual(cfg, [t.float() for t in x], x=x)
