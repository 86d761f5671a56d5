"""`trainer_memory`: what each rank of the trainer takes, by pipeline stage and pool, before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime_core.config.build import MemoryQuestion
from slime_core.config.derive import batch_sizes, compute_dtype, num_ranks
from slime_core.protocols.memory import MemoryEstimate
from slime_core.run.assemble import algorithm

from slime_megatron.memory.activations import activations_of_stage, forward_of_stage, in_flight
from slime_megatron.memory.family_memory import memory_of
from slime_megatron.memory.layout import Layout
from slime_megatron.memory.micro_batch import MicroBatchShape, micro_batch_tokens
from slime_megatron.memory.parameters import Parameters, parameters_of_stages
from slime_megatron.settings.derive import LOGITS, Frozen, frozen_models, shares_optimizer
from slime_megatron.settings.learner_settings import family_of
from slime_megatron.settings.section import MegatronSection
from slime_megatron.settings.section_roles import LoraSection, RolesSection

if TYPE_CHECKING:
    from slime_models.family.architecture import Architecture
    from slime_models.family.family import ModelFamily

_FLOAT32 = 4
#: Weights, gradients and optimizer of the policy and of a critic; the first is on the device during updates, too.
WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
#: What the micro-batches in flight keep, and what the largest step of a backward pass has beside it.
ACTIVATIONS, WORKING = "activations", "working memory"
#: CUDA's context and its kernels: a guess that no measurement stands behind.
CONTEXT, CONTEXT_BYTES = "context (guessed)", 2**29
#: Megatron's own flags by which weights, gradients or optimizer are of other sizes, or elsewhere: with them nothing is predicted.
_CHANGES_SIZES = frozenset(
    {
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "data_parallel_sharding_strategy",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "fp4_format",
        "fp4_param_gather",
        "fp8_format",
        "fp8_param_gather",
        "main_grads_dtype",
        "main_params_dtype",
        "num_layers",
        "optimizer_cpu_offload",
        "pipeline_model_parallel_layout",
        "use_precision_aware_optimizer",
    }
)
#: Attention of shorter sequences is computed in float32 on a CPU (`model.layers.attention`).
_FLOAT32_BELOW = 512


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """The settings that decide what a rank's weights, gradients and optimizer take."""

    dtype_bytes: int
    """Of a number of the dtype that is computed in: 4 for float32, else 2."""
    optimizer: str = "adam"
    """`adam` or `sgd`."""
    has_momentum: bool = True
    """Whether `sgd` has a momentum."""
    shared_optimizer: bool = False
    """Whether ranks with the same weights share the optimizer's state."""

    @property
    def moment_bytes(self) -> int:
        """Of a trained number's moments: two float32 of AdamW, one or none of descent."""
        return 2 * _FLOAT32 if self.optimizer == "adam" else _FLOAT32 * self.has_momentum

    @property
    def master_bytes(self) -> int:
        """Of a trained number's float32 copy, which float32 weights are themselves."""
        return 0 if self.dtype_bytes == _FLOAT32 else _FLOAT32


