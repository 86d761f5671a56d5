"""Checks of the trainer's settings against each other. Imports neither torch nor megatron."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.config.derive import FULLY_ASYNC, num_ranks, pool_setting
from slime_core.config.sections import RolloutSection, RunSection, TrainSection
from slime_core.errors import Problem, TrainerError
from slime_core.plugins.own_name import means
from slime_core.protocols import Role, needs_of

from slime_megatron.settings import megatron_flags
from slime_megatron.settings.derive import LOGITS, frozen_models, offloads_optimizer
from slime_megatron.settings.expert_checks import expert_problems
from slime_megatron.settings.parallel_checks import process_problems
from slime_megatron.settings.section import MegatronSection
from slime_megatron.settings.section_roles import LoraSection, RolesSection
from slime_megatron.settings.trained_names import trains_alike_in_stages

if TYPE_CHECKING:
    from slime_core.config.settings import Settings
    from slime_core.run.assemble import Algorithm
    from slime_models.family.architecture import Architecture
    from slime_models.family.family import ModelFamily

#: Optional fields of `TokenView` that a critic fills where it is in processes of its own.
_KNOWN_TO_CRITIC = frozenset(
    {"new_values", "rollout_log_probs", "staleness", "teacher_log_probs", "total_lengths", "values"}
)


def section_problems(
    run: RunSection, train: TrainSection, section: MegatronSection, roles: RolesSection, lora: LoraSection
) -> Iterator[Problem]:
    """Yield what the trainer cannot do under these settings, whatever the model and the number of processes."""
    yield from _schedule_problems(run, train)
    yield from _critic_problems(run, roles)
    yield from _freezing_problems(section, lora)
    yield from _bias_problems(section, lora)
    yield from _mtp_problems(section, lora)
    yield from megatron_flags.problems(section.megatron_args)
    yield from _engine_problems(section, lora)
    yield from _offload_problems(train, section)
    yield from expert_problems(roles, section, lora)


def pool_problems(section: MegatronSection, settings: Settings) -> Iterator[Problem]:
    """Yield each product of sizes that divides the number of the policy's ranks, and not that of another role's own."""
    if any(process_problems(section, num_ranks(settings))):
        return
    for role in settings.cluster.pools:
        count = num_ranks(settings, role)
        for problem in process_problems(section, count):
            yield Problem(
                pool_setting(role),
                f"{count} ranks of the {role}, and {problem.where} {problem.found.partition(' and ')[0]}",
                f"a multiple of that: the {role} is cut as the policy is",
            )


def changing_ref_problems(pools: Collection[Role], roles: RolesSection) -> Iterator[Problem]:
    """Yield that a reference is to become the policy, whose weights are in other processes."""
    if "ref" in pools and roles.ref_update_interval is not None:
        yield Problem(
            "roles.ref_update_interval",
            f"{roles.ref_update_interval}, beside a reference in ranks of its own",
            "a frozen reference: those ranks get no weights of the policy",
            "leave --ref-num-nodes and --ref-num-gpus-per-node out, or this",
        )


def unread_ref_problems(algorithm: Algorithm, *, has_teacher: bool) -> Iterator[Problem]:
    """Yield that estimator and loss read nothing of the models that are to have processes of their own."""
    if not frozen_models(algorithm.needs, has_teacher=has_teacher):
        yield Problem(
            pool_setting("ref"),
            "them with an estimator and a loss that read log-probs of no reference, and of no teacher that has a folder",
            "something for these ranks to compute",
            "give --use-kl-loss or --kl-coef, or --use-opd and --opd-teacher-load, or leave them out",
        )


def apart_problems(algorithm: Algorithm, estimator: str) -> Iterator[Problem]:
    """Yield why a critic cannot be in processes of its own under an estimator and the critic's loss."""
    if algorithm.value_loss is None:
        yield Problem(
            pool_setting("critic"),
            f"them with the estimator {estimator!r}, which reads no values",
            "an estimator with a critic",
            "give --advantage-estimator ppo, or leave them out",
        )
        return
    read = needs_of(algorithm.value_loss, getattr(algorithm.value_loss, "keywords", {}))
    if beyond := sorted(read - _KNOWN_TO_CRITIC):
        yield Problem(
            "algorithm.value_loss_type",
            f"a loss that reads {', '.join(beyond)}, beside a critic in processes of its own",
            f"one that reads no more than {', '.join(sorted(_KNOWN_TO_CRITIC))}",
            "leave --critic-num-nodes and --critic-num-gpus-per-node out",
        )


