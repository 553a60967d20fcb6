"""Compiles what the GPU check loads, and computes its integer cases on vgpu. Needs no GPU.

Writes ``images.tar`` (``megamoe cache export``) and ``expected.json`` (case → digest of the output)
into a folder that travels to the GPU machine.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from pathlib import Path

from gpu_cases import CASES, ROW_PULLS, digest, problems
from gpu_check import BUNDLE
from gpu_probes import probe_file
from rich.progress import track
from row_pull import compile_row_pull

from megamoe.cute_kernels.kernel_config import DEFAULT_SMS
from megamoe.runtime.cache import ImageCache
from megamoe.runtime.image_file import encode
from megamoe.runtime.parallel import compile_many
from megamoe.testing import run_vgpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=BUNDLE)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--vgpu-pes", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--sms", type=int, default=DEFAULT_SMS, help="SMs of the GPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cache = ImageCache()
    jobs = problems(options.sms)
    compile_many(
        jobs,
        cache=cache,
        workers=options.workers,
        on_done=lambda index, compiled: print(
            f"image {index + 1} of {len(jobs)} {'compiled' if compiled else 'cached'}", flush=True
        ),
    )
    with tarfile.open(options.out / "images.tar", "w") as archive:
        for problem, config in jobs:
            data = cache.exported(problem, config)
            member = tarfile.TarInfo(f"{len(archive.getnames())}.mmimage")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    for name, (piece_bytes, pieces) in ROW_PULLS.items():
        image = compile_row_pull(piece_bytes=piece_bytes, pieces=pieces)
        data = encode(image, {"probe": "row_pull", "piece_bytes": piece_bytes, "pieces": pieces})
        probe_file(options.out, name).write_bytes(data)
    expected = {}
    todo = [(case, pes) for case in CASES if case.exact for pes in options.vgpu_pes]
    for case, pes in track(todo, description="vgpu"):
        call = case.call(pes)
        w13, w2 = call.per_pe_weights()
        y = run_vgpu(
            call.cfg,
            x=call.x,
            topk_ids=call.topk_ids,
            topk_weights=call.topk_weights,
            w13=w13,
            w2=w2,
        ).y
        expected[f"{case.name}/{pes}"] = digest(y)
    (options.out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    print(f"wrote {len(jobs)} images and {len(expected)} digests to {options.out}")


if __name__ == "__main__":
    main()