def static_parts(parameters: Parameters, rank: RankSettings, layout: Layout) -> dict[str, int]:
    """Return the bytes that a rank has between steps: weights, float32 gradients, master weights and moments."""
    state = rank.master_bytes + rank.moment_bytes
    shards = (layout.optimizer_shards, layout.expert_optimizer_shards) if rank.shared_optimizer else (1, 1)
    counts = (parameters.trained, parameters.trained_experts)
    optimizer = sum(-(-count // ranks) * state for count, ranks in zip(counts, shards, strict=True))
    return {
        WEIGHTS: parameters.all * rank.dtype_bytes + parameters.buffers * _FLOAT32,
        GRADIENTS: parameters.all_trained * _FLOAT32,
        OPTIMIZER: optimizer,
    }


def trainer_memory(question: MemoryQuestion) -> Sequence[MemoryEstimate]:
    """Return what a rank of each pipeline stage takes at its peak; stages that take as much are one entry.

    Roles with ranks of their own follow, by their stages.

    Empty where flags of Megatron's own change sizes, where stages have layers of their own number, and where the family says that
    nothing is predicted.

    Raises:
        PluginError: no installed family has the model's model_type; names it.
        DataError: its config.json cannot be used; names the field.
    """
    family, config = family_of(question)
    section = question.section(MegatronSection)
    uneven = section.decoder_first_pipeline_num_layers or section.decoder_last_pipeline_num_layers
    if uneven or _CHANGES_SIZES & section.megatron_args.keys():
        return []
    layout = Layout.of(section, num_ranks(question.settings))
    architecture = family.architecture(config).with_padded_vocab(layout.tensor)
    memory = memory_of(family)
    if memory.unknown is not None:
        return []
    held = architecture.with_mtp(section.enable_mtp_training)
    shape, rank = _micro_batch(question, layout), _rank_settings(question, layout.ranks)
    needs = algorithm(question.settings, question.registry).needs
    stages = parameters_of_stages(family, held, section, question.section(LoraSection), layout)
    n_critics = num_ranks(question.settings, "critic") if "values" in needs else 0
    is_among = "values" in needs and not n_critics
    frozen = _frozen(question, needs)
    n_frozen = num_ranks(question.settings, "ref") if frozen else 0
    beside = () if n_frozen else frozen
    critics: Sequence[Parameters | None] = [None] * layout.pipeline
    if is_among:
        critics = _critics(family, architecture, layout)
    found: list[dict[str, Any]] = []
    for stage, (parameters, critic) in enumerate(zip(stages, critics, strict=True)):
        parts = static_parts(parameters, rank, layout)
        if critic is not None:
            parts = {name: size + static_parts(critic, rank, layout)[name] for name, size in parts.items()}
        own = activations_of_stage(
            architecture, layout, shape, stage=stage, in_flight=in_flight(layout, stage), memory=memory
        )
        parts |= {
            ACTIVATIONS: own.kept,
            WORKING: max(own.working, _sync_bytes(section, rank, held, layout) - own.kept),
        }
        if question.device.kind == "cuda":
            parts[CONTEXT] = CONTEXT_BYTES
        found.append({"parts": parts, "host": _host(question, parameters, parts, rank, beside)})
    estimates = _as_estimates(found, layout)
    if n_critics:
        estimates += _critic_memory(question, family, architecture, Layout.of(section, n_critics))
    if n_frozen:
        estimates += _frozen_memory(
            question, family, architecture, Layout.of(section, n_frozen), count=len(frozen)
        )
    return estimates


def _frozen(question: MemoryQuestion, needs: frozenset[str]) -> Sequence[Frozen]:
    """Return which frozen models the run has."""
    return frozen_models(needs, has_teacher=question.section(RolesSection).opd_teacher_load is not None)


def _frozen_memory(
    question: MemoryQuestion, family: ModelFamily, architecture: Architecture, layout: Layout, *, count: int
) -> list[MemoryEstimate]:
    """Return what ranks take that have `count` frozen models alone: weights, and one forward pass at a time."""
    shape, rank = _micro_batch(question, layout), _rank_settings(question, layout.ranks)
    shape = dataclasses.replace(shape, with_entropy=False, with_logits=False)
    found: list[dict[str, Any]] = []
    stages = parameters_of_stages(family, architecture, MegatronSection(), LoraSection(), layout)
    for stage, parameters in enumerate(stages):
        working = forward_of_stage(architecture, layout, shape, stage=stage, memory=memory_of(family))
        parts = {WEIGHTS: count * static_parts(parameters, rank, layout)[WEIGHTS], WORKING: working}
        if question.device.kind == "cuda":
            parts[CONTEXT] = CONTEXT_BYTES
        found.append({"parts": parts, "host": {}})
    return _as_estimates(found, layout, who="ref")


def _critic_memory(
    question: MemoryQuestion, family: ModelFamily, architecture: Architecture, layout: Layout
) -> list[MemoryEstimate]:
    """Return what ranks take that have the critic alone: a policy without logits, which sends nothing and gives no memory up."""
    shape, rank = _micro_batch(question, layout), _rank_settings(question, layout.ranks)
    headed = dataclasses.replace(  # a column of logits
        architecture, vocab_size=layout.tensor, vocab_padding=0, tie_word_embeddings=False
    )
    found: list[dict[str, Any]] = []
    for stage, parameters in enumerate(_critics(family, architecture, layout)):
        own = activations_of_stage(
            headed,
            layout,
            dataclasses.replace(shape, with_entropy=False, with_logits=False),
            stage=stage,
            in_flight=in_flight(layout, stage),
            memory=memory_of(family),
        )
        parts = {**static_parts(parameters, rank, layout), ACTIVATIONS: own.kept, WORKING: own.working}
        if question.device.kind == "cuda":
            parts[CONTEXT] = CONTEXT_BYTES
        saves_copy = question.settings.checkpoint.async_save
        host = {"copy for saving": parts[WEIGHTS] + parts[OPTIMIZER]} if saves_copy else {}
        found.append({"parts": parts, "host": host})
    return _as_estimates(found, layout, who="critic")


def _as_estimates(
    found: Sequence[Mapping[str, Any]], layout: Layout, *, who: str = "trainer"
) -> list[MemoryEstimate]:
    """Return an estimate for each run of stages that take the same."""
    each = layout.ranks // layout.pipeline
    estimates: list[MemoryEstimate] = []
    for stage, values in enumerate(found):
        if estimates and estimates[-1].parts == values["parts"] and estimates[-1].host == values["host"]:
            last = estimates[-1]
            first = stage - last.ranks // each
            several = f"{who}, pipeline stages {first} to {stage}"
            estimates[-1] = dataclasses.replace(last, who=several, ranks=last.ranks + each)
            continue
        one = f"{who}, pipeline stage {stage}" if layout.pipeline > 1 else who
        stays = (CONTEXT,) if CONTEXT in values["parts"] else (WEIGHTS, GRADIENTS, OPTIMIZER)
        passing = (ACTIVATIONS, WORKING)
        estimates.append(
            MemoryEstimate(who=one, ranks=each, stays=stays, updated=(WEIGHTS,), passing=passing, **values)
        )
    return estimates


def _rank_settings(question: MemoryQuestion, n_ranks: int) -> RankSettings:
    section = question.section(MegatronSection)
    return RankSettings(
        dtype_bytes=4 if compute_dtype(question.settings.train) == "float32" else 2,
        optimizer=section.optimizer,
        has_momentum=section.sgd_momentum > 0,
        shared_optimizer=shares_optimizer(section, n_ranks),
    )


def _micro_batch(question: MemoryQuestion, layout: Layout) -> MicroBatchShape:
    settings, section = question.settings, question.section(MegatronSection)
    dtype_bytes = _rank_settings(question, layout.ranks).dtype_bytes
    samples = batch_sizes(settings).global_batch_size
    needs = algorithm(settings, question.registry).needs
    rounds = question.device.kind == "cpu" and dtype_bytes < _FLOAT32
    return MicroBatchShape(
        tokens=micro_batch_tokens(
            max_tokens_per_gpu=settings.train.max_tokens_per_gpu,
            longest_sample=question.longest_sample,
            samples_per_rank=-(-samples // layout.data),
            layout=layout,
        ),
        dtype_bytes=dtype_bytes,
        device=question.device.kind,
        attends_in_float32=rounds and _attends_in_float32(question),
        multiplies_in_float32=rounds and _multiplies_in_float32(),
        recompute=section.recompute_granularity,
        recompute_method=section.megatron_args.get("recompute_method", "uniform"),
        recomputed_layers=_recomputed_layers(section),
        logits_tokens=section.log_probs_chunk_size,
        with_entropy="entropy" in needs,
        with_logits=not LOGITS.isdisjoint(needs),
    )


def _recomputed_layers(section: MegatronSection) -> int:
    """Return `--recompute-num-layers`; 1, its default, also where it is no such number, which Megatron's parser tells."""
    given = str(section.megatron_args.get("recompute_num_layers", 1))
    return max(1, int(given)) if given.isdecimal() else 1


def _attends_in_float32(question: MemoryQuestion) -> bool:
    from slime_models.cpu import attends_in_bfloat16  # imports torch

    return question.longest_sample < _FLOAT32_BELOW or not attends_in_bfloat16()


def _multiplies_in_float32() -> bool:
    from slime_models.cpu import multiplies_bfloat16  # imports torch

    return not multiplies_bfloat16()


def _critics(family: ModelFamily, architecture: Architecture, layout: Layout) -> list[Parameters]:
    """Return the counts of a critic, which is a policy without an output layer, all of it trained."""
    trunk = dataclasses.replace(architecture, tie_word_embeddings=True)
    counts = parameters_of_stages(family, trunk, MegatronSection(), LoraSection(), layout)
    if layout.pipeline > 1:  # its last stage reads no embedding
        own = architecture.padded_vocab_size // layout.tensor * architecture.hidden_size
        counts[-1].shared -= own
        counts[-1].trained -= own
    return counts


def _sync_bytes(
    section: MegatronSection, rank: RankSettings, architecture: Architecture, layout: Layout
) -> int:
    """Return what a weight sync works with: a bucket, and the largest tensor, gathered whole. No activations are there then.

    A rank that has the whole model sends its own memory, and gathers nothing.
    """
    if layout.tensor == layout.pipeline == layout.experts == 1:
        return 0
    largest = architecture.padded_vocab_size * architecture.hidden_size * rank.dtype_bytes
    mlp = 3 * architecture.hidden_size * architecture.ffn_hidden_size
    whole = largest + architecture.num_layers * rank.dtype_bytes * (architecture.attention_size + mlp)
    return min(section.update_weight_buffer_size, whole) + largest


def _host(
    question: MemoryQuestion,
    parameters: Parameters,
    parts: Mapping[str, int],
    rank: RankSettings,
    frozen: Sequence[Frozen],
) -> dict[str, int]:
    """Return what a rank has in the host's memory: weights of other roles, `frozen` among them, and copies of its state."""
    settings, roles = question.settings, question.section(RolesSection)
    weights = parts[WEIGHTS]
    snapshot = parameters.all_trained * rank.dtype_bytes + parameters.buffers * _FLOAT32
    found = {}
    if "ref" in frozen:
        found["reference"] = snapshot if roles.ref_load is None else weights
    if "teacher" in frozen:
        found["teacher"] = weights
    if roles.keep_old_actor:
        found["earlier policies"] = 2 * snapshot
    if settings.checkpoint.async_save:
        n_roles = 2 * roles.keep_old_actor + ("ref" in frozen and roles.ref_update_interval is not None)
        found["copy for saving"] = weights + parts[OPTIMIZER] + n_roles * snapshot
    if settings.cluster.offloads_train and question.device.kind == "cuda":
        found["offloaded optimizer"] = parts[OPTIMIZER]
        if settings.cluster.offloads_rollout:
            found["offloaded weights"] = weights
    return found
