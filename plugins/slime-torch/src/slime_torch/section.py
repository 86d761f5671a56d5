"""Settings of the engine `torch`."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from slime_core.config.base import MOST, Count, SectionModel
from slime_core.protocols import TOP_P_TOKENS, EngineCapabilities
from slime_models.groups import OWN_TRANSPORTS

#: Key of `Completion.metadata` for the experts that each token was routed to.
ROUTED_EXPERTS = "routed_experts"
#: What the engine can do.
CAPABILITIES = EngineCapabilities(
    transports=OWN_TRANSPORTS,
    other_transports=True,
    reports_load=True,
    completions=frozenset({TOP_P_TOKENS, ROUTED_EXPERTS}),
)


class TorchSection(SectionModel):
    """In-process generation in plain PyTorch (`--rollout-engine torch`)."""

    max_running_requests: Count = 64
    """Most requests decoded together; further ones wait for a slot."""
    max_total_tokens: Count | None = None
    """Most tokens in the KV cache, of all requests that are decoded together, and no fewer than one request may have: one that finds
    no room waits, or is put back into the queue and prefilled again; when not given, as many as half of the memory holds that is free
    when the engine starts (on a CPU half of all memory)."""
    max_context_len: Annotated[int, Ge(2), Le(MOST)] | None = None
    """Most tokens of prompt and response; the model's own limit when not given, or when that is lower."""
    max_prefill_tokens: Count = 4096
    """Most prompt tokens of one prefill batch; a longer prompt gets a batch of its own."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Storage and compute dtype; `auto` is the trainer's (`bf16`), float32 with `fp16` and on a CPU without bfloat16 products."""
    num_threads: Annotated[int, Ge(1), Le(4096)] | None = None
    """Threads of PyTorch's CPU operators, for the whole process; PyTorch's own choice when not given."""
    cuda_graphs: bool = True
    """Record decoding steps on a GPU as CUDA graphs, which are launched whole; where there are kernels for a GPU, all layers have the
    usual attention, and the experts of tokens are not recorded."""
    kernels: bool = True
    """Compile what lies between the matrix products: for a GPU by Triton, for a CPU by numba where it is installed (the extra
    `slime-torch[jit]`)."""
