"""An exported image serves a process in which the compiler cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from api_helpers import config
from click.testing import CliRunner

from megamoe.cli import main
from megamoe.cute_kernels.kernel_config import DEFAULT_SMS
from megamoe.cute_kernels.smem import default_config
from megamoe.lowering import kernel_problem
from megamoe.testing import compiled

CODE = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "cutlass":
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Block())
import importlib.metadata as metadata
real = metadata.version
def version(name):
    if name.startswith("nvidia-cutlass-dsl"):
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version

import torch
from api_helpers import config, inputs, weights
from recorded import device, recording_api
from megamoe import MegaMoE, Session
from megamoe.runtime.cache import ImageCache
from megamoe.runtime.errors import CompilerMissing

torch.set_grad_enabled(False)
api = recording_api()
session = Session(config(), device=device(api), cache=ImageCache(sys.argv[1]))
MegaMoE(config(), *weights(config()), session=session)(*inputs(config()))
image = session._pe_session.image
loaded = [call[0] for name, call in api.calls if name == "cuModuleLoadData"]
assert loaded == [image.cubin] and image.cubin[:4] == b"\\x7fELF"
assert api.launches[-1].smem_bytes == image.smem_bytes
try:
    Session(config(hidden=256), device=device(api), cache=ImageCache(sys.argv[1])).warmup()
except CompilerMissing as error:
    print(error)
print(len(api.launches), image.entry)
"""


def test_export_import_and_launch_without_the_compiler(tmp_path: Path) -> None:
    problem = kernel_problem(config())
    image = compiled(problem, default_config(problem, sms=DEFAULT_SMS))  # as the session asks
    runner = CliRunner()
    exported = runner.invoke(main, ["cache", "export", str(tmp_path / "images.tar")])
    assert exported.exit_code == 0, exported.output
    there = str(tmp_path / "there")
    imported = runner.invoke(
        main, ["cache", "import", str(tmp_path / "images.tar"), "--folder", there]
    )
    assert imported.exit_code == 0, imported.output
    ran = subprocess.run(
        [sys.executable, "-c", CODE, there],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    assert ran.returncode == 0, ran.stderr
    assert "not installed here" in ran.stdout and "H 256" in ran.stdout
    assert ran.stdout.splitlines()[-1] == f"2 {image.entry}"
