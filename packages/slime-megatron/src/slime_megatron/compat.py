"""Patches that let megatron-core run without CUDA; every change to foreign code that this package makes is here.

Megatron 0.19 names CUDA where it means "the device". `install` gives Megatron's own modules a stand-in for the name
`torch` that answers those calls for the CPU; everybody else's torch stays as it is. Where CUDA exists there is no
stand-in. Each redirect says why it is there and counts how often it was taken, and a test fails when one never is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import logging
import pkgutil
import queue
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from slime_core.errors import TrainerError
from slime_models.cpu import multiplies_bfloat16, product

from slime_megatron.checkpoint import unpickling
from slime_megatron.importing import importing
from slime_megatron.optim.state_methods import on_the_first_rank, where_gathered, without_steps
from slime_megatron.parallel.uneven_parts import gather_uneven, scatter_uneven
from slime_megatron.stand_ins import StandIn, Stream, refill

#: megatron-core versions that the redirects are written for: at least the first, below the second.
MEGATRON_VERSIONS = ("0.19", "0.20")
#: What the trainer uses of Megatron; these import all else, so that nothing is left to import after the redirects.
_MODULES = (
    "megatron.core",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.mimo.model.base",  # imported by get_megatron_optimizer when it is called
    "megatron.core.pipeline_parallel",
    "megatron.core.optimizer",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",  # imported by save when it is called
)
#: Loggers that warn of nothing but Megatron's insides: what is deprecated there (GPTModel, its own writer of
#: checkpoints), and that DDP lays its buffers out by itself.
_NOISY_LOGGERS = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.distributed.distributed_data_parallel",
)
_CPU = torch.device("cpu")
_Hit = Callable[[], None]


@dataclass(frozen=True)
class Redirect:
    """One attribute that Megatron sees otherwise."""

    name: str
    """`torch.x` and `torch.cuda.x` are replaced for Megatron's modules alone; all else in place."""
    reason: str
    """Who reads it, and what for."""
    replace: Callable[[Any, _Hit], Any]
    """(original, hit) -> replacement; calls `hit` when it answers otherwise than the original would."""
    with_cuda: bool = False
    """Whether it is wanted where CUDA exists, too."""
    across_ranks: bool = False
    """Whether it is taken only where there are several processes."""
    without_bfloat16: bool = False
    """Whether it is wanted only on a CPU that has no bfloat16 products."""


@dataclass(frozen=True)
class Compat:
    """What was installed in this process."""

    redirects: tuple[str, ...]
    """Names of the redirects in force."""
    hits: Counter[str] = field(default_factory=Counter)
    """Name -> how often it was taken."""

    @property
    def dead(self) -> list[str]:
        """Return the redirects that were never taken."""
        return [name for name in self.redirects if not self.hits[name]]


def _answer(value: Callable[..., Any]) -> Callable[[Any, _Hit], Any]:
    """Return a `replace` that calls `value` in place of the original."""

    def replace(original: Any, hit: _Hit) -> Any:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            hit()
            return value(*args, **kwargs)

        return replacement

    return replace


