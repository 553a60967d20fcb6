"""Packing a launch's parameter block from an image's signature; the same block for every device."""

import struct
from collections.abc import Mapping

from megamoe.cute_kernels.image import Image

_FORMATS = {1: "B", 2: "H", 4: "I", 8: "Q"}


class ParameterPacker:
    """Packs launch parameters, little-endian, at the offsets of an image's signature.

    >>> from megamoe.cute_kernels.image import Parameter
    >>> packer = ParameterPacker((Parameter("a", 4, 0), Parameter("b", 8, 8)))
    >>> packer.pack({"a": 1, "b": 2}).hex()
    '01000000000000000200000000000000'
    """

    def __init__(self, parameters: tuple):
        self.names = tuple(parameter.name for parameter in parameters)
        self._keys = frozenset(self.names)
        self._sizes = {parameter.name: parameter.nbytes for parameter in parameters}
        text, end = "<", 0
        for parameter in parameters:
            text += "x" * (parameter.offset - end)
            text += _FORMATS.get(parameter.nbytes, f"{parameter.nbytes}s")
            end = parameter.offset + parameter.nbytes
        self._struct = struct.Struct(text)
        self.nbytes = self._struct.size

    def pack(self, values: Mapping[str, int | bytes]) -> bytes:
        """The block. Integers of 1, 2, 4 or 8 bytes are unsigned; other sizes are bytes.

        Raises:
            ValueError: a parameter without a value, a value without a parameter, or one that does
                not fit.
        """
        if values.keys() != self._keys:
            raise ValueError(f"values: got {sorted(values)}, the kernel takes {sorted(self.names)}")
        try:
            return self._struct.pack(*[values[name] for name in self.names])
        except struct.error:
            raise ValueError(self._misfit(values)) from None

    def _misfit(self, values: Mapping[str, int | bytes]) -> str:
        for name in self.names:
            value, nbytes = values[name], self._sizes[name]
            if isinstance(value, bytes) == (nbytes in _FORMATS) or (
                isinstance(value, int) and not 0 <= value < 1 << 8 * nbytes
            ):
                return f"{name}={value!r}: does not fit {nbytes} bytes"
        return f"values={dict(values)!r}: not integers"


def split_block(image: Image, block: bytes) -> list[bytes]:
    """The bytes of every parameter of a block, in signature order."""
    return [block[p.offset : p.offset + p.nbytes] for p in image.parameters]
