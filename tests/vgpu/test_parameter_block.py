"""One run, two devices: the block that ``cuda`` hands to the driver is the one vgpu interprets."""

from cuda_tee import TeeDevice
from forward_cases import assert_same_bits

from megamoe.cute_kernels.abi import PARAMETERS
from megamoe.verify.cases import CASES, call, expected, layer


def test_cuda_and_vgpu_get_the_same_block(monkeypatch):
    case = next(case for case in CASES if case.name == "ragged")
    data = case.inputs()
    monkeypatch.setattr("megamoe.runtime.devices.vgpu.VgpuDevice", TeeDevice)
    moe = layer(case, data)
    assert_same_bits(call(moe, data).y, expected(case, data))
    names = [name for name, _, _ in PARAMETERS]
    for device in moe.devices:
        (interpreted,) = device.interpreted
        (recorded,) = device.api.launches
        assert len(recorded.parameters) == len(interpreted["args"]) == len(names)
        for name, there, here in zip(names, recorded.parameters, interpreted["args"], strict=True):
            assert there == here, name
        assert recorded.grid == interpreted["grid"]
        assert recorded.block == interpreted["block"]
        assert recorded.smem_bytes == interpreted["smem"]
    pes = [device.api.launches[0].parameters[names.index("pe")] for device in moe.devices]
    assert [int.from_bytes(pe, "little") for pe in pes] == [0, 1, 2, 3]