def _on_cpu(original: Any, hit: _Hit) -> Any:
    """Let a tensor factory take device="cuda" for the CPU."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            hit()
            kwargs["device"] = _CPU
        return original(*args, **kwargs)

    return replacement


def _named_as_cuda(original: Any, hit: _Hit) -> Any:
    """Let `tensor.type()` say `torch.cuda.FloatTensor` when a module of Megatron asks."""

    @functools.wraps(original)
    def replacement(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(name, str) and caller.startswith("megatron."):
            hit()
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    return replacement


def _sizes_as_numbers(original: Any, hit: _Hit) -> Any:
    """Let `maybe_move_tensor_to_cpu(as_numpy=True)` do so for a tensor that is on the CPU already."""

    @functools.wraps(original)
    def replacement(tensor: Any, as_numpy: bool = False, **kwargs: Any) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            hit()
            return tensor.numpy()
        return original(tensor, as_numpy=as_numpy, **kwargs)

    return replacement


def _stays(original: Any, hit: _Hit) -> Any:
    """Let `tensor.cuda()` return the tensor when a module of Megatron asks."""

    @functools.wraps(original)
    def replacement(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("megatron."):
            hit()
            return self
        return original(self, *args, **kwargs)

    return replacement


def _through_float32(original: Any, hit: _Hit) -> Any:
    """Let Megatron multiply bfloat16 matrices as float32."""

    @functools.wraps(original)
    def replacement(a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if a.dtype is torch.bfloat16 and not kwargs and caller.startswith("megatron."):
            hit()
            return product(a, b)
        return original(a, b, **kwargs)

    return replacement


def _where_uneven(uneven: Callable[[torch.Tensor, Any, Sequence[int]], torch.Tensor]) -> Any:
    """Return a `replace` that calls `uneven` where ranks have parts of different sizes."""

    def replace(original: Any, hit: _Hit) -> Any:
        @functools.wraps(original)
        def replacement(tensor: torch.Tensor, group: Any, sizes: Any = None, *args: Any) -> Any:
            if sizes is None:
                return original(tensor, group, sizes, *args)
            hit()
            return uneven(tensor, group, sizes)

        return replacement

    return replace


def _one_group_for_the_same_ranks(original: Any, hit: _Hit) -> Any:
    """Let all roles that the same ranks have together share a group; every rank asks for the same ones in the same order."""
    owner: Any = sys.modules[original.__module__]

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        make, made = owner.create_group, {}

        def create(ranks: Sequence[int], **options: Any) -> Any:
            role = (tuple(ranks), options.get("backend"))
            if role in made:
                hit()
            else:
                made[role] = make(ranks, **options)
            return made[role]

        owner.create_group = create
        try:
            return original(*args, **kwargs)
        finally:
            owner.create_group = make

    return replacement


def _copies_of_the_host(original: Any, hit: _Hit) -> Any:
    """Let an optimizer that is offloaded to the host take parameters that are there already for such of a device."""

    @functools.wraps(original)
    def replacement(self: Any, offload_fraction: float) -> Any:
        hit()
        copies = {p: p.detach().clone().float() for group in self.param_groups for p in group["params"]}
        groups = [{**group, "params": [copies[p] for p in group["params"]]} for group in self.param_groups]
        return groups, [], copies, {copy: p for p, copy in copies.items()}, copies

    return replacement


_STREAM = Stream()


REDIRECTS = (
    Redirect(
        "megatron.core.parallel_state.initialize_model_parallel",
        "a group of gloo has three threads, one of which wakes 100 times a second; of its own each role would have one",
        _one_group_for_the_same_ranks,
    ),
    Redirect("torch.zeros", "schedules, gradient norm: scalars with device='cuda'", _on_cpu),
    Redirect("torch.tensor", "optimizers: scalars with device='cuda'", _on_cpu),
    Redirect("torch.cuda.current_device", "buffers: is only passed on as device=", _answer(lambda: _CPU)),
    Redirect(
        "torch.cuda.current_stream",
        "gradient sync, MoE dispatch: which stream to wait for",
        _answer(lambda *_: _STREAM),
    ),
    Redirect(
        "torch.cuda.Stream", "MoE dispatch: copies numbers of tokens to the host", _answer(lambda: _STREAM)
    ),
    Redirect("torch.cuda.stream", "MoE dispatch", _answer(lambda _: contextlib.nullcontext())),
    Redirect(
        "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        "MoE dispatch: all_to_all takes sizes as numbers, and only a CUDA tensor is turned into them",
        _sizes_as_numbers,
        across_ranks=True,
    ),
    Redirect(
        "megatron.core.tensor_parallel.random._get_share_storage",
        "recomputation of experts' activations: compiles an extension in C++, for a minute",
        _answer(lambda: refill),
    ),
    Redirect("torch.cuda.synchronize", "saving: waits for copies to the host", _answer(lambda *_: None)),
    Redirect(
        "torch.cuda.manual_seed", "RNG tracker: seeds the device's generator", _answer(torch.manual_seed)
    ),
    Redirect("torch.cuda.get_rng_state", "RNG tracker", _answer(lambda *_: torch.get_rng_state())),
    Redirect(
        "megatron.core.tensor_parallel.random._get_cuda_rng_state",
        "recomputation: state of the device's generator",
        _answer(lambda *_, **__: torch.get_rng_state()),
    ),
    Redirect(
        "megatron.core.tensor_parallel.random._set_cuda_rng_state",
        "RNG tracker, recomputation: state of the device's generator",
        _answer(lambda state, *_, **__: torch.set_rng_state(state)),
    ),
    Redirect(
        "torch.Tensor.type",
        "the mixed-precision optimizer tells dtypes by 'torch.cuda.FloatTensor'",
        _named_as_cuda,
    ),
    Redirect(
        "megatron.core.tensor_parallel.mappings._gather_along_first_dim",
        "expert tensor parallelism: ranks have different numbers of tokens, which gloo refuses",
        _where_uneven(gather_uneven),
        across_ranks=True,
    ),
    Redirect(
        "megatron.core.tensor_parallel.mappings._reduce_scatter_along_first_dim",
        "its backward pass",
        _where_uneven(scatter_uneven),
        across_ranks=True,
    ),
    Redirect(
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer.HybridDeviceOptimizer._get_sub_optimizer_param_groups",
        "--optimizer-cpu-offload: leaves out what is not on CUDA",
        _copies_of_the_host,
    ),
    Redirect("torch.matmul", "linear layers, forward", _through_float32, without_bfloat16=True),
    Redirect("torch.Tensor.matmul", "linear layers, backward", _through_float32, without_bfloat16=True),
    Redirect("torch.Tensor.cuda", "distributed optimizer: gathers its state to save it", _stays),
    Redirect(
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states",
        "torch's AdamW counts steps for each parameter, Megatron's checkpoint for all; without TE it looks for both",
        without_steps,
        with_cuda=True,
    ),
    Redirect(
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.get_parameter_state_dp_zero",
        "each rank gathers the state of all on its host, 12 bytes a parameter, and one of them writes it: ranks of a machine times that",
        on_the_first_rank,
        with_cuda=True,
    ),
    Redirect(
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.sharded_param_state_fully_reshardable",
        "takes parameters behind a padded bucket from beside their places in the gathered state (its TODO of issue 504)",
        where_gathered,
        with_cuda=True,
    ),
    Redirect(
        "megatron.core.dist_checkpointing.strategies.filesystem_async.get_write_results_queue",
        "a synchronous save starts a manager process for a queue that only its own thread uses",
        _answer(lambda *_, **__: queue.Queue()),
        with_cuda=True,
    ),
    Redirect(
        "torch.distributed.checkpoint.filesystem.FileSystemReader.read_metadata",
        "unpickles the index of a folder, which may call anything",
        _answer(unpickling.read_metadata),
        with_cuda=True,
    ),
    Redirect(
        "torch.distributed.checkpoint.default_planner.DefaultLoadPlanner.load_bytes",
        "unpickles what is saved beside tensors, which may call anything",
        _answer(unpickling.load_bytes),
        with_cuda=True,
    ),
)


@functools.cache
def install() -> Compat:
    """Import megatron-core, and make it run on this machine. Repeated calls return the first answer.

    Raises:
        TrainerError: megatron-core is of another version than the redirects are for; or there is no CUDA and
            megatron.core was imported already.
    """
    version = importlib.metadata.version("megatron-core")
    if not _parts(MEGATRON_VERSIONS[0]) <= _parts(version) < _parts(MEGATRON_VERSIONS[1]):
        raise TrainerError(
            f"megatron-core {version} is installed; wanted at least {MEGATRON_VERSIONS[0]} and below "
            f"{MEGATRON_VERSIONS[1]}, for which slime_megatron.compat is written"
        )
    cuda = torch.cuda.is_available()
    if not cuda and "megatron.core" in sys.modules:
        raise TrainerError(
            "megatron.core was imported before slime_megatron.compat.install(); call install() first"
        )
    with importing():
        for name in _MODULES:
            importlib.import_module(name)
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    wanted = wanted_redirects()
    compat = Compat(tuple(redirect.name for redirect in wanted))
    _apply(wanted, compat.hits)
    return compat


def wanted_redirects() -> list[Redirect]:
    """Return the redirects that this machine needs."""
    if torch.cuda.is_available():
        return [redirect for redirect in REDIRECTS if redirect.with_cuda]
    native = multiplies_bfloat16()
    return [redirect for redirect in REDIRECTS if not (native and redirect.without_bfloat16)]


def _apply(redirects: list[Redirect], hits: Counter[str]) -> None:
    stand_in, stand_in_cuda = StandIn(torch), StandIn(torch.cuda)
    stand_in.__dict__["cuda"] = stand_in_cuda
    owners = {"torch": stand_in, "torch.cuda": stand_in_cuda, "torch.Tensor": torch.Tensor}
    for redirect in redirects:
        path, _, attribute = redirect.name.rpartition(".")
        owner = owners.get(path) or pkgutil.resolve_name(path)
        hit = functools.partial(hits.update, [redirect.name])
        setattr(owner, attribute, redirect.replace(getattr(owner, attribute), hit))
    if all(redirect.with_cuda for redirect in redirects):
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.__dict__["torch"] = stand_in


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
