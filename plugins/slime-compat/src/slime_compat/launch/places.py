"""Flags that name folders: where the run is, where its weights begin, and where servers start from."""

from __future__ import annotations

from pathlib import Path

from slime_compat.launch.folders import at_iteration, config_of, kind_of, stand_in
from slime_compat.launch.made import Made
from slime_compat.launch.script import Script

#: Flags by which a run begins anew with the weights of another.
_WEIGHTS_ALONE = ("finetune", "no_load_optim")


def folders(made: Made) -> None:
    """Say where the run is, and where its weights begin."""
    script = made.script
    save, load = _path(script, "save"), _path(script, "load")
    step = script.value("ckpt_step")
    script.take("ckpt_step")
    _run_folder(made, save)
    reference = _weights(made, "ref_load", _path(script, "ref_load"), script.value("ref_ckpt_step"))
    script.take("ref_ckpt_step")
    teacher = _weights(
        made, "opd_teacher_load", _path(script, "opd_teacher_load"), script.value("opd_teacher_ckpt_step")
    )
    script.take("opd_teacher_ckpt_step")
    for key, path in (("ref_load", reference), ("opd_teacher_load", teacher)):
        if path is not None:
            made.put("roles", key, str(path))
    start = None if load is None else _start(made, load, step, save)
    if start is None and reference is not None:
        start = reference
    if start is not None and start.resolve() != Path(script.value("hf_checkpoint") or "").resolve():
        made.put("roles", "actor_load", str(start))


def _run_folder(made: Made, save: Path | None) -> None:
    model = Path(made.script.value("hf_checkpoint") or "run").name
    if save is None:
        made.put("run", "run_name", made.script.value("wandb_group") or model or "run")
        made.put("checkpoint", "save_last", False)
        if made.script.take("save_interval") is not None:
            made.note("save_interval", "nothing without --save, as in the reference")
        return
    made.put("run", "output_dir", str(save.parent))
    made.put("run", "run_name", save.name)
    made.note("save", f"the run's folder {save}: the same command again goes on from its newest checkpoint")


def _start(made: Made, load: Path, step: str | None, save: Path | None) -> Path | None:
    """Return the folder of weights that `--load` means; None where there are none, or the run goes on by itself."""
    kind = kind_of(at_iteration(load, step) if step is not None else load)
    if step is not None and kind == "nothing" and (whole := kind_of(load)) != "nothing":
        made.refuse(
            "ckpt_step", f"{step}, which is no iteration in {load}",
            f"one of its checkpoints by name, --load {load}/checkpoints/step_..., and a --save of its own" if whole == "run"
            else "an iteration that is there",
        )  # fmt: skip
        return None
    if kind == "run":
        anew = [flag for flag in _WEIGHTS_ALONE if made.script.has(flag)]
        if load != save and anew:
            names = " and ".join(f"--{flag.replace('_', '-')}" for flag in anew)
            made.note("load", f"{load}, a run of slime: by {names} only the weights of its newest checkpoint")
            return load if (load / "checkpoints").is_dir() else load.parent
        if load != save:
            made.put("checkpoint", "load", str(load))
        made.note("load", f"{load}, a run of slime: it goes on from its newest checkpoint")
        return None
    if kind == "nothing":
        made.note("load", f"{load} holds nothing yet: --ref-load, or without it --hf-checkpoint")
        return None
    if kind == "other":
        made.refuse(
            "load", f"{load}, in which there is no checkpoint that slime knows",
            "a run of slime, a folder of Megatron in the format torch_dist, or one of Hugging Face, or nothing there yet",
        )  # fmt: skip
        return None
    if kind == "megatron":
        made.warnings.append(
            f"--load {load}: only weights are read of a Megatron folder; the optimizer and the prompts begin anew"
        )
    return at_iteration(load, step)


def _weights(made: Made, flag: str, folder: Path | None, step: str | None) -> Path | None:
    """Return the folder of weights that a flag means.

    One that is not there, and has the name that the reference's conversion of --hf-checkpoint gives, is that of
    --hf-checkpoint: here no conversion is needed.
    """
    if folder is None:
        return None
    path = at_iteration(folder, step)
    kind = kind_of(path)
    if kind in ("megatron", "hugging_face"):
        return path
    hf = Path(made.script.value("hf_checkpoint") or "")
    other = stand_in(folder, hf) if kind == "nothing" and step is None else None
    if other is not None:
        where = "--hf-checkpoint " if other == hf else ""
        made.warnings.append(
            f"--{flag.replace('_', '-')} {folder}: nothing is there; the weights are those of {where}{other}, which need "
            "no conversion here"
        )
        return None if other == hf else other
    found = "nothing" if kind == "nothing" else "no weights that slime knows"
    made.refuse(
        flag, f"{path}: {found}", "a folder of Megatron in the format torch_dist, or one of Hugging Face"
    )
    return None


def _path(script: Script, flag: str) -> Path | None:
    words = script.take(flag)
    return Path(words[0]) if words else None


def quantized_servers(made: Made) -> None:
    """Have servers start from a quantised folder; the trainer's weights are of full precision."""
    hf = Path(made.script.value("hf_checkpoint") or "")
    if config_of(hf).get("quantization_config"):
        made.put("sglang", "model_path", hf)
        made.note(
            "hf_checkpoint", f"{hf} is quantised: servers start from it, and updates are quantised alike"
        )
