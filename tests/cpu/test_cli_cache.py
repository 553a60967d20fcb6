"""``megamoe cache``: list, clear, build, export, import."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from api_helpers import config, recording_session
from cache_helpers import fake_compile, problem
from click.testing import CliRunner
from recorded import stub_compile

from megamoe.cli import main
from megamoe.cli.cache import parse_shape
from megamoe.cute_kernels.smem import default_config
from megamoe.runtime.cache import ImageCache
from megamoe.runtime.errors import CompilerMissing


def run(*arguments: object, code: int = 0) -> str:
    ran = CliRunner().invoke(main, ["cache", *map(str, arguments)])
    assert ran.exit_code == code, ran.output
    assert "Traceback" not in ran.output
    return ran.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    cache = ImageCache(tmp_path / "here", compile=fake_compile)
    cache.get_or_compile(problem())
    cache.get_or_compile(problem(1024))
    return cache.folder


def test_list(folder, tmp_path):
    bad = next(folder.rglob("*.mmimage"))
    bad.write_bytes(bad.read_bytes()[:-1])
    text = run("list", "--folder", folder, "--json", tmp_path / "f.json")
    assert "2 images" in text and "DAMAGED" in text and "sm_90a" in text
    images = json.loads((tmp_path / "f.json").read_text())["images"]
    assert sorted(image["key"] is None for image in images) == [False, True]


def test_clear(folder):
    assert "deleted 2 images" in run("clear", "--folder", folder)
    assert not list(folder.rglob("*.mmimage"))


def test_export_and_import(folder, tmp_path):
    file, there = tmp_path / "images.tar", tmp_path / "there"
    assert "wrote 2 images" in run("export", file, "--folder", folder)
    assert "imported 2 images" in run("import", file, "--folder", there)
    cache = ImageCache(there, compile=fake_compile)
    cache.get_or_compile(problem())
    assert cache.compiles == 0
    names = [sorted(path.name for path in where.rglob("*.mmimage")) for where in (folder, there)]
    assert names[0] == names[1]


def test_export_of_nothing_and_import_of_nonsense(folder, tmp_path):
    assert "no intact image" in run("export", tmp_path / "f", "--folder", tmp_path / "no", code=1)
    poor = tmp_path / "poor.tar"
    poor.write_bytes(b"no tar")
    assert "not an exported file" in run("import", poor, "--folder", folder, code=1)
    with tarfile.open(poor, "w") as archive:
        archive.add(__file__, arcname="../../escape.mmimage")
    assert "escape.mmimage" in run("import", poor, "--folder", folder, code=1)
    assert not (folder.parent.parent / "escape.mmimage").exists()


def test_build(folder, monkeypatch):
    seen = {}

    def compile_many(jobs, *, cache, arch, workers, on_done):
        seen.update(jobs=jobs, arch=arch, workers=workers)
        for index in range(len(jobs)):
            on_done(index, index > 0)

    monkeypatch.setattr("megamoe.runtime.parallel.compile_many", compile_many)
    shapes = ["2048/768/128/8/8", "4096/14336/8/2/8/512"]
    text = run("build", *shapes, "--workers", 3, "--folder", folder, "--sms", 64)
    assert "1 compiled, 1 were cached" in text
    assert [(p.hidden, p.max_tokens) for p, _ in seen["jobs"]] == [(2048, 4096), (4096, 512)]
    assert [config for _, config in seen["jobs"]] == [
        default_config(p, sms=64) for p, _ in seen["jobs"]
    ]
    assert (seen["arch"], seen["workers"]) == ("sm_90a", 3)
    assert "H/I/E/K/P" in run("build", "1/2", code=1)
    assert "multiple of 8" in run("build", "100/64/8/2/1", code=1)


def test_built_for_a_number_of_sms_and_found_by_its_session(tmp_path, monkeypatch):
    """Compiled without a GPU, used without a compiler: by a session of that many SMs only."""
    here, there = tmp_path / "here", tmp_path / "there"
    with monkeypatch.context() as patch:
        patch.setattr(
            "megamoe.cli.cache._cache", lambda folder: ImageCache(folder, compile=stub_compile)
        )
        shape = "512/1024/4/1/1/16"
        assert "1 compiled" in run("build", shape, "--workers", 1, "--folder", here)
        assert "1 compiled" in run("build", shape, "--workers", 1, "--folder", here, "--sms", 12)
    run("export", tmp_path / "images.tar", "--folder", here)
    run("import", tmp_path / "images.tar", "--folder", there)
    monkeypatch.setattr("megamoe.runtime.cache.compiler_version", lambda: None)
    cfg = config(hidden=512, intermediate=1024, num_experts=4, top_k=1)
    for num_sms in (None, 12):
        session, api = recording_session(cfg, there, num_sms=num_sms)
        session._cache.compile = None
        session.warmup()
        assert session._cache.compiles == 0 and len(api.launches) == 1
    session, _ = recording_session(cfg, there, num_sms=3)
    session._cache.compile = None
    with pytest.raises(CompilerMissing, match=r"cache build. \(with --sms"):
        session.warmup()


@pytest.mark.parametrize("text", ["", "1/2/3/4", "a/b/c/d/e", "1/2/3/4/5/6/7"])
def test_shapes(text):
    with pytest.raises(ValueError, match="must be H/I/E/K/P"):
        parse_shape(text)
