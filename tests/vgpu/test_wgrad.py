"""The wgrad kernel on vgpu: every layout, type and way to write, on rows of every awkward number.

All runs are under the race detector; memory that no row fills is NaN.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from wgrad_harness import SavedData, Wgrad, WgradCase, draw, oracle, run

LAYOUTS = {
    "plain": {},
    "up_first": {"w13_layout": "up_gate", "w2_transposed": True},
    "interleaved": {"w13_layout": "interleaved", "weight_at": "combine"},
    "transposed": {"w13_transposed": True, "w2_transposed": True},
    "transposed_up_first": {"w13_transposed": True, "w13_layout": "up_gate"},
    "paired": {"w13_transposed": True, "w13_layout": "interleaved", "weight_at": "combine"},
    "no_gate": {"activation": "relu2", "w2_transposed": True},
    "no_gate_transposed": {"activation": "relu2", "w13_transposed": True},
}
WITH_BIASES = WgradCase(bias="bf16")
SEVERAL = WgradCase(rows=((70, 0, 64, 1), (0, 0, 3, 130), (65, 0, 0, 64)))


def assert_exact(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Equal to the oracle rounded once to the gradient's type."""
    assert got.keys() == want.keys()
    for name, values in got.items():
        rounded = want[name].float().to(values.dtype)
        wrong = (values != rounded) | values.isnan()
        assert not bool(wrong.any()), f"{name}: {int(wrong.sum())} of {wrong.numel()} differ"


