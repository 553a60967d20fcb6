"""The wheel: only ``megamoe/…``, complete, and usable without the source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=LEFT_OUT)
    command = [sys.executable, "-m", "pip", "wheel", str(folder / "source"), "--no-deps"]
    command += ["--no-build-isolation", "-q", "-w", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert all(name.startswith(("megamoe/", "megamoe-")) for name in names), names
    sources = {
        f"megamoe/{path.relative_to(ROOT)}"
        for top in ("runtime", "cute_kernels")
        for path in (ROOT / top).rglob("*.py")
    } | {str(path.relative_to(ROOT)) for path in (ROOT / "megamoe").glob("*.py")}
    assert sources <= names, sources - names
    metadata = next(name for name in names if name.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    for needed in ("filelock", "platformdirs", "cuda-python", "nvidia-cutlass-dsl"):
        assert f"Requires-Dist: {needed}" in text


def test_import_and_command(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import megamoe, megamoe.cli, sys\n"
        "assert megamoe.__file__.startswith(sys.argv[1]), megamoe.__file__\n"
        "from megamoe.runtime.cache import LOADED_FINGERPRINT, source_fingerprint\n"
        "print(LOADED_FINGERPRINT, megamoe.Session.__name__)\n"
        "megamoe.cli.main(['cache', 'list'])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": str(tmp_path / "site"), "MEGAMOE_CACHE_DIR": str(tmp_path / "c")},
    )
    assert ran.returncode == 0, ran.stderr
    from megamoe.runtime.cache import source_fingerprint

    assert source_fingerprint() in ran.stdout and "Session" in ran.stdout
    assert "0 images" in ran.stdout
