"""From a config to a session that is ready: agreement, images, memory, addresses; and the way out.

Legend: T tokens, H hidden, I intermediate, E experts, L local experts, K top-k, P PEs.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from types import TracebackType
from typing import Any, TypeVar

import torch

from megamoe._version import __version__
from megamoe.checks import check_kernel_support, check_training_support
from megamoe.config import MoEConfig
from megamoe.cute_kernels.image import Image
from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.cute_kernels.saved import mode_kernels
from megamoe.cute_kernels.wgrad_tables import WgradConfig, default_wgrad_config
from megamoe.planning import Plan, plan
from megamoe.runtime.cache import ImageCache, default_cache
from megamoe.runtime.devices.cuda import CudaDevice
from megamoe.runtime.errors import MegaMoEError, SessionClosed
from megamoe.runtime.group import agree, barrier, fail_alike, group_of
from megamoe.runtime.session import DEFAULT_TIMEOUT_S, PeSession
from megamoe.runtime.training import TrainingImages
from megamoe.runtime.transports.base import SymmetricBlock, Transport
from megamoe.runtime.transports.choose import NAMES, choose_transport
from megamoe.runtime.wgrad import GRAD_DTYPES
from megamoe.session_checks import arch_of, device_of

log = logging.getLogger("megamoe.session")
Built = TypeVar("Built", bound="SessionSetup")


class SessionSetup:
    """The life of a session, without its use: see ``megamoe.Session``."""

    def __init__(
        self,
        cfg: MoEConfig,
        *,
        group: Any = None,
        device: Any = None,
        transport: str = "auto",
        num_sms: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        cache: ImageCache | None = None,
        kernel_config: KernelConfig | None = None,
        training: bool = False,
        recompute: bool = False,
    ):
        check_kernel_support(cfg)
        if training:
            check_training_support(cfg)
        elif recompute:
            raise ValueError("recompute=True: must be False without training=True")
        if transport not in NAMES:
            raise ValueError(f"transport={transport!r}: must be one of {NAMES}")
        if timeout_s < 0:
            raise ValueError(f"timeout_s={timeout_s}: must be 0 (none) or positive")
        self.cfg = cfg
        self.training = training
        self.recompute = recompute
        self._kernel_config = kernel_config
        self._group = group_of(group, num_pes=cfg.num_pes)
        self.device: CudaDevice = device_of(device)
        self.arch = arch_of(self.device)
        self.num_sms = self.device.sms if num_sms is None else num_sms
        if not 1 <= self.num_sms <= self.device.sms:
            raise ValueError(f"num_sms={num_sms}: must be 1 to {self.device.sms}")
        self._plan = plan(
            cfg,
            kernel_config=kernel_config,
            training=training,
            recompute=recompute,
            sms=self.num_sms,
        )
        self.timeout_s = timeout_s
        self._cache = cache
        self._transport_name = transport
        self._transport: Transport | None = None
        self._block: SymmetricBlock | None = None
        self._pe_session: PeSession | None = None
        self.closed = False

    # --- before the first call ------------------------------------------------------------------

    @property
    def pe(self) -> int:
        """This PE: the rank in the group."""
        return self._group.rank

    @property
    def tensor_device(self) -> torch.device:
        """Where inputs, weights and outputs must lie."""
        return self.device.memory

    @property
    def warm(self) -> bool:
        """True once ``warmup()`` is done."""
        return self._pe_session is not None

    def plan(self) -> Plan:
        """Bytes of every region of the workspace; nothing is allocated for it."""
        return self._plan

    def warmup(self: Built) -> Built:
        """Make everything ready. Collective; does nothing if it is ready.

        The last step is a call without tokens on every PE, which loads the code and tries every
        signal once.

        Raises:
            ValueError: settings differ between ranks (both values are named).
            MegaMoEError: what failed, alike on every rank.
        """
        if self.closed:
            raise SessionClosed("the session is closed; build a new one")
        if self.warm:
            return self
        if self.capturing():
            raise MegaMoEError(
                "warm up first: the session was not ready when a CUDA graph capture began; call "
                "session.warmup() or run the layer once before capturing"
            )
        with self._current_device():
            self._pe_session = self._build()
        return self

    def _build(self) -> PeSession:
        group = self._group
        agree(group, self._settings())
        images = self._images()
        self._transport = choose_transport(
            self._transport_name, group=group, device=self.device, memory=self.tensor_device
        )
        self._block = self._transport.allocate(self._plan.symmetric_bytes)
        built: PeSession | None = None
        error: Exception | None = None
        try:
            built = PeSession(
                problem=self._plan.problem,
                image=images["forward"],
                device=self.device,
                symmetric=self._block,
                pe=self.pe,
                replicas=self.cfg.replicas,
                grid=self.num_sms,
                timeout_s=self.timeout_s,
                check_invalid_ids=self.cfg.invalid_ids == "error",
                training=TrainingImages(images, self._wgrad_image) if self.training else None,
            )
            if self.training:
                built.training.pool.refuse_growth = self._refuse_in_capture
                for kinds in self._wgrad_kinds():
                    built.training.launcher(*(GRAD_DTYPES[kind] for kind in kinds))
        except Exception as exc:  # told to every rank, then raised
            error = exc
        try:
            fail_alike(group, "building the session", error)
        except Exception:
            self._give_back()
            raise
        assert built is not None
        try:
            self._first_call(built)
        except Exception as exc:  # told to every rank, then raised
            error = exc
        try:
            fail_alike(group, "the first call", error)
        except Exception:
            self._abandon()  # a peer may still be writing here
            raise
        log.info(
            "session of PE %d of %d ready: %s, %d CTAs, %.2f GiB",
            self.pe, group.size, self._transport.name, self.num_sms,
            self._plan.total_bytes / 2**30,
        )  # fmt: skip
        return built

    def _settings(self) -> dict[str, Any]:
        """What must be equal on every rank."""
        return {
            **asdict(self.cfg),
            # The rule turns it into a kernel config; with one given, ranks may use as they like.
            **({"num_sms": self.num_sms} if self._kernel_config is None else {}),
            "kernel_config": self._plan.config,
            "training": self.training,
            "recompute": self.recompute,
            "arch": self.arch,
            "megamoe": __version__,
        }

    def _images(self) -> dict[str, Image]:
        """By mode. Compiled or loaded on every rank before any of them allocates or waits (CASES
        X6); those of wgrad too, which come from memory later."""
        images: dict[str, Image] = {}
        error: Exception | None = None
        try:
            cache = self._cache or default_cache()
            kernels = mode_kernels(
                self._plan.problem,
                self._kernel_config,
                training=self.training,
                sms=self.num_sms,
            )
            for mode, (problem, config) in kernels.items():
                images[mode] = cache.get_or_compile(problem, config, arch=self.arch)
                self.device.check(images[mode])
            if self.training:
                for kinds in self._wgrad_kinds():
                    self.device.check(self._wgrad_image(*kinds)[1])
        except Exception as exc:  # told to every rank, then raised
            error = exc
        fail_alike(self._group, "getting the kernel", error)
        return images

    def _wgrad_kinds(self) -> tuple[tuple[str, str], ...]:
        """Types of gradients that warm-up prepares: fp32, and those of the weights themselves."""
        bias = {"bf16": "bf16", "fp32": "f32"}[self.cfg.bias_dtype]
        return (("f32", "f32"), ("bf16", bias))

    def _wgrad_image(self, grad: str, bias_grad: str) -> tuple[WgradConfig, Image]:
        problem = self._plan.problem
        config = default_wgrad_config(problem, grad=grad, bias_grad=bias_grad)
        cache = self._cache or default_cache()
        return config, cache.get_or_compile(problem, config, arch=self.arch)

    def _first_call(self, session: PeSession) -> None:
        """Calls with T = 0, one of each kernel that waits for other ranks: lazy loading and peer
        mappings happen here, not in the first use."""
        cfg, where = self.cfg, self.tensor_device
        bound = session.bind_nothing()
        empty = torch.empty(0, cfg.hidden, dtype=torch.bfloat16, device=where)
        router = torch.empty(0, cfg.top_k, device=where)
        call: dict[str, Any] = {
            "x_TH": empty,
            "topk_ids_TK": torch.empty(0, cfg.top_k, dtype=torch.int32, device=where),
            "topk_weights_TK": router,
            "y_TH": empty,
        }
        session.launch(bound, **call)
        if self.training:
            saved = session.training.save(bound, **call)
            session.training.dgrad(saved, dy_TH=empty, dx_TH=empty, d_topk_TK=router)
            saved.free()
        self.device.synchronize()
        session.raise_on_status()
        session.release_weights(bound)

    def _refuse_in_capture(self, what: str) -> None:
        """Nothing may be allocated while a CUDA graph is captured."""
        if self.capturing():
            raise MegaMoEError(
                f"warm up first: a CUDA graph capture needs {what}; run the same forward and "
                "backward calls once before capturing"
            )

    def capturing(self) -> bool:
        """True while the current stream is captured into a CUDA graph."""
        return self.tensor_device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    # --- end ------------------------------------------------------------------------------------

    def close(self, *, abandon: bool = False) -> None:
        """Free the workspace. Every rank calls it; the second call does nothing.

        Args:
            abandon: do nothing that waits for other ranks: the symmetric memory stays allocated
                until the process ends. For the way out after an error on this rank alone; a
                session that timed out is always abandoned.
        """
        if self.closed:
            return
        self.closed = True
        with self._current_device():
            self._close(abandon)

    def _close(self, abandon: bool) -> None:
        session, self._pe_session = self._pe_session, None
        poisoned = session is not None and session.poisoned is not None
        if session is not None:
            session.close()
        if abandon or poisoned:
            self._abandon()
            return
        if self._block is not None:
            # A peer's last call may still read this PE's rows.
            barrier(self._group, "closing sessions")
        self._give_back()

    def _abandon(self) -> None:
        if self._block is not None:
            log.warning("session of PE %d abandoned with its symmetric memory", self.pe)
            _ABANDONED.append((self._transport, self._block))
        self._block = self._transport = None

    def _current_device(self) -> AbstractContextManager[object]:
        """Exchanges of some process groups use the current CUDA device of torch."""
        if self.tensor_device.type == "cuda":
            return torch.cuda.device(self.tensor_device)
        return nullcontext()

    def _give_back(self) -> None:
        transport, block = self._transport, self._block
        self._transport = self._block = None
        if transport is not None:
            if block is not None:
                transport.free(block)
            transport.close()

    def __enter__(self: Built) -> Built:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Peers do not know of an error here, so they would be waited for in vain (CASES X14)."""
        self.close(abandon=kind is not None)

    def __deepcopy__(self: Built, memo: Any) -> Built:
        """Copies of a layer go on using the session of the original."""
        return self

    def __reduce__(self) -> Any:
        """A session belongs to its process: a pickled layer comes back without one."""
        return type(None), ()

    # No __del__: freeing is collective, and garbage is not collected alike on every rank.


_ABANDONED: list[Any] = []
"""Keeps abandoned memory from being freed implicitly."""