def old_actor_problems(
    run: RunSection, train: TrainSection, rollout: RolloutSection, roles: RolesSection
) -> Iterator[Problem]:
    """Yield that a step may train on tokens of older weights than those of the last two syncs, which `keep_old_actor` holds.

    Step s trains version s - 1. Any version may have been sent, whatever the interval: before an evaluation, when a run goes on, and to
    servers that came back. So the last two are sure to hold what was sent of s - 2 and s - 1, and nothing older.
    """
    never_stops = means(run.loop, FULLY_ASYNC)
    goes_on = rollout.partial_rollout and not rollout.mask_offpolicy_in_partial_rollout
    bound = 1 if never_stops and rollout.max_staleness is None else rollout.max_staleness
    if roles.keep_old_actor and (never_stops or goes_on) and (bound is None or bound > 1):
        beside = f"the loop {run.loop}" if never_stops else "rollout.partial_rollout"
        yield Problem(
            "roles.keep_old_actor",
            f"it with {beside}, weights sent every {train.update_weights_interval} steps and rollout.max_staleness "
            f"{'not given' if bound is None else bound}",
            "a max_staleness of at most 1, and with it an interval of at most 2: it holds the weights of the last two syncs, whatever they "
            "were for",
            "give --max-staleness 1, or take the engine's log-probs in its place: --use-rollout-logprobs",
        )


def unread_old_actor_problems(
    train: TrainSection, roles: RolesSection, needs: Collection[str]
) -> Iterator[Problem]:
    """Yield that nothing reads what the weights of earlier syncs compute: the engine's log-probs are the old ones.

    Args:
        train: of the run.
        roles: of the run.
        needs: optional fields of `TokenView` that estimator and loss read.
    """
    if roles.keep_old_actor and train.use_rollout_logprobs and "sum_pi_squared" not in needs:
        yield Problem(
            "roles.keep_old_actor",
            "it with train.use_rollout_logprobs, by which old log-probs are the engine's",
            "one of them",
        )


def logits_problems(section: MegatronSection, needs: Collection[str]) -> Iterator[Problem]:
    """Yield that a loss reads logits, of which context-parallel ranks each have some.

    Args:
        section: how the model is parallelised.
        needs: optional fields of `TokenView` that estimator and loss read.
    """
    if section.context_parallel_size > 1 and LOGITS & set(needs):
        yield Problem(
            "megatron.context_parallel_size",
            f"{section.context_parallel_size} with a loss that reads logits",
            "1: logits of all its ranks together would take the memory that they are to save",
            "use --tensor-model-parallel-size, or a loss of log-probs",
        )


def missing_mtp(folder: Path, family: ModelFamily, architecture: Architecture) -> Iterator[Problem]:
    """Yield that a folder, where it is one of Hugging Face, lacks the weights of MTP layers of which the model's config.json tells."""
    from slime_models.hf.config import has_weights
    from slime_models.quantization.reading import open_weights  # imports torch

    if has_weights(folder) and not family.has_mtp(open_weights(folder), architecture):
        yield Problem(
            "megatron.enable_mtp_training",
            f"it with num_nextn_predict_layers {architecture.mtp_num_layers} in config.json, and the weights of {folder}, which "
            "lack them",
            "all tensors of these layers, which transformers drops when it saves a model",
            "take the original folder, or drop the flag",
        )


def unread_start_problems(settings: Settings) -> Iterator[Problem]:
    """Yield that a recipe names weights to start from which no other trainer reads; of flags core tells."""
    start, origin = settings.section(RolesSection).actor_load, settings.origin("roles", "actor_load")
    if start is not None and settings.checkpoint.load is None and not origin.startswith("--"):
        name = settings.train.train_backend
        yield Problem(
            "roles.actor_load",
            f"{start} with the trainer {name}, which does not read it: the weights would be those of model.hf_checkpoint",
            "the trainer megatron, or nothing",
            "give --actor-load none, and the folder to --hf-checkpoint",
        )


def adapter_problems(
    save_hf: str | None,
    actor_load: str | None,
    lora: LoraSection,
    family: ModelFamily,
    architecture: Architecture,
) -> Iterator[Problem]:
    """Yield that adapters are to be written of matrices that folders hold of all experts as one, or of a base that PEFT cannot read."""
    if save_hf is None or lora.rank is None:
        return
    folder = None if actor_load is None else Path(actor_load)
    if folder is not None and folder.is_dir() and not (folder / "config.json").is_file():
        yield Problem(
            "checkpoint.save_hf",
            f"it beside lora.rank, and roles.actor_load {folder}, which is no folder of Hugging Face",
            "adapters of a model that PEFT can load",
            "make one of it by `slime convert to-hf`, and give that to --actor-load",
        )
    stacked = {
        name.split(".")[-2] for name, weight in family.weights(architecture).items() if weight.rule.stacked
    }
    if found := sorted(layer for layer in stacked if lora.targets(layer)):
        yield Problem(
            "checkpoint.save_hf",
            f"it beside lora.target_modules {', '.join(found)}",
            f"other layers for a {family.model_type} model: folders of adapters have no place for one of each expert where "
            "the model's folder has one tensor of all experts",
            "leave them out of lora.target_modules, or leave save_hf out and merge a checkpoint by `slime convert to-hf`",
        )


