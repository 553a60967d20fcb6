"""Each feature of the forward alone and in the combinations that models use, on vgpu."""

import pytest
import torch
from feature_runs import check, run
from forward_cases import assert_same_bits
from strategies import Call

from megamoe import MoEConfig
from megamoe.testing import VgpuMoE
from megamoe.verify.inputs import weights_per_pe

REPLICAS = ((1, 1), ((0, 3), (1, 0)), (0, 2), (0, 0), (1, 2), (1, 3), ((0, 1), (0, 4)), (1, 4))
"""Expert 1 on both PEs, expert 6 twice on PE 0 (CASES A10)."""
GPT_OSS = {
    "activation": "gpt_oss",
    "w13_layout": "interleaved",
    "w13_transposed": True,
    "w2_transposed": True,
    "fc1_bias": True,
    "fc2_bias": True,
    "hidden": 360,
    "intermediate": 328,
}
FEATURES = {
    "up_gate": {"w13_layout": "up_gate"},
    "interleaved": {"w13_layout": "interleaved"},
    "transposed": {"w13_transposed": True, "w2_transposed": True},
    "w13_transposed": {"w13_transposed": True},
    "w2_transposed": {"w2_transposed": True},
    "paired_rows_then_k_major": {"w13_layout": "interleaved", "w13_transposed": True},
    "no_gate": {"activation": "relu2", "intermediate": 520},
    "no_gate_transposed": {"activation": "relu2", "w13_transposed": True, "w2_transposed": True},
    "biases": {"fc1_bias": True, "fc2_bias": True},
    "biases_interleaved": {"fc1_bias": True, "w13_layout": "interleaved"},
    "weight_at_combine": {"weight_at": "combine", "fc2_bias": True},
    "prereduced": {"combine": "prereduced"},
    "prereduced_weighted": {"combine": "prereduced", "weight_at": "combine", "top_k": 5},
    "replicas": {"expert_map": REPLICAS},
    "replicas_prereduced": {"expert_map": REPLICAS, "combine": "prereduced", "top_k": 4},
    "odd_sizes": {"hidden": 520, "intermediate": 264},
    "tiny": {"hidden": 8, "intermediate": 8},
    "ring": {"ring_rows": 256, "top_k": 4},
    "ring_prereduced": {"ring_rows": 256, "top_k": 4, "combine": "prereduced"},
}
ROUNDED = {
    "gelu_tanh": {"activation": "gelu_tanh"},
    "swiglu_clamped": {"activation": "swiglu_clamped", "activation_limit": 0.5},
    "gpt_oss": GPT_OSS,
    "gpt_oss_weighted": GPT_OSS | {"weight_at": "combine", "combine": "prereduced"},
}


def call_of(features: dict, *, integers: bool, seed: int = 3) -> Call:
    sizes = {"hidden": 512, "intermediate": 256, "num_experts": 8, "top_k": 2, "num_pes": 2}
    base = {"max_tokens": 64, "activation": "relu", "combine": "direct"}
    return Call(
        cfg=MoEConfig(**(sizes | base | features)),
        tokens=(61, 38),
        integers=integers,
        seed=seed,
        masked=0.1,
        repeated=0.1,
        residual=True,
        id_dtype=torch.int64,
        weight_dtype=torch.float32,
        bias_dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("name", FEATURES)
def test_integers_bit_for_bit(name):
    call = call_of(FEATURES[name], integers=True)
    check(call, run(call).y)


@pytest.mark.parametrize("name", ROUNDED)
def test_random_data_within_the_derived_bound(name):
    call = call_of(ROUNDED[name], integers=False)
    check(call, run(call).y)


def test_bias_types_agree_on_integers():
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        call = call_of(FEATURES["biases"], integers=True)
        call = Call(**(vars(call) | {"bias_dtype": dtype}))
        results.append(run(call).y)
    assert_same_bits(*results)


@pytest.mark.parametrize("combine", ["direct", "prereduced"])
def test_traffic_is_the_lower_bound_plus_little_metadata(combine):
    """One row per (token, needed PE) out; back one per (token, k), or per (token, PE)."""
    features = {"combine": combine, "hidden": 2048, "intermediate": 64, "top_k": 4}
    call = call_of(features, integers=True)
    result = run(call)
    data = call.inputs()
    out = back = 0
    for pe, ids_TK in enumerate(data.topk_ids):
        for token_ids in ids_TK.tolist():
            owners = [call.cfg.placement[e][0] for e in token_ids if e >= 0]
            away = [owner for owner in owners if owner != pe]
            out += len(set(away))
            back += len(away) if combine == "direct" else len(set(away))
    rows = (out + back) * 2 * call.cfg.hidden
    assert rows <= result.counters["bytes_between_pes"] < 1.02 * rows


@pytest.mark.parametrize("mode", ["direct", "prereduced", "ring"])
def test_bytes_of_each_role(mode):
    """What a role reads and writes is what its work needs, and little more."""
    features = {"hidden": 2048, "intermediate": 64, "top_k": 4, "combine": "direct"}
    features |= {"ring": {"ring_rows": 256}, "prereduced": {"combine": mode}}.get(mode, {})
    call = call_of(features, integers=True)
    counters = run(call).counters
    pairs = rows = 0
    for ids_TK in call.inputs().topk_ids:
        for token_ids in ids_TK.tolist():
            owners = [call.cfg.placement[e][0] for e in token_ids if e >= 0]
            pairs += len(set(owners))
            rows += len(owners)
    row_bytes = 2 * call.cfg.hidden
    read, written = counters["bytes_read_by_role"], counters["bytes_written_by_role"]
    fetches = rows if mode == "ring" else pairs
    assert sum(counters["row_fetches"]) == fetches
    assert fetches * row_bytes <= read["recv-and-place"] < 1.1 * fetches * row_bytes
    assert rows * row_bytes <= written["recv-and-place"] < 1.1 * rows * row_bytes
    # Results leave math once; h and pieces of unused rows come on top.
    assert rows * row_bytes <= written["math"]
    # All warps stage and count; what load reads besides are the experts in use and pool rows.
    used = {e for ids_TK in call.inputs().topk_ids for e in ids_TK.flatten().tolist() if e >= 0}
    expert_bytes = 2 * 2048 * (call.cfg.w13_rows + call.cfg.intermediate)
    assert read["load"] >= len(used) * expert_bytes + rows * (row_bytes + 2 * 64)


def test_a_ring_pool_fetches_again_but_computes_the_same():
    full = call_of({"top_k": 4}, integers=False)
    ring = call_of({"top_k": 4, "ring_rows": 256}, integers=False)
    again, once = run(ring), run(full)
    assert_same_bits(again.y, once.y)
    assert again.counters["row_fetches"] == again.counters["rows"]
    assert sum(once.counters["row_fetches"]) < sum(once.counters["rows"])


def test_token_widths_change_no_bit():
    """A token's result does not depend on how many others its tile holds (CASES D3)."""
    call = call_of({"num_pes": 1, "num_experts": 4}, integers=False)
    call = Call(**(vars(call) | {"tokens": (61,), "masked": 0.0, "residual": False}))
    data = call.inputs()
    moe = VgpuMoE(call.cfg, **weights_per_pe(call.cfg, data))
    whole = run(call).y[0]
    for tokens in (1, 2, 17):
        got = moe.forward(
            x=[data.x[0][:tokens]],
            topk_ids=[data.topk_ids[0][:tokens]],
            topk_weights=[data.topk_weights[0][:tokens]],
        )
        assert_same_bits(got.y, [whole[:tokens]])
