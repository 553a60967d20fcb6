"""A ``MegaMoE`` layer whose session drives a recording device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from recorded import device, recording_api, stub_compile

from megamoe import MegaMoE, MoEConfig, Session
from megamoe.runtime.cache import ImageCache
from megamoe.runtime.devices.recording import RecordingApi


def config(**changes: Any) -> MoEConfig:
    sizes: dict[str, Any] = {
        "hidden": 128,
        "intermediate": 64,
        "num_experts": 8,
        "top_k": 2,
        "num_pes": 1,
        "max_tokens": 16,
    }
    return MoEConfig(**(sizes | changes))


def weights(cfg: MoEConfig, pe: int = 0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed + 100 * pe)
    local = cfg.experts_per_pe[pe]
    return (
        torch.randn(local, *cfg.w13_shape, generator=rng).bfloat16() * 0.1,
        torch.randn(local, *cfg.w2_shape, generator=rng).bfloat16() * 0.1,
    )


def inputs(cfg: MoEConfig, tokens: int = 5, seed: int = 0) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, cfg.hidden, generator=rng).bfloat16(),
        torch.randint(0, cfg.num_experts, (tokens, cfg.top_k), generator=rng).int(),
        torch.rand(tokens, cfg.top_k, generator=rng),
    )


def recording_session(
    cfg: MoEConfig, folder: Path | str, api: RecordingApi | None = None, **options: Any
) -> tuple[Session, RecordingApi]:
    api = api or recording_api()
    cache = ImageCache(folder, compile=stub_compile)
    return Session(cfg, device=device(api), cache=cache, **options), api


def recording_layer(
    cfg: MoEConfig, folder: Path | str, **options: Any
) -> tuple[MegaMoE, RecordingApi]:
    session, api = recording_session(cfg, folder, **options)
    return MegaMoE(cfg, *weights(cfg), session=session), api
