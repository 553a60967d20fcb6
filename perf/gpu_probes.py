"""Measurements with probe kernels: images of ``prepare_images.py``, launched like the layer's."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from gpu_backend import Backend
from gpu_cases import PULLED_BYTES, ROW_PULLS

from megamoe.cute_kernels.image import Image
from megamoe.runtime.devices.recording import stub_image
from megamoe.runtime.image_file import decode
from megamoe.runtime.launch import ParameterPacker

PARAMETERS = (("source", 8), ("target", 8), ("rows", 4), ("copies", 4))
"""As in ``row_pull.py``, which needs the compiler."""


def probe_file(folder: Path, name: str) -> Path:
    """Where the image of a row-copy probe lies."""
    return folder / f"row_pull-{name.replace(' ', '')}.mmimage"


def row_copies(backend: Backend) -> list[dict[str, Any]]:
    """GB/s that one warp per SM reads while it stores each row once or three times.

    Rows of 4, 8 and 14 KB, read from L2 and from HBM.
    """
    results = []
    for name, (piece_bytes, pieces) in ROW_PULLS.items():
        image = _image(backend, name)
        launch = backend.whole_device().prepare(image, grid=132)
        packer = ParameterPacker(image.parameters)
        for where, nbytes in PULLED_BYTES.items():
            row_bytes = piece_bytes * pieces
            rows = 2 if backend.dry else nbytes // row_bytes
            for copies in (1, 3):
                source = torch.zeros(rows * row_bytes, dtype=torch.uint8, device=backend.memory)
                target = source.new_zeros(copies * rows * row_bytes)
                values = {"source": source.data_ptr(), "target": target.data_ptr()}
                block = packer.pack({**values, "rows": rows, "copies": copies})
                micros = backend.time_us(functools.partial(launch, block), flush=where == "HBM")
                rate = None if backend.dry else rows * row_bytes / micros / 1e3
                results.append({"row": name, "from": where, "copies": copies, "read_gb_s": rate})
    return results


def _image(backend: Backend, name: str) -> Image:
    if not backend.dry:
        return decode(probe_file(backend.images.folder, name).read_bytes())[0]
    known = stub_image()
    parameters, offset = [], 0
    for parameter, nbytes in PARAMETERS:
        parameters.append(type(known.parameters[0])(parameter, nbytes, offset))
        offset += nbytes
    return Image(**(vars(known) | {"parameters": tuple(parameters), "smem_bytes": 20000}))
