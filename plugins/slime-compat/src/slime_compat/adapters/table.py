"""The functions that the reference system lets a user bring: the flag of each, how it is called there, and its adapter here.

`slime_core.plugins.registry` asks `adapter_of` for each function that is chosen by `module:attribute` or `module.attribute`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.plugins.adapter import Adapter

from slime_compat.adapters.attributes import is_foreign, settings_read
from slime_compat.views.running.namespace import sources_of

#: Package with the reference system's import names, which slime-compat brings.
THEIR_PACKAGE = "slime"


@dataclass(frozen=True)
class Form:
    """How the reference system calls a function."""

    flag: str
    """Of the reference system; ours is the same."""
    by_position: tuple[str, ...]
    """What it passes by position."""
    by_name: tuple[str, ...] = ()
    """What it passes by name."""
    adapter: str = ""
    """Class that calls it, `module:attribute`."""
    ours: tuple[int, ...] = ()
    """Numbers of positional arguments with which ours of the kind is called; equal numbers need another sign."""
    is_class: bool = False
    """Whether it is a class, and the arguments are those that it is built with."""
    returns: str = ""
    """What it returns."""

    def __str__(self) -> str:
        """Write it as a signature."""
        words = [*self.by_position, *(["*", *self.by_name] if self.by_name else [])]
        return f"({', '.join(words)})" + (f" -> {self.returns}" if self.returns else "")


_ADAPTERS = "slime_compat.adapters."
_GROUPS = _ADAPTERS + "groups:"
_TRAINING = _ADAPTERS + "training:"
_MEGATRON = _ADAPTERS + "megatron:"

#: (Group of ours, flag where a group's flags call otherwise) -> form there.
FORMS: dict[tuple[str, str | None], Form] = {
    ("slime.rollouts", None): Form(
        "--rollout-function-path",
        ("args", "rollout_id", "data_source"),
        ("evaluation",),
        _ADAPTERS + "rollout:ReferenceRollout",
        ours=(2,),
        returns="RolloutFnTrainOutput | list[list[Sample]]",
    ),
    ("slime.eval_functions", None): Form(
        "--eval-function-path",
        ("args", "rollout_id", "data_source"),
        ("evaluation",),
        _ADAPTERS + "rollout:ReferenceEvaluation",
        ours=(3,),
        returns="RolloutFnEvalOutput | dict",
    ),
    ("slime.generators", None): Form(
        "--custom-generate-function-path",
        ("args", "sample", "sampling_params"),
        (),
        _ADAPTERS + "generate:ReferenceGenerate",
        ours=(3,),
        returns="Sample | list[Sample]",
    ),
    ("slime.rewards", None): Form(
        "--custom-rm-path",
        ("args", "sample"),
        (),
        _ADAPTERS + "rewards:ReferenceReward",
        ours=(1,),
        returns="float | dict",
    ),
    ("slime.group_rewards", None): Form(
        "--custom-rm-path",
        ("args", "samples"),
        (),
        _ADAPTERS + "rewards:ReferenceGroupReward",
        ours=(1,),
        returns="list",
    ),
    ("slime.filters", None): Form(
        "--dynamic-sampling-filter-path",
        ("args", "group"),
        (),
        _GROUPS + "ReferenceFilter",
        ours=(1,),
        returns="DynamicFilterOutput | bool",
    ),
    ("slime.rollout_hooks", "--buffer-filter-path"): Form(
        "--buffer-filter-path",
        ("args", "rollout_id", "buffer", "num_samples"),
        (),
        _GROUPS + "BufferFilter",
        returns="list[list[Sample]]",
    ),
    ("slime.rollout_hooks", "--rollout-sample-hook-path"): Form(
        "--rollout-sample-hook-path",
        ("args", "sample"),
        ("rollout_id", "evaluation"),
        _GROUPS + "SampleHook",
        returns="Sample | None",
    ),
    ("slime.rollout_hooks", "--rollout-sample-filter-path"): Form(
        "--rollout-sample-filter-path", ("args", "groups"), (), _GROUPS + "SampleFilter", returns="None"
    ),
    ("slime.rollout_hooks", "--rollout-all-samples-process-path"): Form(
        "--rollout-all-samples-process-path",
        ("args", "all_groups", "get_samples"),
        (),
        _GROUPS + "AllSamples",
        returns="None",
    ),
    ("slime.rollout_hooks", "--custom-convert-samples-to-train-data-path"): Form(
        "--custom-convert-samples-to-train-data-path",
        ("args", "samples"),
        (),
        _GROUPS + "Conversion",
        returns="dict[str, list]",
    ),
    ("slime.rollout_hooks", "--custom-rollout-log-function-path"): Form(
        "--custom-rollout-log-function-path",
        ("rollout_id", "args", "samples", "extra_metrics", "rollout_time"),
        (),
        _GROUPS + "RolloutLog",
        returns="bool",
    ),
    ("slime.rollout_hooks", "--custom-eval-rollout-log-function-path"): Form(
        "--custom-eval-rollout-log-function-path",
        ("rollout_id", "args", "data", "extra_metrics"),
        (),
        _GROUPS + "EvaluationLog",
        returns="bool",
    ),
    ("slime.reward_transforms", None): Form(
        "--custom-reward-post-process-path",
        ("args", "samples"),
        (),
        _ADAPTERS + "rewards:ReferencePostProcess",
        ours=(2,),
        returns="(raw_rewards, rewards)",
    ),
    ("slime.advantages", None): Form(
        "--custom-advantage-function-path",
        ("args", "rollout_data"),
        (),
        _TRAINING + "ReferenceAdvantages",
        ours=(1,),
        returns="None",
    ),
    ("slime.losses", None): Form(
        "--custom-loss-function-path",
        ("args", "batch", "logits", "sum_of_sample_mean"),
        (),
        _TRAINING + "ReferenceLoss",
        ours=(2,),
        returns="(loss, dict)",
    ),
    ("slime.corrections", None): Form(
        "--custom-tis-function-path",
        (),
        (
            "args",
            "pg_loss",
            "train_log_probs",
            "rollout_log_probs",
            "loss_masks",
            "total_lengths",
            "response_lengths",
        ),
        _TRAINING + "ReferenceCorrection",
        ours=(1,),
        returns="(pg_loss, masks, metrics)",
    ),
    ("slime.reducers", None): Form(
        "--custom-pg-loss-reducer-function-path",
        ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
        (),
        _TRAINING + "ReferenceReducer",
        ours=(1,),
        returns="Callable",
    ),
    ("slime.sources", None): Form(
        "--data-source-path", ("args",), (), _ADAPTERS + "source:ReferenceSource", ours=(1,), is_class=True
    ),
    ("slime.megatron_hooks", "--custom-model-provider-path"): Form(
        "--custom-model-provider-path",
        ("pre_process", "post_process"),
        ("vp_stage",),
        _MEGATRON + "ModelProvider",
        ours=(2,),
        returns="GPTModel",
    ),
    ("slime.megatron_hooks", "--custom-megatron-init-path"): Form(
        "--custom-megatron-init-path", ("args",), (), _MEGATRON + "Init", ours=(1,), returns="None"
    ),
    ("slime.megatron_hooks", "--custom-megatron-before-log-prob-hook-path"): Form(
        "--custom-megatron-before-log-prob-hook-path",
        ("args", "model", "store_prefix"),
        (),
        _MEGATRON + "BeforeLogProb",
        ours=(2,),
        returns="None",
    ),
    ("slime.megatron_hooks", "--custom-megatron-before-train-step-hook-path"): Form(
        "--custom-megatron-before-train-step-hook-path",
        ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
        (),
        _MEGATRON + "BeforeTrainStep",
        ours=(5,),
        returns="None",
    ),
    ("slime.megatron_hooks", "--rollout-data-postprocess-path"): Form(
        "--rollout-data-postprocess-path",
        ("args", "rollout_id", "rollout_data"),
        (),
        _MEGATRON + "RolloutData",
        returns="None",
    ),
    ("slime.megatron_hooks", "--custom-update-weight-post-write-path"): Form(
        "--custom-update-weight-post-write-path",
        ("args", "version_dir", "rollout_engines"),
        (),
        _MEGATRON + "PostWrite",
        returns="None",
    ),
}


#: Groups whose functions find settings in `args` alone; those of training find columns, too, that other settings ask for.
_OF_ARGS_ALONE = ("slime.filters", "slime.group_rewards", "slime.reward_transforms", "slime.rewards")


def adapter_of(group: str, flag: str | None, reference: str, value: Any) -> Adapter | None:
    """Return the adapter of a function that was written for the reference system; None for one of ours.

    Args:
        group: that it was chosen from.
        flag: that chose it.
        reference: `module:attribute`.
        value: the function or class.
    """
    form = FORMS.get((group, flag)) or FORMS.get((group, None))
    if form is None or not is_theirs(form, value):
        return None
    words = settings_read(value) if group in _OF_ARGS_ALONE else None
    reads = None if words is None else words | sources_of(words)
    return Adapter(reference=_class_of(form, value), options={"path": reference}, reads=reads)


def is_theirs(form: Form, value: Any) -> bool:
    """Return whether a function was written for the reference system.

    It was where its first parameter is called `args`, as in all of that system's documents, or in a log function the second;
    where it takes as many arguments as that passes, and ours of the kind takes others; or where its parameters by name are
    those that it is called with there. A class is where it is built with `args`. Where both systems call a function alike, it is
    theirs if it has no options and its file says so: it imports `slime`, reads a setting from `args` itself, or uses what samples
    have there alone.
    """
    if not callable(value) or inspect.isclass(value) != form.is_class:
        return False
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):  # what is written in C may not say
        return False
    names = [one.name for one in parameters]
    if not form.ours:
        options = [
            one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name not in form.by_name
        ]
        return not options and is_foreign(value, THEIR_PACKAGE)
    if "args" in form.by_position:
        place = form.by_position.index("args")
        if (
            len(names) > place
            and names[place] == "args"
            and parameters[place].kind is not parameters[place].VAR_POSITIONAL
        ):
            return True
        if form.is_class:
            return False
    if set(form.by_name) & set(names) and form.ours:
        return True
    return (
        bool(form.ours)
        and _takes(value, len(form.by_position))
        and not any(_takes(value, n) for n in form.ours)
    )


def _takes(function: Callable[..., Any], n: int) -> bool:
    """Return whether a function can be called with `n` arguments by position."""
    try:
        inspect.signature(function).bind(*range(n))
    except TypeError:
        return False
    return True


def fit(form: Form, function: Callable[..., Any]) -> str | None:
    """Return why a function cannot be called as the reference system calls it; None where it can."""
    signature = inspect.signature(function)
    named = {name: None for name in form.by_name if name not in OPTIONAL}
    try:
        signature.bind(*form.by_position, **named)
    except TypeError as error:
        return f"the signature {signature} ({error})"
    return None


#: What is passed by name only to a function that takes it.
OPTIONAL = ("evaluation", "vp_stage")


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function takes an argument by name."""
    parameters = inspect.signature(function).parameters.values()
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)


def _class_of(form: Form, value: Any) -> str:
    """Return the adapter: of rewards the one that runs in a worker or on the event loop, as the function is."""
    if form.flag == "--custom-rm-path" and not inspect.iscoroutinefunction(value):
        return f"{form.adapter}Sync"
    return form.adapter


def forms() -> Sequence[Form]:
    """Return the forms, by flag, each once."""
    return list({form.flag: form for form in FORMS.values()}.values())
