"""Any small layer, call and kernel config: drawn by hypothesis, run on vgpu, against the oracle.

An example is a call. Each of the 200 has a layer and config of its own; of the 2,000, five share
them, as compiling a kernel takes most of the time, and differ in everything else: tokens, ids,
masks, types, grid and schedule. Examples come in chunks so that test workers share them; a chunk's
seed is fixed, so a failure repeats.
"""

import pytest
from feature_runs import check, problem_of, run
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from strategies import Call, calls, calls_of, kernel_configs

from megamoe.runtime.vgpu.schedule import SCHEDULES
from megamoe.runtime.vgpu.world import COMPLETIONS

CHUNK = 20


def run_chunk(number: int, *, integers: bool, share: int = 1) -> int:
    """Run ``CHUNK`` calls, ``share`` of each layer; returns how many ran."""
    ran = []

    @seed(number)
    @settings(
        max_examples=CHUNK // share,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(call=calls(integers=integers, kernel=True), data=st.data())
    def property_holds(call: Call, data: st.DataObject) -> None:
        config = data.draw(kernel_configs(problem_of(call)))
        check(call, run(call, config=config).y)
        ran.append(call)
        more = calls_of(call.cfg, integers=integers, bias_dtype=call.bias_dtype, residual=True)
        for _ in range(share - 1):
            call = data.draw(more)
            world = {
                "grid": config.cluster_size * data.draw(st.integers(1, 3)),
                "schedule": data.draw(st.sampled_from(SCHEDULES)),
                "completion": data.draw(st.sampled_from(COMPLETIONS)),
                "seed": data.draw(st.integers(0, 99)),
            }
            check(call, run(call, config=config, **world).y)
            ran.append(call)

    property_holds()
    return len(ran)


@pytest.mark.parametrize("integers", [True, False], ids=["exact", "bound"])
@pytest.mark.parametrize("number", range(5))
def test_200_examples(number, integers):
    assert run_chunk(number, integers=integers) >= CHUNK


@pytest.mark.slow
@pytest.mark.parametrize("integers", [True, False], ids=["exact", "bound"])
@pytest.mark.parametrize("number", range(1000, 1050))
def test_2000_examples(number, integers):
    assert run_chunk(number, integers=integers, share=5) >= CHUNK
