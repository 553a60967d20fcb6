"""The image cache: every kernel is compiled once a machine, not once a process.

An image's key is everything its code depends on: kind, problem, kernel config, architecture,
compiler version and the fingerprint of ``cute_kernels/*.py``. One file an image
(``image_file.py``), written under a temporary name and renamed; a lock file per key lets one of N
processes compile while the others wait, and falls with its holder. Whatever goes wrong with the
folder (full, read-only, damaged, hidden by a network file system) costs a compilation and one line
in the log, never a wrong kernel and never a failed call.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from megamoe.cute_kernels.image import Image
from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.smem import default_config
from megamoe.cute_kernels.wgrad_tables import WgradConfig
from megamoe.runtime.errors import CompilerMissing
from megamoe.runtime.image_file import FORMAT_VERSION, SUFFIX, BadImageFile, decode, encode

FOLDER_VARIABLE = "MEGAMOE_CACHE_DIR"
"""Environment variable that names the cache folder."""
COMPILER = "nvidia-cutlass-dsl"
FORWARD = "forward"
"""Kind of a kernel that routes rows: a forward or, as the problem's mode says, a dgrad."""
WGRAD = "wgrad"
AnyConfig = KernelConfig | WgradConfig
DEFAULT_ARCH = "sm_90a"
Compile = Callable[..., Image]

log = logging.getLogger("megamoe.cache")


