"""Any small layer, call and kernel config: drawn by hypothesis, run on vgpu, against the oracle.

An example compiles its own kernel, which takes most of the time. Examples come in chunks so that
test workers share them; a chunk's seed is fixed, so a failure repeats.
"""

import pytest
from feature_runs import check, problem_of, run
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from strategies import Call, calls, kernel_configs

CHUNK = 20


def run_chunk(number: int, *, integers: bool) -> int:
    """Run ``CHUNK`` examples; returns how many ran."""
    ran = []

    @seed(number)
    @settings(
        max_examples=CHUNK,
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
    assert run_chunk(number, integers=integers) >= CHUNK
