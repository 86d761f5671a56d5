"""Memory of the engine `torch` by arithmetic, before anything starts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from slime_core.config.build import MemoryQuestion
from slime_core.config.derive import ONE_STEP_OFF, SYNC, batch_sizes, compute_dtype
from slime_core.plugins.own_name import means
from slime_core.protocols.memory import MemoryEstimate, Remedy
from slime_models.family.architecture import Architecture
from slime_models.family.chosen import family_of_config
from slime_models.hf.config import read_config

from slime_torch.engine import context_len, engine_dtype
from slime_torch.layers.builder import attention_dtype
from slime_torch.model.decoder import Decoder
from slime_torch.section import TorchSection
from slime_torch.storage.cache import PAGE_LEN
from slime_torch.storage.weights import can_pack

_FLOAT32 = 4
_WORKING = "working memory"
#: Loops that have no request in flight while weights are updated.
_LOOPS_WITHOUT = (SYNC, ONE_STEP_OFF, "slime-core/rollout-only")
#: Fewest requests at once that are proposed.
_LEAST_REQUESTS = 8


def engine_memory(question: MemoryQuestion) -> Sequence[MemoryEstimate]:
    """Return what the engine takes at its peak: as many requests as it decodes together, each as long as the longest.

    In the loop `sync` these are no more than those of a step; an evaluation may have more.

    Raises:
        PluginError: no installed family has the model's model_type, or it brings no layers for this engine; names it.
        EngineError: the engine cannot run the model.
    """
    section, settings = question.section(TorchSection), question.settings
    config = read_config(question.model_path)
    family = family_of_config(question.registry, config, question.model_path, named=settings.model.model_name)
    architecture = family.architecture(config)
    device = torch.device(question.device.kind)
    dtype = engine_dtype(section.dtype, trained_in=compute_dtype(settings.train), device=device.type)
    weights = sum(map(math.prod, family.hf_shapes(architecture).values()))
    if architecture.tie_word_embeddings and can_pack(dtype, device):  # the output layer is a packed copy
        weights += architecture.vocab_size * architecture.hidden_size
    weights *= dtype.itemsize
    slots = section.max_running_requests
    if means(settings.run.loop, SYNC):
        sizes = batch_sizes(settings)
        slots = min(slots, sizes.over_sampling_batch_size * sizes.n_samples_per_prompt)
    longest = min(question.longest_request, context_len(section, architecture))
    decoder = Decoder(family, architecture, max_length=1, dtype=dtype, device=torch.device("meta"))
    cache = decoder.create_cache(
        slots,
        max_len=longest,
        max_tokens=section.max_total_tokens,
        page_len=PAGE_LEN,
        dtype=attention_dtype(dtype, device),
    )
    may_retract = cache.max_tokens < slots * cache.most_pages * PAGE_LEN
    length = longest if may_retract or _goes_on(question) else min(question.prompt_tokens, longest)
    prefilled = max(length, min(section.max_prefill_tokens, slots * length))
    parts = {
        "weights": weights,
        "KV cache": cache.predicted_bytes(slots, longest),
        _WORKING: _working(architecture, dtype, slots=slots, prefilled=prefilled),
    }
    is_moved = settings.cluster.offloads_rollout and device.type == "cuda"
    host = {"offloaded weights": weights} if is_moved else {}
    stays = () if device.type == "cuda" else ("weights",)
    return [
        MemoryEstimate(
            who="engine torch", parts=parts, host=host, passing=(_WORKING,), stays=stays, updated=("weights",)
        )
    ]


def engine_remedies(question: MemoryQuestion) -> Sequence[Remedy]:
    """Return fewer requests at once, and sharing the GPU in turn. Shares of time are rules of thumb."""
    found, requests, slower = [], question.section(TorchSection).max_running_requests, 0.0
    while (requests := requests // 2) >= _LEAST_REQUESTS:
        slower += 0.15
        found.append(
            Remedy(
                flags={"--torch-max-running-requests": str(requests)},
                settings={("torch", "max_running_requests"): requests},
                slower=slower,
            )
        )
    cluster = question.settings.cluster
    takes_turns = means(question.settings.run.loop, SYNC)
    if question.device.kind == "cuda" and takes_turns and not cluster.shares_devices:
        found.append(Remedy(flags={"--colocate": ""}, settings={("cluster", "colocate"): True}, slower=0.1))
    return found


def _goes_on(question: MemoryQuestion) -> bool:
    """Return whether requests are prefilled with what was generated before: in earlier turns, steps, or by earlier weights."""
    settings, rollout = question.settings, question.settings.rollout
    keeps = settings.train.update_weights_in_flight == "keep" or means(settings.run.loop, *_LOOPS_WITHOUT)
    return (
        rollout.partial_rollout
        or not keeps
        or not means(rollout.custom_generate_function_path, "slime-core/single-turn")
    )


def _working(architecture: Architecture, dtype: torch.dtype, *, slots: int, prefilled: int) -> int:
    """Return what a prefill batch of so many tokens, or the logits of all requests, work with: their probabilities and sums are float32."""
    a = architecture
    # Gate and up side by side; of experts also each chosen one's copy of the token, what it gives, and that in the tokens' order.
    inner = 2 * max(a.ffn_hidden_size, a.moe_shared_expert_intermediate_size or 0)
    if a.moe_layers:
        inner = max(inner, (a.moe_router_topk or 0) * (3 * a.hidden_size + 2 * (a.moe_ffn_hidden_size or 0)))
    prefill = prefilled * dtype.itemsize * (3 * a.hidden_size + 2 * a.qkv_size + inner)
    logits = slots * a.vocab_size * (dtype.itemsize + 2 * _FLOAT32)
    return max(prefill, logits)