def default_folder() -> Path:
    """``$MEGAMOE_CACHE_DIR`` if set, else the platform's cache folder of this user."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else Path(platformdirs.user_cache_dir("megamoe", appauthor=False))


@functools.lru_cache(maxsize=1)
def compiler_version() -> str | None:
    """Version and CUDA flavour of the installed compiler, or None; it is not imported."""
    try:
        version = importlib.metadata.version(COMPILER)
    except importlib.metadata.PackageNotFoundError:
        return None
    for flavour in ("cu13", "cu12"):
        try:
            importlib.metadata.version(f"{COMPILER}-libs-{flavour}")
        except importlib.metadata.PackageNotFoundError:
            continue
        return f"{version}+{flavour}"
    return version


def source_fingerprint(folder: Path | None = None) -> str:
    """SHA-256 over names and contents of ``cute_kernels/*.py``."""
    folder = folder or Path(__file__).parent.parent / "cute_kernels"
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        text = path.read_bytes()
        digest.update(f"{path.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


LOADED_FINGERPRINT = source_fingerprint()
"""Of the sources this process was started from. Files that are edited later must not lend their
fingerprint to code that was imported before, so it is taken once; see ``ImageCache._store``."""


@dataclass(frozen=True, kw_only=True)
class ImageKey:
    """What one image's code depends on. ``compiler`` None: any (a machine without a compiler)."""

    problem: Problem
    config: AnyConfig
    arch: str = DEFAULT_ARCH
    kind: str = FORWARD
    compiler: str | None
    fingerprint: str

    @classmethod
    def of(
        cls,
        problem: Problem,
        config: AnyConfig | None = None,
        *,
        arch: str = DEFAULT_ARCH,
    ) -> ImageKey:
        """The key of what would be compiled here and now: the wgrad kernel for a `WgradConfig`,
        else that of the problem's mode.

        Raises:
            ValueError: no kernel config fits the problem.
        """
        return cls(
            problem=problem,
            config=config or default_config(problem),
            arch=arch,
            kind=WGRAD if isinstance(config, WgradConfig) else FORWARD,
            compiler=compiler_version(),
            fingerprint=LOADED_FINGERPRINT,
        )

    def plain(self) -> dict[str, Any]:
        """The key as JSON data."""
        # Through JSON, as it is stored: a tuple of the config comes back from a file as a list.
        return dict(json.loads(json.dumps(asdict(self))))

    @property
    def stem(self) -> str:
        """File name without the compiler's part: the same on machines with and without one."""
        rest = {name: value for name, value in self.plain().items() if name != "compiler"}
        text = json.dumps(rest, sort_keys=True).encode()
        return f"{self.kind}-{self.arch}-{hashlib.sha256(text).hexdigest()[:32]}"

    @property
    def file_name(self) -> str:
        version = hashlib.sha256(str(self.compiler).encode()).hexdigest()[:8]
        return f"{self.stem}-{version}{SUFFIX}"


@dataclass(frozen=True)
class Entry:
    """One file of the cache; ``problem`` is "" and ``key`` None if it cannot be trusted."""

    path: Path
    nbytes: int
    key: dict[str, Any] | None
    problem: str


class ImageCache:
    """Images by key: memory, then disk, then the compiler. Safe for threads and processes.

    Args:
        folder: where the files lie; None is ``default_folder()``. Created when first needed.
        compile: called as ``compile(problem=, config=, arch=)``; None is the real compiler,
            imported only if it is needed.
        lock_timeout_s: how long to wait for another process that compiles the same image before
            compiling an own copy.

    Attributes:
        compiles: compilations this object has done.
    """

    def __init__(
        self,
        folder: Path | str | None = None,
        *,
        compile: Compile | None = None,
        lock_timeout_s: float = 600.0,
    ):
        self.folder = Path(folder) if folder is not None else default_folder()
        self.compiles = 0
        self._images_folder = self.folder / f"images-v{FORMAT_VERSION}"
        self.compile = compile
        self._lock_timeout_s = lock_timeout_s
        self._memory: dict[ImageKey, Image] = {}
        self._thread_lock = threading.Lock()
        self._told: set[str] = set()

    def get_or_compile(
        self,
        problem: Problem,
        config: AnyConfig | None = None,
        *,
        arch: str = DEFAULT_ARCH,
    ) -> Image:
        """The image of a problem: of its wgrad kernel with a `WgradConfig`, else of its mode.

        Raises:
            ValueError: no kernel config fits, or ``arch`` has no kernel.
            CompilerMissing: it is in no cache and this machine has no compiler.
        """
        key = ImageKey.of(problem, config, arch=arch)
        with self._thread_lock:
            image = self._memory.get(key)
            if image is None:
                image = self._load(key) or self._compile_once(key)
                self._memory[key] = image
            return image

    def entries(self) -> list[Entry]:
        """Every image file of this format version, damaged ones too."""
        found = []
        for path in sorted(self._images_folder.glob(f"*{SUFFIX}")):
            try:
                data = path.read_bytes()
                key = decode(data)[1]
                problem = _shape_text(key["problem"])
            except (OSError, BadImageFile, KeyError):
                found.append(Entry(path, _size_of(path), None, ""))
                continue
            found.append(Entry(path, len(data), key, problem))
        return found

    def clear(self) -> int:
        """Delete images, locks and left-over temporary files; returns the number of images."""
        self._memory.clear()
        images = 0
        for path in list(self._images_folder.glob("*")):
            if path.suffix in (SUFFIX, ".lock", ".tmp"):
                images += path.suffix == SUFFIX
                path.unlink(missing_ok=True)
        return images

    def exported(
        self, problem: Problem, config: AnyConfig | None = None, *, arch: str = DEFAULT_ARCH
    ) -> bytes:
        """The image file of a problem, compiled if need be, for ``add`` on another machine.

        Raises:
            ValueError, CompilerMissing: as ``get_or_compile``.
        """
        image = self.get_or_compile(problem, config, arch=arch)
        return encode(image, ImageKey.of(problem, config, arch=arch).plain())

    def add(self, data: bytes, *, name: str = "image") -> Path:
        """Take over an exported image file.

        Raises:
            BadImageFile: the bytes are no intact image file. OSError: the folder refuses.
        """
        try:
            _, plain = decode(data)
            key = _key_from_plain(plain)
        except (BadImageFile, KeyError, TypeError, ValueError) as error:
            raise BadImageFile(f"{name}: {error}") from error
        self._images_folder.mkdir(parents=True, exist_ok=True)
        return self._write(key, data)

    # --- disk ---------------------------------------------------------------------------------

    def _candidates(self, key: ImageKey) -> Iterator[Path]:
        if key.compiler is not None:
            yield self._images_folder / key.file_name
            return
        paths = self._images_folder.glob(f"{key.stem}-*{SUFFIX}")
        yield from sorted(paths, key=lambda path: path.name)

    def _load(self, key: ImageKey) -> Image | None:
        """The image from disk, or None. A file under the right name with another key inside was
        copied or renamed by somebody: it is not what its name says."""
        for path in self._candidates(key):
            try:
                image, plain = decode(path.read_bytes())
            except FileNotFoundError:
                continue
            except (OSError, BadImageFile) as error:
                self._tell(f"{path.name}: {error}; compiling anew")
                continue
            wanted = key.plain()
            if key.compiler is None:
                wanted["compiler"] = plain.get("compiler")
            if plain != wanted:
                self._tell(f"{path.name}: holds another kernel than its name says; compiling anew")
                continue
            return image
        return None

    def _write(self, key: ImageKey, data: bytes) -> Path:
        """Under a temporary name, complete on disk, then renamed."""
        target = self._images_folder / key.file_name
        handle, name = tempfile.mkstemp(dir=self._images_folder, prefix=key.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return target

    def _sweep(self, key: ImageKey) -> None:
        """Temporary files of this key belong to a process that died: its lock is ours now."""
        for path in self._images_folder.glob(f"{key.stem}*.tmp"):
            path.unlink(missing_ok=True)

    # --- compiling ----------------------------------------------------------------------------

    def _compile_once(self, key: ImageKey) -> Image:
        lock = filelock.FileLock(self._images_folder / f"{key.file_name}.lock")
        try:
            self._images_folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                log.info("waiting for another process that compiles %s", _shape_text(key))
                lock.acquire(timeout=self._lock_timeout_s)
        except filelock.Timeout:
            self._tell(
                f"another process has held {key.file_name}.lock for {self._lock_timeout_s:g} s; "
                "compiling an own copy"
            )
            return self._compile_now(key)
        except (OSError, NotImplementedError) as error:
            self._tell(f"{self.folder}: {error}; images stay in memory")
            return self._compile_now(key)
        try:
            image = self._load(key)
            if image is None:
                image = self._compile_now(key)
                self._store(key, image)
            return image
        finally:
            lock.release()

    def _store(self, key: ImageKey, image: Image) -> None:
        if source_fingerprint() != key.fingerprint:
            self._tell("cute_kernels/*.py changed since this process began; image not kept")
            return
        try:
            self._sweep(key)
            self._write(key, encode(image, key.plain()))
        except OSError as error:
            self._tell(f"{self.folder}: {error}; images stay in memory")

    def _compile_now(self, key: ImageKey) -> Image:
        compile = self.compile
        if compile is None:
            if key.compiler is None:
                raise CompilerMissing(
                    f"no image for {_shape_text(key)} in {self.folder}, and {COMPILER} is not "
                    "installed here: run `megamoe cache build` (with --sms as many as this "
                    "session uses) and `megamoe cache export` where it is and "
                    "`megamoe cache import` here, with the same megamoe"
                )
            from megamoe.cute_kernels import build

            kernels: dict[str, Compile] = {
                FORWARD: build.compile_forward,
                WGRAD: build.compile_wgrad,
            }
            compile = kernels[key.kind]
        self.compiles += 1
        log.info("compiling %s for %s", _shape_text(key), key.arch)
        return compile(problem=key.problem, config=key.config, arch=key.arch)

    def _tell(self, text: str) -> None:
        """One log line for each thing that went wrong."""
        if text not in self._told:
            self._told.add(text)
            log.warning("image cache: %s", text)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _key_from_plain(plain: dict[str, Any]) -> ImageKey:
    values = dict(plain)
    values["problem"] = Problem(**values["problem"])
    if values["kind"] == WGRAD:
        values["config"] = WgradConfig(**values["config"])
    else:
        values["config"] = KernelConfig.from_plain(values["config"])
    return ImageKey(**values)


def _shape_text(what: ImageKey | dict[str, Any]) -> str:
    p = asdict(what.problem) if isinstance(what, ImageKey) else what
    return (
        f"H {p['hidden']}, I {p['intermediate']}, E {p['num_experts']}, K {p['top_k']}, "
        f"P {p['num_pes']}, Tmax {p['max_tokens']}, {p['activation']}"
    )


@functools.lru_cache(maxsize=1)
def default_cache() -> ImageCache:
    """The cache of this process in ``default_folder()``."""
    return ImageCache()
