"""The session of this process: one workspace, used by any number of layers one after another.

Legend: T tokens, H hidden, I intermediate, E experts, L local experts, K top-k, P PEs.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from types import TracebackType
from typing import Any

import torch

from megamoe._version import __version__
from megamoe.checks import check_inputs, check_kernel_support, check_weights
from megamoe.config import MoEConfig
from megamoe.cute_kernels.image import Image
from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.planning import Plan, plan
from megamoe.runtime.cache import ImageCache, default_cache
from megamoe.runtime.devices.cuda import CudaDevice
from megamoe.runtime.errors import MegaMoEError, SessionClosed
from megamoe.runtime.group import agree, barrier, fail_alike, group_of
from megamoe.runtime.session import DEFAULT_TIMEOUT_S, PeSession
from megamoe.runtime.transports.base import SymmetricBlock, Transport
from megamoe.runtime.transports.choose import NAMES, choose_transport
from megamoe.runtime.weights import BoundWeights
from megamoe.session_checks import arch_of, check_num_tokens, check_rows, device_of

log = logging.getLogger("megamoe.session")


class Session:
    """One PE's side of an expert-parallel group. Every rank of the group builds one.

    The constructor checks and allocates nothing. ``warmup()``, or the first call, loads or compiles
    the kernel, allocates the workspace and exchanges addresses: that part is collective. After it
    a call allocates nothing on the device, compiles nothing and waits for nothing on the host, and
    can be captured in a CUDA graph.

    Calls of all layers that share a session must be ordered (one stream, or events) and come in the
    same order on every rank, T = 0 included. Layers that run at the same time need two sessions.

    Args:
        cfg: the layer; layers with equal configs can share the session.
        group: ``torch.distributed`` group whose ranks are the PEs; None is the default group, or
            no group at all if ``cfg.num_pes`` is 1.
        device: CUDA device number or ``torch.device``; None is the current one. A device object of
            ``megamoe.runtime.devices`` is taken as it is.
        transport: ``"auto"``, ``"nvshmem"``, ``"torch"`` or ``"local"``.
        num_sms: SMs the kernel may use; None is all of them. The others stay free for other work.
        timeout_s: deadline of waits for other PEs, 0 = none.
        cache: where compiled images are kept; None is the default folder.
        kernel_config: None chooses by rule.

    Raises:
        ValueError: an argument is refused; names it, its value and what is allowed.
        MegaMoEError: no driver, an unsupported GPU, or torch.distributed is not initialised.
    """

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
    ):
        check_kernel_support(cfg)
        if transport not in NAMES:
            raise ValueError(f"transport={transport!r}: must be one of {NAMES}")
        if timeout_s < 0:
            raise ValueError(f"timeout_s={timeout_s}: must be 0 (none) or positive")
        self.cfg = cfg
        self._plan = plan(cfg, kernel_config=kernel_config)
        self._group = group_of(group, num_pes=cfg.num_pes)
        self.device: CudaDevice = device_of(device)
        self.arch = arch_of(self.device)
        self.num_sms = self.device.sms if num_sms is None else num_sms
        if not 1 <= self.num_sms <= self.device.sms:
            raise ValueError(f"num_sms={num_sms}: must be 1 to {self.device.sms}")
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

    def warmup(self) -> Session:
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
        image = self._image()
        self._transport = choose_transport(
            self._transport_name, group=group, device=self.device, memory=self.tensor_device
        )
        self._block = self._transport.allocate(self._plan.symmetric_bytes)
        built: PeSession | None = None
        error: Exception | None = None
        try:
            built = PeSession(
                problem=self._plan.problem,
                image=image,
                device=self.device,
                symmetric=self._block,
                pe=self.pe,
                replicas=self.cfg.replicas,
                grid=self.num_sms,
                timeout_s=self.timeout_s,
                check_invalid_ids=self.cfg.invalid_ids == "error",
            )
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
            "kernel_config": self._plan.config,
            "arch": self.arch,
            "megamoe": __version__,
        }

    def _image(self) -> Image:
        """Compiled or loaded on every rank before any of them allocates or waits (CASES X6)."""
        image: Image | None = None
        error: Exception | None = None
        try:
            cache = self._cache or default_cache()
            image = cache.get_or_compile(self._plan.problem, self._plan.config, arch=self.arch)
            self.device.check(image)
        except Exception as exc:  # told to every rank, then raised
            error = exc
        fail_alike(self._group, "getting the kernel", error)
        assert image is not None
        return image

    def _first_call(self, session: PeSession) -> None:
        """A call with T = 0: lazy loading and peer mappings happen here, not in the first use."""
        cfg, where = self.cfg, self.tensor_device
        bound = session.bind_nothing()
        empty = torch.empty(0, cfg.hidden, dtype=torch.bfloat16, device=where)
        session.launch(
            bound,
            x_TH=empty,
            topk_ids_TK=torch.empty(0, cfg.top_k, dtype=torch.int32, device=where),
            topk_weights_TK=torch.empty(0, cfg.top_k, device=where),
            y_TH=empty,
        )
        self.device.synchronize()
        session.raise_on_status()
        session.release_weights(bound)

    def capturing(self) -> bool:
        """True while the current stream is captured into a CUDA graph."""
        return self.tensor_device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    # --- use ------------------------------------------------------------------------------------

    @property
    def input_view(self) -> torch.Tensor:
        """The symmetric input ``[Tmax, H]`` bf16: rows written here need no copy by the kernel."""
        return self._ready().input_view_TH

    def bind(
        self,
        w13: torch.Tensor,
        w2: torch.Tensor,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
    ) -> BoundWeights:
        """Prepare the weights of this PE's experts, in the layout of the config (by default
        ``w13 [L, 2I, H]``, gate first, and ``w2 [L, H, I]``, bf16). They are read in place at every
        call; keep them where they are.

        Raises:
            ValueError: names the argument, its value and what is allowed.
        """
        num_local = self.cfg.experts_per_pe[self.pe]
        check_weights(
            self.cfg, w13, w2, num_experts=num_local, b13=b13, b2=b2, device=self.tensor_device
        )
        return self._ready().bind_weights(w13=w13, w2=w2, b13=b13, b2=b2)

    def release(self, weights: BoundWeights) -> None:
        """Undo ``bind``. Waits for the device; no captured graph may use the weights any more."""
        if self._pe_session is not None and not self.closed:
            self._pe_session.release_weights(weights)

    def forward(
        self,
        weights: BoundWeights,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        num_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Enqueue one call on the current stream. Every rank calls, also with T = 0.

        Args:
            weights: from ``bind``.
            x: ``[T, H]`` bf16, 0 ≤ T ≤ Tmax, any row stride.
            topk_ids: ``[T, K]`` int32 or int64; < 0 is a masked slot.
            topk_weights: ``[T, K]`` fp32; bf16 and fp16 are converted first.
            out: ``[T, H]`` bf16, contiguous; None makes one.
            residual: ``[T, H]`` bf16, contiguous, added to the result.
            num_tokens: int32 ``[1]`` on the device: how many of the Tmax rows given here count.
                Read by the kernel, so a replayed graph may find another T each time. Rows of the
                output from T on are left as they are.

        Returns:
            ``[T, H]`` bf16: ``out``, or a new tensor.

        Raises:
            ValueError: names the argument, its value and what is allowed.
            MegaMoEError: what an earlier call reported; the session is closed or not warm.
        """
        session = self._ready()
        cfg = self.cfg
        if x.device != self.tensor_device:
            raise ValueError(f"x is on {x.device}: must be on {self.tensor_device}")
        check_inputs(cfg, x, topk_ids, topk_weights)
        tokens = x.shape[0]
        if num_tokens is not None:
            check_num_tokens(num_tokens, rows=tokens, max_tokens=cfg.max_tokens, like=x)
        if out is None:
            out = torch.empty(tokens, cfg.hidden, dtype=torch.bfloat16, device=x.device)
        else:
            check_rows("out", out, like=x)
        if residual is not None:
            check_rows("residual", residual, like=x)
        session.launch(
            weights,
            x_TH=x,
            topk_ids_TK=topk_ids.contiguous(),
            topk_weights_TK=topk_weights.to(torch.float32).contiguous(),
            y_TH=out,
            residual_TH=residual,
            num_tokens=num_tokens,
        )
        return out

    def check(self) -> None:
        """Wait for the device and raise what the kernel has reported.

        Raises:
            MegaMoEError: a timeout, a full pool or an invalid id.
        """
        session = self._ready()
        self.device.synchronize()
        session.raise_on_status()

    def _ready(self) -> PeSession:
        if self.closed:
            raise SessionClosed("the session is closed; build a new one")
        if self._pe_session is None:
            raise MegaMoEError("warm up first: call session.warmup() on every rank")
        return self._pe_session

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

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Peers do not know of an error here, so they would be waited for in vain (CASES X14)."""
        self.close(abandon=kind is not None)

    def __deepcopy__(self, memo: Any) -> Session:
        """Copies of a layer go on using the session of the original."""
        return self

    def __reduce__(self) -> Any:
        """A session belongs to its process: a pickled layer comes back without one."""
        return type(None), ()

    # No __del__: freeing is collective, and garbage is not collected alike on every rank.


_ABANDONED: list[Any] = []
"""Keeps abandoned memory from being freed implicitly."""
