"""Image signatures and the packed parameter block."""

import pytest

from megamoe.cute_kernels.image import Image, Parameter, describe, parse_signature
from megamoe.runtime.launch import ParameterPacker, split_block

HEADER = """
.version 9.4
.visible .entry kernel_0(
    .param .u64 kernel_0_param_0,
    .param .u32 kernel_0_param_1,
    .param .align 64 .b8 kernel_0_param_2[128],
    .param .u64 kernel_0_param_3
)
.reqntid 384, 1, 1
{ setmaxnreg.dec.sync.aligned.u32 56; setmaxnreg.inc.sync.aligned.u32 224;
  wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, 1, 1, 1, 0, 0; ret; }
"""
REMARKS = """ptxas info    : Function properties for kernel_0
ptxas         .     0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers
ptxas info    : (C7506) Potential Performance Loss: 'setmaxnreg' ignored
"""


def image() -> Image:
    entry, parameters, threads = parse_signature(HEADER, ("a", "b", "map", "c"))
    return Image(
        entry=entry,
        arch="sm_90a",
        ptx=HEADER,
        cubin=b"",
        parameters=parameters,
        threads=threads,
        smem_bytes=0,
        compile_seconds=0.0,
        **describe(HEADER, REMARKS),
    )


def test_signature_follows_the_alignment_of_the_header():
    found = image()
    assert (found.entry, found.threads) == ("kernel_0", 384)
    assert found.parameters == (
        Parameter("a", 8, 0),
        Parameter("b", 4, 8),
        Parameter("map", 128, 64),
        Parameter("c", 8, 192),
    )


def test_report_of_the_assembler():
    found = image()
    assert found.registers == 168
    assert found.spill_bytes == 12
    assert found.setmaxnreg == (("dec", 56), ("inc", 224))
    assert not found.setmaxnreg_kept
    assert found.mma_instructions == {"m64n128k16.f32.bf16.bf16": 1}
    with pytest.raises(ValueError, match="no register or spill report"):
        describe(HEADER, "")


def values(**changes):
    return {"a": 2**63 + 5, "b": 9, "map": bytes(range(128)), "c": 7} | changes


def test_block_holds_every_field_at_its_offset():
    found = image()
    packer = ParameterPacker(found.parameters)
    block = packer.pack(values())
    assert len(block) == packer.nbytes == 200
    assert int.from_bytes(block[:8], "little") == 2**63 + 5
    assert block[8:12] == bytes([9, 0, 0, 0])
    assert block[12:64] == bytes(52)
    assert block[64:192] == bytes(range(128))
    assert block[192:] == (7).to_bytes(8, "little")
    assert split_block(found, block) == [block[:8], block[8:12], block[64:192], block[192:]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"d": 1}, "values: got .*'d'.*the kernel takes"),
        ({"b": 2**32}, "b=4294967296: does not fit 4 bytes"),
        ({"b": -1}, "b=-1: does not fit 4 bytes"),
        ({"b": b"xx"}, "b=b'xx': does not fit 4 bytes"),
        ({"map": 5}, "map=5: does not fit 128 bytes"),
        ({"a": 1.5}, "not integers"),
    ],
)
def test_packing_refuses(change, text):
    with pytest.raises(ValueError, match=text):
        ParameterPacker(image().parameters).pack(values(**change))


def test_a_missing_value_is_refused():
    missing = values()
    del missing["c"]
    with pytest.raises(ValueError, match="values: got"):
        ParameterPacker(image().parameters).pack(missing)


def test_wrong_number_of_parameters_is_refused():
    with pytest.raises(ValueError, match="has 4 parameters, expected 2"):
        parse_signature(HEADER, ("a", "b"))
