"""The image cache: one compilation, and no damaged byte is ever loaded (CASES J1, J2, J5, J7)."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import cache_helpers
import pytest
from cache_helpers import fake_compile, hash_of, problem

from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.cute_kernels.smem import default_config
from megamoe.cute_kernels.wgrad_tables import WgradConfig
from megamoe.runtime import cache as cache_module
from megamoe.runtime.cache import ImageCache, ImageKey, default_folder, source_fingerprint
from megamoe.runtime.errors import CompilerMissing
from megamoe.runtime.image_file import BadImageFile, decode, encode
from megamoe.runtime.parallel import compile_many


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def image_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.mmimage"))


def start(folder: Path, counted: Path, seconds: float) -> subprocess.Popen:
    counted.mkdir(exist_ok=True)
    environment = os.environ | {
        "MEGAMOE_TEST_COMPILES": str(counted),
        "MEGAMOE_TEST_COMPILE_SECONDS": str(seconds),
    }
    command = [sys.executable, cache_helpers.__file__, str(folder)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def outputs(children: list[subprocess.Popen]) -> set[str]:
    texts = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0] * len(children)
    return set(texts)


def test_eight_cold_processes_compile_once(folder, tmp_path):
    children = [start(folder, tmp_path / "counted", 0.5) for _ in range(8)]
    assert len(outputs(children)) == 1
    assert len(list((tmp_path / "counted").iterdir())) == 1
    assert len(image_files(folder)) == 1


def test_kill_of_the_compiling_process_leaves_nothing_broken(folder, tmp_path):
    counted = tmp_path / "counted"
    first = start(folder, counted, 60)
    deadline = time.monotonic() + 30
    while not list(counted.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    waiting = start(folder, counted, 0)  # waits for the lock of the one that dies
    time.sleep(0.3)
    assert waiting.poll() is None
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert outputs([waiting, start(folder, counted, 0)]) == {
        hash_of(fake_compile(problem=problem(), config=default_config(problem()), arch="sm_90a"))
        + "\n"
    }
    assert len(list(counted.iterdir())) == 2
    first.stdout.close()


def test_left_over_temporary_files_go_with_the_next_store(folder):
    cache = ImageCache(folder, compile=fake_compile)
    cache.get_or_compile(problem())
    (path,) = image_files(folder)
    stale = path.with_name(ImageKey.of(problem()).stem + "abc.tmp")
    stale.write_bytes(b"half")
    path.unlink()
    ImageCache(folder, compile=fake_compile).get_or_compile(problem())
    assert image_files(folder) == [path] and not stale.exists()


def test_memory_then_disk_then_compiler(folder):
    cache = ImageCache(folder, compile=fake_compile)
    image = cache.get_or_compile(problem())
    assert cache.get_or_compile(problem()) is image
    again = ImageCache(folder, compile=fake_compile)
    assert again.get_or_compile(problem()) == image
    assert (cache.compiles, again.compiles) == (1, 0)


def test_a_round_trip_changes_no_field():
    image = fake_compile(problem=problem(), config=KernelConfig(), arch="sm_90a")
    key = ImageKey.of(problem()).plain()
    assert decode(encode(image, key)) == (image, key)


def test_every_flip_and_every_truncation_is_detected():
    image = fake_compile(problem=problem(), config=KernelConfig(), arch="sm_90a")
    data = encode(image, ImageKey.of(problem()).plain())
    for position in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            bad = bytearray(data)
            bad[position] ^= flip
            with pytest.raises(BadImageFile):
                decode(bytes(bad))
    for length in range(len(data)):
        with pytest.raises(BadImageFile):
            decode(data[:length])
    for extra in (b"\0", b"x" * 100, data):
        with pytest.raises(BadImageFile):
            decode(data + extra)


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "foreign", "other kernel"])
def test_a_damaged_file_is_compiled_anew_and_replaced(folder, damage, caplog):
    cache = ImageCache(folder, compile=fake_compile)
    image = cache.get_or_compile(problem())
    (path,) = image_files(folder)
    good = path.read_bytes()
    if damage == "flip":
        position = random.Random(0).randrange(len(good))
        bad = good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :]
    elif damage == "other kernel":
        other = problem(1024)
        made = fake_compile(problem=other, config=default_config(other), arch="sm_90a")
        bad = encode(made, ImageKey.of(other).plain())
    else:
        bad = {"truncate": good[:-1], "empty": b"", "foreign": b"PK" + bytes(999)}[damage]
    path.write_bytes(bad)
    with caplog.at_level(logging.WARNING):
        again = ImageCache(folder, compile=fake_compile)
        assert again.get_or_compile(problem()) == image
        assert again.get_or_compile(problem()) == image
    assert again.compiles == 1
    assert path.read_bytes() == good
    assert len(caplog.records) == 1 and path.name in caplog.text


def test_the_key_is_everything_the_code_depends_on(folder, monkeypatch):
    cache = ImageCache(folder, compile=fake_compile)
    base = problem()
    cache.get_or_compile(base)
    cache.get_or_compile(base, replace(default_config(base), lag_waves=2))
    cache.get_or_compile(base, arch="sm_100a")
    for change in ({"hidden": 1024}, {"max_tokens": 65}, {"activation": "relu"}):
        cache.get_or_compile(problem(**change))
    assert cache.compiles == 6
    monkeypatch.setattr(cache_module, "compiler_version", lambda: "9.9.9")
    cache.get_or_compile(base)
    monkeypatch.setattr(cache_module, "LOADED_FINGERPRINT", "f" * 64)
    monkeypatch.setattr(cache_module, "source_fingerprint", lambda: "f" * 64)
    cache.get_or_compile(base)
    assert cache.compiles == 8
    assert len(image_files(folder)) == 8


def test_the_fingerprint_sees_every_source_byte(tmp_path):
    for name, text in (("a.py", "x = 1\n"), ("b.py", "y = 2\n")):
        (tmp_path / name).write_text(text)
    seen = {source_fingerprint(tmp_path)}
    (tmp_path / "a.py").write_text("x = 3\n")
    seen.add(source_fingerprint(tmp_path))
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    seen.add(source_fingerprint(tmp_path))
    (tmp_path / "d.py").write_text("")
    seen.add(source_fingerprint(tmp_path))
    assert len(seen) == 4


def test_sources_edited_later_do_not_lend_their_fingerprint(folder, monkeypatch):
    """A process that imported the old code would store it under the new sources' key."""
    old = ImageKey.of(problem())
    monkeypatch.setattr(cache_module, "source_fingerprint", lambda: "edited")
    assert ImageKey.of(problem()) == old


