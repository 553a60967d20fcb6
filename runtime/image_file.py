"""One compiled image as one file, trusted only if its digest matches.

Layout, all integers little-endian:

    8  bytes  magic ``MEGAMOE\\n``
    4         format version
    4         bytes of the JSON head, n
    32        SHA-256 over the 16 bytes above and everything below
    n         JSON: the key, the image's fields, sizes of what follows
    …         PTX (UTF-8), cubin

The digest finds damage, not malice: whoever may write the folder may replace an image, as they may
replace the Python files beside it.
"""

import hashlib
import json
import struct
from dataclasses import asdict, fields
from typing import Any

from megamoe.cute_kernels.image import Image, Parameter
from megamoe.cute_kernels.kernel_config import KernelConfig

FORMAT_VERSION = 2
SUFFIX = ".mmimage"
_MAGIC = b"MEGAMOE\n"
_HEAD = struct.Struct("<8sII32s")
_SIGNED = struct.Struct("<8sII")


class BadImageFile(ValueError):
    """The bytes are not a complete, unchanged image file of this format version."""


def encode(image: Image, key: dict[str, Any]) -> bytes:
    """The bytes of an image file. ``key`` is plain JSON data that says what was compiled."""
    ptx = image.ptx.encode()
    rest = {
        field.name: getattr(image, field.name)
        for field in fields(image)
        if field.name not in ("ptx", "cubin", "parameters", "config")
    }
    rest["config"] = asdict(image.config)
    rest["parameters"] = [asdict(parameter) for parameter in image.parameters]
    head = json.dumps(
        {"key": key, "image": rest, "ptx": len(ptx), "cubin": len(image.cubin)}, sort_keys=True
    ).encode()
    signed = _SIGNED.pack(_MAGIC, FORMAT_VERSION, len(head))
    body = head + ptx + image.cubin
    return signed + hashlib.sha256(signed + body).digest() + body


def decode(data: bytes) -> tuple[Image, dict[str, Any]]:
    """The image and the key of an image file.

    Raises:
        BadImageFile: another kind of file, another format version, or any byte missing, added
            or changed.
    """
    if len(data) < _HEAD.size:
        raise BadImageFile(f"only {len(data)} bytes")
    magic, version, head_bytes, digest = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise BadImageFile("not a megamoe image file")
    body = data[_HEAD.size :]
    signed = data[: _SIGNED.size]
    if hashlib.sha256(signed + body).digest() != digest:
        raise BadImageFile("the digest does not match: damaged or incomplete")
    if version != FORMAT_VERSION:
        raise BadImageFile(f"format version {version}, this megamoe reads {FORMAT_VERSION}")
    try:
        head = json.loads(body[:head_bytes])
        ptx_end = head_bytes + head["ptx"]
        values = dict(head["image"])
        values["parameters"] = tuple(Parameter(**entry) for entry in values["parameters"])
        values["setmaxnreg"] = tuple((way, count) for way, count in values["setmaxnreg"])
        values["config"] = KernelConfig.from_plain(values["config"])
        values["notes"] = tuple(values["notes"])
        if ptx_end + head["cubin"] != len(body):
            raise BadImageFile("sizes in the head do not add up")
        image = Image(ptx=body[head_bytes:ptx_end].decode(), cubin=body[ptx_end:], **values)
        return image, head["key"]
    except (KeyError, TypeError, ValueError) as error:
        # Intact bytes of a program that writes other fields under the same format version.
        raise BadImageFile(f"unknown contents: {error}") from error