def _engine_problems(section: MegatronSection, lora: LoraSection) -> Iterator[Problem]:
    """Yield what is wrong about TransformerEngine."""
    flags, name = section.megatron_args, "megatron.megatron_args.transformer_impl"
    kind = flags.get("transformer_impl", "local")
    if kind not in ("local", "transformer_engine"):
        yield Problem(name, str(kind), "local or transformer_engine: others are not for training")
    if kind == "transformer_engine" and lora.rank is not None:
        yield Problem(
            name, "it beside lora.rank", "one of them: adapters stand beside Megatron's own linear layers"
        )
    for flag in ("fp8_format", "fp4_format"):
        if flag in flags and kind != "transformer_engine":
            yield Problem(
                f"megatron.megatron_args.{flag}",
                f"{flags[flag]} with transformer_impl {kind}",
                "transformer_impl transformer_engine: Megatron's own linear layers would not follow it",
            )


def _offload_problems(train: TrainSection, section: MegatronSection) -> Iterator[Problem]:
    """Yield why the optimizer cannot be on the host."""
    if not offloads_optimizer(section):
        return
    where = "megatron.megatron_args.optimizer_cpu_offload"
    for found, bad, wanted in (
        (f"it with optimizer {section.optimizer}", section.optimizer != "adam", "optimizer adam"),
        (
            "it with another dtype",
            train.fp16 or not train.bf16,
            "bfloat16, whose master weights are on the host, too",
        ),
        (
            "it with use_distributed_optimizer off",
            section.use_distributed_optimizer is False,
            "use_distributed_optimizer on, or not given: Megatron's other optimizers cannot read such a state",
        ),
    ):
        if bad:
            yield Problem(where, found, wanted)


def _bias_problems(section: MegatronSection, lora: LoraSection) -> Iterator[Problem]:
    if lora.rank is not None and section.megatron_args.get("moe_router_enable_expert_bias"):
        yield Problem(
            "megatron.megatron_args.moe_router_enable_expert_bias",
            "it beside lora.rank",
            "one of them: a folder of adapters has no place for a bias that moved",
        )


def _mtp_problems(section: MegatronSection, lora: LoraSection) -> Iterator[Problem]:
    if lora.rank is not None and section.enable_mtp_training:
        yield Problem(
            "megatron.enable_mtp_training",
            "it beside lora.rank",
            "one of them: an adapter folder cannot hold multi-token prediction (MTP) layers",
        )


def frozen_layer_problems(section: MegatronSection, names: Collection[str]) -> Iterator[Problem]:
    """Refuse pipeline stages of which some train what others do not: the steps of their optimizers would not be resumed exactly.

    Args:
        section: of the trainer.
        names: of the whole model's parameters.
    """
    only, frozen = section.only_train_params_name_list, section.freeze_params_name_list
    if section.pipeline_model_parallel_size == 1:
        return
    try:
        train_alike = trains_alike_in_stages(names, only_train=only, frozen=frozen)
    except TrainerError:
        return  # a pattern matches nothing, which is told when the model is built
    if not train_alike:
        yield Problem(
            "megatron.pipeline_model_parallel_size",
            f"{section.pipeline_model_parallel_size} where all layers are frozen, or some and others not",
            "1, or patterns that leave the same parameters of all layers to train",
            "checkpoints of such stages would not go on exactly",
        )


def _freezing_problems(section: MegatronSection, lora: LoraSection) -> Iterator[Problem]:
    only, frozen = section.only_train_params_name_list, section.freeze_params_name_list
    if only and frozen:
        yield Problem(
            "megatron.only_train_params_name_list", "it beside freeze_params_name_list", "one of them"
        )
    if lora.rank is not None and (only or frozen):
        yield Problem(
            "lora.rank", "it beside a list of frozen parameters", "one of them: LoRA freezes all others"
        )


def _schedule_problems(run: RunSection, train: TrainSection) -> Iterator[Problem]:
    if train.min_lr > train.lr:
        yield Problem("train.min_lr", f"{train.min_lr:g}", f"at most train.lr, {train.lr:g}")
    if train.lr_decay_style == "constant":
        return
    if train.lr_decay_iters is None and run.num_rollout is None:
        yield Problem(
            "train.lr_decay_iters",
            f"nothing, with lr_decay_style {train.lr_decay_style} and no run.num_rollout",
            "the optimizer steps of the decay",
            "set it, or run.num_rollout",
        )
    elif train.lr_decay_iters is not None and train.lr_decay_iters <= train.lr_warmup_iters:
        yield Problem(
            "train.lr_decay_iters",
            str(train.lr_decay_iters),
            f"more than lr_warmup_iters, {train.lr_warmup_iters}",
        )


def _critic_problems(run: RunSection, roles: RolesSection) -> Iterator[Problem]:
    if run.num_rollout is not None and roles.num_critic_only_steps >= run.num_rollout:
        yield Problem(
            "roles.num_critic_only_steps",
            str(roles.num_critic_only_steps),
            f"less than run.num_rollout, {run.num_rollout}",
            "else the policy is never trained",
        )