def test_sources_that_change_while_compiling_are_not_kept(folder, monkeypatch, caplog):
    def compile(**what):
        monkeypatch.setattr(cache_module, "source_fingerprint", lambda: "new")
        return fake_compile(**what)

    cache = ImageCache(folder, compile=compile)
    with caplog.at_level(logging.WARNING):
        cache.get_or_compile(problem())
    assert image_files(folder) == [] and "changed since" in caplog.text


def test_a_full_disk_costs_one_line(folder, monkeypatch, caplog):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache_module.os, "fsync", full)
    cache = ImageCache(folder, compile=fake_compile)
    with caplog.at_level(logging.WARNING):
        first = cache.get_or_compile(problem())
        assert cache.get_or_compile(problem()) is first
        cache.get_or_compile(problem(1024))
    assert cache.compiles == 2
    assert not image_files(folder) and not list(folder.rglob("*.tmp"))
    assert len(caplog.records) == 1 and "No space left" in caplog.text


@pytest.mark.parametrize("where", ["mkdir", "lock"])
def test_a_read_only_folder_costs_one_line(folder, where, monkeypatch, caplog):
    """Permissions do not stop root, so the refusal is played."""

    def refuse(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    if where == "mkdir":
        monkeypatch.setattr(Path, "mkdir", refuse)
    else:
        monkeypatch.setattr(cache_module.filelock.FileLock, "acquire", refuse)
    cache = ImageCache(folder, compile=fake_compile)
    with caplog.at_level(logging.WARNING):
        first = cache.get_or_compile(problem())
        assert cache.get_or_compile(problem()) is first
    assert cache.compiles == 1 and len(caplog.records) == 1


def test_a_read_only_folder_with_images_is_used(folder, monkeypatch):
    ImageCache(folder, compile=fake_compile).get_or_compile(problem())
    monkeypatch.setattr(Path, "mkdir", None)
    monkeypatch.setattr(cache_module.filelock.FileLock, "acquire", None)
    cache = ImageCache(folder, compile=fake_compile)
    cache.get_or_compile(problem())
    assert cache.compiles == 0


def test_a_stuck_lock_is_waited_for_and_then_passed(folder, caplog):
    cache = ImageCache(folder, compile=fake_compile, lock_timeout_s=0.2)
    inside, done = threading.Event(), threading.Event()

    def stuck(**what):
        inside.set()
        done.wait(30)
        return fake_compile(**what)

    holder = threading.Thread(
        target=ImageCache(folder, compile=stuck).get_or_compile, args=(problem(),)
    )
    holder.start()
    inside.wait(30)
    try:
        with caplog.at_level(logging.WARNING):
            cache.get_or_compile(problem())
    finally:
        done.set()
        holder.join()
    assert cache.compiles == 1 and "compiling an own copy" in caplog.text


def test_a_folder_that_hides_new_files_does_not_matter(folder, monkeypatch):
    """J2: the own copy is used whatever the file system shows."""
    monkeypatch.setattr(ImageCache, "_load", lambda self, key: None)
    cache = ImageCache(folder, compile=fake_compile)
    assert cache.get_or_compile(problem()) is cache.get_or_compile(problem())
    assert cache.compiles == 1


def test_threads_compile_once(folder):
    calls = []

    def slow(**what):
        calls.append(1)
        time.sleep(0.05)
        return fake_compile(**what)

    cache = ImageCache(folder, compile=slow)
    threads = [threading.Thread(target=cache.get_or_compile, args=(problem(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_exported_images_serve_a_machine_without_a_compiler(folder, tmp_path, monkeypatch):
    cache = ImageCache(folder, compile=fake_compile)
    image = cache.get_or_compile(problem())
    (path,) = image_files(folder)
    there = ImageCache(tmp_path / "there")
    monkeypatch.setattr(cache_module, "compiler_version", lambda: None)
    with pytest.raises(CompilerMissing, match="cache import"):
        there.get_or_compile(problem())
    there.add(path.read_bytes())
    assert there.get_or_compile(problem()) == image
    with pytest.raises(CompilerMissing, match="H 1024"):
        there.get_or_compile(problem(1024))
    with pytest.raises(BadImageFile, match="poor: the digest"):
        there.add(path.read_bytes()[:-1], name="poor")


def test_kernels_of_one_layer_are_kept_apart(folder, tmp_path):
    """Forward, dgrad and wgrad of the same sizes; their files travel alike."""
    cache = ImageCache(folder, compile=fake_compile)
    asked = [
        (problem(), None),
        (problem(mode="save"), None),
        (problem(mode="dgrad"), None),
        (problem(), WgradConfig()),
        (problem(), WgradConfig(grad="bf16")),
    ]
    images = [cache.get_or_compile(*each) for each in asked]
    files = image_files(folder)
    assert cache.compiles == len(files) == len({hash_of(image) for image in images}) == 5
    assert sorted(path.name.split("-")[0] for path in files) == ["forward"] * 3 + ["wgrad"] * 2
    there = ImageCache(tmp_path / "there", compile=None)
    for path in files:
        there.add(path.read_bytes())
    assert [there.get_or_compile(*each) for each in asked] == images and there.compiles == 0


def test_clear_and_entries(folder):
    cache = ImageCache(folder, compile=fake_compile)
    cache.get_or_compile(problem())
    cache.get_or_compile(problem(1024))
    image_files(folder)[0].write_bytes(b"bad")
    entries = cache.entries()
    assert sorted(entry.key is None for entry in entries) == [False, True]
    assert any("H " in entry.problem for entry in entries)
    assert cache.clear() == 2 and not cache.entries()
    cache.get_or_compile(problem())
    assert cache.compiles == 3


def test_many_at_once_in_worker_processes(folder):
    seen = []
    cache = ImageCache(folder, compile=fake_compile)
    cache.get_or_compile(problem())
    jobs = [(problem(), None), (problem(1024), None), (problem(2048), None)]
    images = compile_many(
        jobs, cache=cache, workers=2, on_done=lambda index, compiled: seen.append((index, compiled))
    )
    assert [image.ptx for image in images] == [f"// {job}\n" for job, _ in jobs]
    assert sorted(seen) == [(0, False), (1, True), (2, True)]
    assert len(image_files(folder)) == 3
    with pytest.raises(ValueError, match="workers=0"):
        compile_many(jobs, cache=cache, workers=0)


def test_the_folder_has_one_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    assert default_folder() == tmp_path and ImageCache().folder == tmp_path
    monkeypatch.delenv("MEGAMOE_CACHE_DIR")
    assert "megamoe" in str(default_folder())