@pytest.mark.parametrize("accumulate", [False, True], ids=["store", "accumulate"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_on_integers_in_every_layout(layout: str, accumulate: bool) -> None:
    case = replace(WITH_BIASES, **LAYOUTS[layout])
    got, want, _ = run(case, accumulate=accumulate, detect=True)
    assert_exact(got, want)


@pytest.mark.parametrize("accumulate", [False, True], ids=["store", "accumulate"])
@pytest.mark.parametrize("layout", ["plain", "paired"])
def test_bf16_gradients_are_rounded_once(layout: str, accumulate: bool) -> None:
    case = replace(WITH_BIASES, grad="bf16", bias_grad="bf16", **LAYOUTS[layout])
    got, want, _ = run(case, accumulate=accumulate, detect=True)
    for name, values in want.items():
        inexact = values != values.float().bfloat16().double()
        assert bool(inexact.any()), f"{name}: bf16 holds every sum, so nothing is tested"
    assert_exact(got, want)


@pytest.mark.parametrize(
    "rows", [(64, 128, 192), (63, 65, 127), (1, 2, 255), (0, 0, 5), (0, 0, 0)], ids=str
)
def test_row_counts(rows: tuple[int, ...]) -> None:
    got, want, _ = run(replace(WITH_BIASES, rows=(rows,)), detect=True, completion="late")
    assert_exact(got, want)


def test_several_tiles_of_every_product() -> None:
    """Edges of I and H inside a second and third tile; the ring of stages wraps many times."""
    case = replace(WITH_BIASES, hidden=392, intermediate=264, rows=((2, 257),), bias="f32")
    for layout in ("plain", "transposed", "paired"):
        got, want, report = run(replace(case, **LAYOUTS[layout]), grid=3)
        assert_exact(got, want)
        assert report.wgmma_flops > 0


def test_several_saved_calls_are_summed_and_added_once() -> None:
    for grad in ("f32", "bf16"):
        case = replace(SEVERAL, grad=grad, bias="bf16", bias_grad=grad)
        got, want, _ = run(case, accumulate=True, detect=True)
        assert_exact(got, want)


def test_several_saved_calls_give_the_bits_of_one() -> None:
    """Whole stages from several calls, in list order: the same sums in the same order."""
    case = WgradCase(rows=((64, 64), (128, 0), (64, 64)), bias="bf16")
    wgrad = Wgrad(case)
    calls = [draw(case, rows, seed, False) for seed, rows in enumerate(case.rows)]
    bound = [wgrad.save(data, rows) for data, rows in zip(calls, case.rows, strict=True)]
    several = wgrad.gradients()
    wgrad.launcher.launch(bound, accumulate=False, **several)
    wgrad.world.run()
    joined = SavedData(
        [
            {name: torch.cat([call.experts[e][name] for call in calls]) for name in part}
            for e, part in enumerate(calls[0].experts)
        ]
    )
    one = Wgrad(replace(case, rows=((256, 128),)))
    single = one.gradients()
    one.launcher.launch([one.save(joined, (256, 128))], accumulate=False, **single)
    one.world.run()
    for name in several:
        assert torch.equal(several[name], single[name]), name


@pytest.mark.parametrize("grad", ["f32", "bf16"])
def test_error_bound_on_random_data(grad: str) -> None:
    """Rows of 16 bf16 products and n fp32 additions; one rounding of the result."""
    case = replace(WITH_BIASES, rows=((200, 63, 1),), grad=grad, bias_grad=grad)
    got, want, _ = run(case, integers=False, seed=5)
    wgrad_calls = [draw(case, rows, 500 + s, False) for s, rows in enumerate(case.rows)]
    magnitude = oracle(case, wgrad_calls, absolute=True)
    for name, values in got.items():
        terms = max(case.rows[0]) + 2
        bound = terms * 2.0**-23 * magnitude[name]
        if grad == "bf16":
            bound = bound + 2.0**-8 * want[name].abs()
        excess = (values.double() - want[name]).abs() - bound
        assert bool((excess <= 0).all()), f"{name}: {float(excess.max()):.3e} over the bound"


def test_experts_without_rows_keep_their_gradient_bit_for_bit() -> None:
    case = replace(WITH_BIASES, rows=((0, 5, 0),))
    wgrad = Wgrad(case, detect=True)
    bound = wgrad.save(draw(case, case.rows[0], 1, True), case.rows[0])
    grads = wgrad.gradients()
    for values in grads.values():
        bits = values.view(torch.int32)
        bits[0] = -0x80000000  # negative zero
        bits[2] = 0x7FABCDEF  # a NaN with a payload
        values[1] = 1.0
    before = {name: values.clone() for name, values in grads.items()}
    wgrad.launcher.launch([bound], accumulate=True, **grads)
    wgrad.world.run(raise_on_finding=True)
    for name, values in grads.items():
        got, want = values.view(torch.int32), before[name].view(torch.int32)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[2], want[2])
        assert not torch.equal(got[1], want[1])


def test_a_gradient_per_expert_and_gradients_that_are_not_wanted() -> None:
    case = WITH_BIASES
    wgrad = Wgrad(case, detect=True)
    data = draw(case, case.rows[0], 2, True)
    bound = wgrad.save(data, case.rows[0])
    want = oracle(case, [data])
    grads = {name: list(values) for name, values in wgrad.gradients(7.0).items()}
    lists = {name: [t.clone() for t in grads[name]] for name in ("w13", "b2")}
    lists["w13"][2] = None
    lists["b2"][0] = None
    tables = {name: wgrad.launcher.bind_list(name, values) for name, values in lists.items()}
    for _ in range(2):
        wgrad.launcher.launch([bound], accumulate=True, **tables)
        wgrad.world.run(raise_on_finding=True)
    for name, values in lists.items():
        for e, value in enumerate(values):
            if value is not None:
                assert torch.equal(value.double(), 7 + 2 * want[name][e]), (name, e)
    # Only what is asked for is multiplied.
    only = wgrad.gradients()
    wgrad.launcher.launch([bound], accumulate=False, b13=only["b13"])
    report = wgrad.world.run(raise_on_finding=True)
    assert report.wgmma_flops == 0
    assert torch.equal(only["b13"].double(), want["b13"])
    for table in tables.values():
        wgrad.launcher.release(table)
    wgrad.launcher.release(bound)


def test_the_same_bits_whatever_the_order() -> None:
    case = replace(SEVERAL, bias="bf16", weight_at="combine")
    want: dict[str, torch.Tensor] = {}
    for seed, grid in enumerate((1, 2, 3, 7, 2, 4)):
        wgrad = Wgrad(
            case,
            grid=grid,
            seed=seed,
            schedule=("round_robin", "random", "starve")[seed % 3],
            completion=("eager", "late", "random")[(seed // 2) % 3],
        )
        bound = [wgrad.save(draw(case, n, s, False), n) for s, n in enumerate(case.rows)]
        grads = wgrad.gradients()
        wgrad.launcher.launch(bound, accumulate=False, **grads)
        wgrad.world.run()
        want = want or grads
        for name, values in grads.items():
            assert torch.equal(values, want[name]), (name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_twenty_seeds_are_clean_and_alike(seed: int) -> None:
    case = replace(SEVERAL, bias="bf16")
    got, want, _ = run(
        case,
        seed=seed,
        grid=1 + seed % 4,
        schedule=("round_robin", "random", "starve")[seed % 3],
        completion=("eager", "late", "random")[(seed // 3) % 3],
        detect=True,
    )
    assert_exact(got, want)


def test_one_launch_and_a_pe_without_experts() -> None:
    wgrad = Wgrad(WITH_BIASES)
    bound = wgrad.save(draw(WITH_BIASES, WITH_BIASES.rows[0], 1, True), WITH_BIASES.rows[0])
    wgrad.launcher.experts = 0
    nothing = {name: t[:0] for name, t in wgrad.gradients().items()}
    wgrad.launcher.launch([bound], accumulate=False, **nothing)
    report = wgrad.world.run()
    assert report.wgmma_flops == 0
    wgrad.launcher.experts = WITH_BIASES.experts
    wgrad.launcher.launch([bound], accumulate=False, **wgrad.gradients())
    wgrad.world.run()
    assert wgrad.device.launches == 2


def test_refusals() -> None:
    launcher = Wgrad(WgradCase()).launcher
    good = torch.zeros(4, 144, 136)
    saved = Wgrad(WgradCase())
    bound = saved.save(draw(WgradCase(), (70, 0, 128, 1), 1, True), (70, 0, 128, 1))
    with pytest.raises(ValueError, match="saved: 0 calls, allowed are 1 to 8"):
        launcher.launch([], accumulate=False, w13=good)
    with pytest.raises(ValueError, match=r"w13: torch.bfloat16 .* must be torch.float32"):
        launcher.launch([bound], accumulate=False, w13=good.bfloat16())
    with pytest.raises(ValueError, match=r"w13: .* must be contiguous"):
        launcher.launch([bound], accumulate=False, w13=torch.zeros(4, 136, 144).mT)
    with pytest.raises(ValueError, match=r"b13: this layer has the gradients \['w13', 'w2'\]"):
        launcher.launch([bound], accumulate=False, b13=torch.zeros(4, 144))
    with pytest.raises(ValueError, match="w13: 1 tensors, must be 4"):
        launcher.bind_list("w13", [None])
    with pytest.raises(ValueError, match="w2: the list was bound as w13"):
        launcher.launch([bound], accumulate=False, w2=launcher.bind_list("w13", [None] * 4))
