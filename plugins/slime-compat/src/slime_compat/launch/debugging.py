"""The reference's flags for debugging one half of a run without the other."""

from __future__ import annotations

from slime_compat.launch.made import Made

#: The reference's rollout of supervised data, which asks no engine.
_SUPERVISED = "slime.rollout.sft_rollout.generate_rollout"
#: Flags that have no meaning without a trainer, and without an engine.
_OF_TRAINER = ("save_interval", "save_hf", "async_save", "no_save_optim", "ref_load", "load")
_OF_PLACEMENT = ("actor_num_nodes", "actor_num_gpus_per_node", "critic_num_nodes", "critic_num_gpus_per_node",
                 "num_gpus_per_node")  # fmt: skip
_OF_ENGINE = ("eval_interval", "eval_prompt_data", "eval_config", "dynamic_sampling_filter_path", "over_sampling_batch_size",
              "partial_rollout", "use_fault_tolerance", "prefill_num_servers", "sglang_config", "rollout_num_gpus",
              "rollout_num_gpus_per_engine", "colocate", "offload", "offload_rollout", "offload_train")  # fmt: skip


def debugging(made: Made) -> None:
    """Leave one half of the run out, and have samples written or read."""
    script = made.script
    details = script.take("dump_details")
    if details and not script.has("save_debug_rollout_data"):
        script.flags["save_debug_rollout_data"] = [f"{details[0]}/rollout_data/{{rollout_id}}.pt"]
        made.note("dump_details", f"--save-debug-rollout-data {details[0]}/rollout_data/{{rollout_id}}.pt")
    if (path := script.take("save_debug_rollout_data")) is not None:
        if len(path) != 1 or "{rollout_id}" not in path[0]:
            made.refuse(
                "save_debug_rollout_data", " ".join(path) or "nothing", "a file with {rollout_id} in its name"
            )
        else:
            made.put("compat", "save_debug_rollout_data", path[0])
    only_rollout = script.take("debug_rollout_only") is not None
    only_train, recorded = script.take("debug_train_only") is not None, script.take("load_debug_rollout_data")
    if only_rollout and (only_train or recorded is not None):
        made.refuse(
            "debug_rollout_only",
            "it beside --debug-train-only or --load-debug-rollout-data",
            "one half of the run",
        )
    elif only_rollout:
        _rollout_only(made)
    elif recorded is not None:
        _train_only(made, recorded)
    elif only_train and (script.value("rollout_function_path") or "").replace(":", ".") == _SUPERVISED:
        _without_engine(made)
        made.put("run", "loop", "sync")
        made.put("rollout", "rollout_max_response_len", 1)
        made.note("debug_train_only", "the engine none: samples are the data's own answers")
    elif only_train:
        made.refuse("debug_train_only", "it without --load-debug-rollout-data", "samples to train on")


def _rollout_only(made: Made) -> None:
    script = made.script
    dropped = [name for name in _OF_TRAINER if script.take(name) is not None]
    script.take("train_backend")
    if script.take("colocate") is not None:
        ranks = [script.value(name) for name in ("actor_num_nodes", "actor_num_gpus_per_node")]
        made.put("fleet", "rollout_num_gpus", int(ranks[0] or 1) * int(ranks[1] or 8))
    script.take("offload")
    for name in _OF_PLACEMENT:
        script.take(name)
    made.put("run", "loop", "rollout-only")
    made.put("run", "launcher", "local")
    made.put("train", "train_backend", "none")
    made.put("checkpoint", "save_last", False)
    for name in ("actor_num_nodes", "actor_num_gpus_per_node"):
        made.put("cluster", name, 1)
    made.put("cluster", "num_gpus_per_node", None)
    made.note("debug_rollout_only", "the loop rollout-only on this machine, with the trainer none")
    if dropped:
        made.note("debug_rollout_only", f"without a trainer nothing comes of {', '.join(dropped)}")


def _train_only(made: Made, recorded: list[str]) -> None:
    if len(recorded) != 1 or "{rollout_id" not in recorded[0]:
        made.refuse(
            "load_debug_rollout_data", " ".join(recorded) or "nothing", "a file with {rollout_id} in its name"
        )
        return
    is_dump = recorded[0].endswith(".pt")
    made.put("rollout", "rollout_function_path", "recorded-dump" if is_dump else "recorded")
    made.put("rollout", "rollout_function_args", {"samples": recorded[0]})
    _without_engine(made)
    made.note(
        "load_debug_rollout_data", f"each step trains on the samples of {recorded[0]}, with the engine none"
    )


def _without_engine(made: Made) -> None:
    """Leave the engine out, and what has no meaning without it."""
    script = made.script
    dropped = [name for name in _OF_ENGINE if script.take(name) is not None]
    dropped += [
        name for name in list(script.flags) if name.startswith("sglang_") and script.take(name) is not None
    ]
    made.put("rollout", "rollout_engine", "none")
    made.put("cluster", "colocate", False)
    if dropped:
        made.note("debug_train_only", f"without an engine nothing comes of {', '.join(dropped)}")
