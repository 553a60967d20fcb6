"""Packing a launch's parameter block from an image's signature."""

from collections.abc import Mapping

from megamoe.cute_kernels.image import Image


def pack_parameters(image: Image, values: Mapping[str, int]) -> list[bytes]:
    """Little-endian bytes of every parameter, in signature order.

    Raises:
        ValueError: a parameter without a value, a value without a parameter, or one out of range.
    """
    names = [parameter.name for parameter in image.parameters]
    if set(names) != set(values):
        raise ValueError(f"values: got {sorted(values)}, the kernel takes {sorted(names)}")
    packed = []
    for parameter in image.parameters:
        value = int(values[parameter.name])
        if not -(1 << (8 * parameter.nbytes - 1)) <= value < 1 << (8 * parameter.nbytes):
            raise ValueError(f"{parameter.name}={value}: does not fit {parameter.nbytes} bytes")
        packed.append(
            (value & ((1 << (8 * parameter.nbytes)) - 1)).to_bytes(parameter.nbytes, "little")
        )
    return packed


def parameter_block(image: Image, packed: list[bytes]) -> bytes:
    """The packed parameters at their offsets, as one block."""
    last = image.parameters[-1]
    block = bytearray(last.offset + last.nbytes)
    for parameter, data in zip(image.parameters, packed, strict=True):
        block[parameter.offset : parameter.offset + parameter.nbytes] = data
    return bytes(block)
