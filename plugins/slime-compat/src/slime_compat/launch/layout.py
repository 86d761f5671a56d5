"""Flags of schedules and layouts: epochs and warm-up, parallelism that Megatron turns off, names that SGLang has given up."""

from __future__ import annotations

from slime_core.errors import DataError

from slime_compat.launch.made import Made


def schedule(made: Made) -> None:
    """Turn epochs into steps where the learning rate needs their number, and a share of warm-up into optimizer steps."""
    script = made.script
    share = script.take("lr_warmup_fraction")
    decays = script.value("lr_decay_style") != "constant"  # without it, `linear` is the reference's
    if not script.has("num_rollout") and script.has("num_epoch") and (decays or share is not None):
        made.put("train", "lr_decay_iters", 1)
        _epochs(made)
    if share is None:
        return
    decay = script.value("lr_decay_iters") or ""
    steps = int(decay) if decay.isdecimal() else _optimizer_steps(made)
    if steps is None and script.has("num_epoch"):
        return  # its data is not there, or less than a step: that is said of it
    if steps is None:
        made.refuse("lr_warmup_fraction", " ".join(share), "--num-rollout beside it, or --lr-warmup-iters")
        return
    try:
        iterations = int(float(share[0]) * steps)
    except (ValueError, IndexError):
        made.refuse("lr_warmup_fraction", " ".join(share), "a number from 0 to 1")
        return
    made.put("train", "lr_warmup_iters", iterations)
    made.note(
        "lr_warmup_fraction",
        f"--lr-warmup-iters {iterations}, of {steps} {'--lr-decay-iters' if decay else 'optimizer steps'}",
    )


def _epochs(made: Made) -> None:
    """Count the rows of the data: `--num-epoch` as a number of steps."""
    from slime_core.data.rows.open_rows import open_rows

    script = made.script
    path, size, epochs = (script.value(name) for name in ("prompt_data", "rollout_batch_size", "num_epoch"))
    if path is None or not (size or "").isdecimal() or not (epochs or "").isdecimal():
        return  # what is wrong with them is said of themselves
    try:
        steps = int(epochs or 0) * len(open_rows(path)) // int(size or 1)
    except (DataError, OSError):
        return
    if steps:
        script.take("num_epoch")
        del made.defaults["train"]["lr_decay_iters"]
        made.put("run", "num_rollout", steps)
        made.note("num_epoch", f"--num-rollout {steps}: {epochs} times the rows of {path}, {size} a step")


def _optimizer_steps(made: Made) -> int | None:
    """Return the optimizer steps of the run; None where the script does not say."""
    rollouts = made.script.value("num_rollout") or made.defaults["run"].get("num_rollout")
    sizes = [
        made.script.value(name) or default
        for name, default in (
            ("rollout_batch_size", ""),
            ("n_samples_per_prompt", "1"),
            ("global_batch_size", ""),
        )
    ]
    per_step = made.script.value("num_steps_per_rollout")
    try:
        if per_step is None and sizes[2]:
            per_step = str(max(1, int(sizes[0]) * int(sizes[1]) // int(sizes[2])))
        return int(rollouts or "") * int(per_step or 1)
    except ValueError:
        return None


def layout(made: Made) -> None:
    """Leave out what Megatron turns off by itself with one rank, and say how old samples of rarer updates may be."""
    script = made.script
    if (
        script.value("tensor_model_parallel_size") in (None, "1")
        and script.take("sequence_parallel") is not None
    ):
        made.note("sequence_parallel", "nothing with --tensor-model-parallel-size 1, as in Megatron")
    if script.value("context_parallel_size") in (None, "1") and script.take("allgather_cp") is not None:
        made.note("allgather_cp", "nothing with --context-parallel-size 1")
    interval = script.value("update_weights_interval") or "1"
    if interval.isdecimal() and int(interval) > 1 and not script.has("max_staleness"):
        made.put("rollout", "max_staleness", int(interval))
        made.note(
            "update_weights_interval", f"and --max-staleness {interval}: so old are samples before an update"
        )


def engines(made: Made) -> None:
    """Map flags that SGLang has had."""
    script = made.script
    if script.take("sglang_enable_ep_moe") is not None:
        size = script.value("rollout_num_gpus_per_engine") or "1"
        if not script.has("sglang_ep_size"):
            script.flags["sglang_ep_size"] = [size]
        made.note("sglang_enable_ep_moe", f"--sglang-ep-size {script.value('sglang_ep_size')}")
    if script.take("sglang_enable_deepep_moe") is not None:
        script.flags.setdefault("sglang_moe_a2a_backend", ["deepep"])
        made.note("sglang_enable_deepep_moe", "--sglang-moe-a2a-backend deepep")
