"""What the reference system's packages have and this slime has not: why, and what to use in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

#: Module of the reference system -> why it is not here; what to use.
MODULES: Mapping[str, str] = {
    "slime.ray": (
        "who gets which GPU, and which processes run there, is the launcher's affair here; use `slime train` with --launcher ray, or "
        "a loop of your own over the core API (docs/custom-loop.md)"
    ),
    "slime_plugins": (
        "layers of models are those of their family, which --spec names and docs/add-a-model.md adds, and there is no buffer server; use "
        "a rollout function (--rollout-function-path) that asks yours"
    ),
    "slime.router": "servers are balanced by the engine itself; use --rollout-engine sglang, or a server of your own by its address",
    "slime.agent": (
        "agents are programs, tools and environments of the package slime-agents; use --custom-generate-function-path "
        "agent, which answers the calls of OpenAI's and Anthropic's clients (docs/agents.md)"
    ),
    "slime.backends.sglang_utils": "servers are started by the engine `sglang`; use --sglang-* flags, or slime_sglang",
    "slime.backends.fsdp_utils": "there is no FSDP trainer; use the trainer `megatron`",
    "slime.backends.megatron_utils.actor": "a rank is a trainer, no actor; use slime_megatron, or --custom-megatron-*-hook-path",
    "slime.backends.megatron_utils.model": "models are built by their family; use --custom-model-provider-path (docs/add-a-model.md)",
    "slime.backends.megatron_utils.initialize": "the trainer sets Megatron up; use --custom-megatron-init-path",
    "slime.backends.megatron_utils.checkpoint": "checkpoints are the run's; use --load, --save and `slime convert`",
    "slime.backends.megatron_utils.data": "batches are laid out by the core; use --rollout-data-postprocess-path",
    "slime.backends.megatron_utils.model_provider": "models are built by their family; use --custom-model-provider-path",
    "slime.backends.megatron_utils.update_weight": "weights are sent by transports; use --update-weight-transport",
    "slime.backends.megatron_utils.megatron_to_hf": "weights are converted by the model's family; use `slime convert`",
    "slime.backends.megatron_utils.hf_to_megatron": "weights are converted by the model's family; use `slime convert`",
    "slime.backends.megatron_utils.server": "the teacher is in the trainer; use --opd-teacher-load",
    "slime.rollout.fully_async_rollout": "generating beside training is a loop here; use --loop fully-async",
    "slime.rollout.forge_load": "that format is the reference system's own; use --load-debug-rollout-data",
    "slime.rollout.sleep_rollout": "a rollout that never ends is stopped by its deadline; use an engine of your own by its address",
    "slime.utils.distributed_utils": "process groups are Megatron's; use megatron.core.parallel_state and torch.distributed",
    "slime.utils.wandb_utils": "the run starts its trackers; use --use-wandb, and tracking_utils.log in a log function",
    "slime.utils.tensorboard_utils": "the run starts its trackers; use --use-tensorboard, and tracking_utils.log in a log function",
    "slime.utils.dp_schedule": "steps are cut by slime_core.data and packed by slime_megatron.batch; use --balance-data",
    "slime.utils.seqlen_balancing": "micro-batches are packed by slime_megatron.batch; use --balance-data",
    "slime.utils.flops_utils": "operations are counted by slime_megatron; use the metrics perf/*_tflops",
    "slime.utils.memory_utils": "what a run takes is computed; use `slime plan RECIPE --memory`",
    "slime.utils.train_dump_utils": "samples of each step are recorded; use --save-debug-rollout-data and `slime replay`",
    "slime.utils.train_metric_utils": "metrics of training are the run's; use docs/metrics.md",
    "slime.utils.routing_replay": "routing is replayed by the trainer; use --use-routing-replay or --use-rollout-routing-replay",
    "slime.utils.health_monitor": "servers are watched by the engine; use --rollout-health-check-interval",
    "slime.utils.tensor_backper": "roles' weights are swapped by the trainer; use --ref-load, --keep-old-actor",
}  # fmt: skip


def absent(module: str) -> ImportError:
    """Return the error of a module that is not here: why, and what to use."""
    name = max((one for one in MODULES if module == one or module.startswith(f"{one}.")), key=len, default="")
    why = MODULES.get(name, "this slime has no such module; docs/migrate-from-slime.md says what there is")
    return ImportError(f"{module} is not here: {why}", name=module)


def lacking(module: str, names: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Return a module's `__getattr__`, which says of names that are not here what to use.

    Args:
        module: that lacks them.
        names: name -> why it is not here; what to use.
    """

    def missing(name: str) -> NoReturn:
        if name in names:
            raise ImportError(f"{module}.{name} is not here: {names[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing
