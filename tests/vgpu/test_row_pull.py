"""The row-copy probe copies every row, to every copy, and no byte beyond."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "perf"))

from row_pull import compile_row_pull

from megamoe.runtime.launch import ParameterPacker, split_block
from megamoe.runtime.vgpu.kernel import Kernel
from megamoe.runtime.vgpu.world import World


@pytest.fixture(scope="module")
def image():
    return compile_row_pull(piece_bytes=256, pieces=3, slots=3)


@pytest.mark.parametrize(("rows", "copies", "grid"), [(7, 2, 2), (1, 1, 3), (12, 3, 1)])
def test_rows_arrive(image, rows, copies, grid):
    world = World(pes=1, completion="late")
    source = np.random.default_rng(0).integers(0, 256, (rows, 768), dtype=np.uint8)
    target = np.full((copies + 1, rows, 768), 9, dtype=np.uint8)
    packer = ParameterPacker(image.parameters)
    block = packer.pack(
        {
            "source": world.register(source, name="source", pe=0),
            "target": world.register(target, name="target", pe=0),
            "rows": rows,
            "copies": copies,
        }
    )
    world.launch(
        pe=0,
        kernel=Kernel.from_ptx(image.ptx),
        grid=(grid, 1, 1),
        block=(image.threads, 1, 1),
        smem=image.smem_bytes,
        args=split_block(image, block),
    )
    world.run()
    assert (target[:copies] == source).all() and (target[copies] == 9).all()
