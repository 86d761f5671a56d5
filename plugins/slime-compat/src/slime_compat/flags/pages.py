"""Pages made of the tables: the reference system's flags, and verl's keys."""

from __future__ import annotations

from collections.abc import Mapping

from slime_core.config.parsing.flags import is_known
from slime_core.config.parsing.schema import Schema
from slime_core.files.json_text import shown

from slime_compat.flags.fate import Fate
from slime_compat.flags.former import FORMER
from slime_compat.flags.megatrons import MEGATRONS
from slime_compat.flags.names import NAMES
from slime_compat.flags.theirs import THEIRS
from slime_compat.launch.translate import DEFAULTS
from slime_compat.verl.keys import IDLE, IDLE_AT, KEYS
from slime_compat.verl.others import OPENRLHF, TRL

_TOP = """# The reference system's flags

What `slime train` makes of each flag of the reference system, in the arguments of its launch scripts as they stand. A command line is
taken for such if it begins with `train.py` or `train_async.py`, has `--preset slime`, or names no recipe and gives `--num-layers` and
`--hidden-size`, as every script does; `python -m slime_compat.train` and `train_async` always are. `slime config show` prints every
setting with where it came from, and what became of the other flags. Made by `scripts/generate_docs.py`.

- **accepted**: slime's own flag, of this name and meaning.
- **mapped**: to other settings.
- **follows**: accepted, and nothing need be done; the reason is in the table.
- **refused**: by name, before anything starts, with what to use instead.

All of Megatron's and SGLang's own flags are taken too: those of Megatron that describe the model are held against its config.json, and
those of SGLang go to the servers as `--sglang-*`. Flags of theirs that slime treats otherwise are in the last table.

Defaults that are the reference's, where slime's own are others:
"""


def flags_page(schema: Schema) -> str:
    """Return the page of all flags of the reference system."""
    lines = [_TOP]
    for section, fields in DEFAULTS.items():
        lines += [f"- `{section}.{name}`: `{value}`" for name, value in fields.items()]
    lines += [
        "- evaluations sample as the rollout does, where they have no flag of their own",
        "- without `--save`, nothing is saved at the end",
        "",
    ]
    for group, names in NAMES.items():
        lines += [f"## {group}", "", "| flag | | what becomes of it |", "| --- | --- | --- |"]
        lines += [_row(name, THEIRS.get(name), schema) for name in names]
        lines.append("")
    lines += ["## Megatron's and SGLang's own", "", "| flag | | what becomes of it |", "| --- | --- | --- |"]
    lines += [_row(name, fate, schema) for name, fate in MEGATRONS.items()]
    lines += ["", "## Of older scripts", "", "| flag | | what becomes of it |", "| --- | --- | --- |"]
    lines += [_row(name, fate, schema) for name, fate in FORMER.items()]
    return "\n".join([*lines, ""])


def _row(name: str, fate: Fate | None, schema: Schema) -> str:
    word, text = verdict(name, fate, schema)
    return f"| `--{name.replace('_', '-')}` | {word} | {text.replace('|', chr(92) + '|')} |"


def verdict(name: str, fate: Fate | None, schema: Schema) -> tuple[str, str]:
    """Return what becomes of a flag: a word, and why or to what."""
    if fate is None or (fate.until_ours and is_known(name, schema)):
        flag = schema.flags.get(name)
        about = (
            " ".join((flag.info.description or "").split()) if flag is not None else "a flag of Megatron's"
        )
        return "accepted", about
    if fate.kind == "refused":
        return "refused", f"{fate.what}; use {fate.instead}" if fate.instead else fate.what
    values = f" ({', '.join(fate.values)})" if fate.values else ""
    return fate.kind, fate.what + values


def keys_table() -> str:
    """Return the tables of verl's keys, for the page that tells how to come from there."""
    rows = [f"| `{name}` | {_to(key.to)} | {key.note} |" for name, key in KEYS.items()]
    idle = [f"| `{name}` | {why} |" for name, why in IDLE.items()]
    idle += [f"| `{name}` of `{shown(value)}` | {why} |" for name, (value, why) in IDLE_AT.items()]
    return "\n".join(
        [
            "| verl | slime | |",
            "| --- | --- | --- |",
            *rows,
            "",
            "Nothing need be done for:",
            "",
            "| verl | why |",
            "| --- | --- |",
            *idle,
        ]
    )


def _to(setting: str) -> str:
    return f"`{setting}`" if setting else ""


def migration_page() -> str:
    """Return the page for those who come from verl, TRL or OpenRLHF."""
    return f"""# From verl, TRL or OpenRLHF

Rewards and data come along as they are; settings have other names. Made by `scripts/generate_docs.py` from the tables that
`slime import-verl` reads, so that the page and the command say the same.

## verl

```
pip install --find-links dist slime-compat==0.1.0 slime-core==0.1.0   # wheels of `uv build --all-packages`, see README.md
slime import-verl ppo_trainer.yaml algorithm.adv_estimator=grpo data.train_files=train.parquet --output grpo.toml
slime check grpo.toml
slime train grpo.toml
```

The file is Hydra's YAML, overrides are those of verl's command line (`key=value`, `+key=value`, `~key`), and references
(`${{a.b}}`, `oc.select`, `oc.env`) are resolved. Every key that has no counterpart is named, on standard error and in the recipe. What
the configuration does not say has verl's value, and what it computes has verl's conventions (`--numerics verl`, held beside verl's own
functions by `slime bench conformance --peer verl`). Its whole batch of `data.train_batch_size` prompts is a step;
`ppo_mini_batch_size` of them is an optimizer step. Its Parquet files are read as they are: the label is `reward_model.ground_truth`,
and all other columns are metadata (`metadata_key = "*"`); a reward file is `rm_type = "verl"`.

{keys_table()}

Together, and as one would write them by hand: `data.train_files` and `data.val_files` are `data.prompt_data` and
`eval.eval_prompt_data`, `data.train_max_samples` of one file is `FILE@[0:N]`; `algorithm.use_kl_in_reward` with `kl_ctrl` is `algos.kl_coef`, `kl_target` and `kl_horizon`;
`algorithm.filter_groups` is the filter `nonzero-std` with `rollout.dynamic_sampling_max_waves`; `custom_reward_function` is
`reward.rm_type = "verl"` with its `rm_args`; `reward_model.overlong_buffer` is `reward.overlong_buffer_len`;
`algorithm.rollout_correction.rollout_is` is `algos.use_tis` with `tis_level`; `trainer.logger` is `run.tracker`.

## TRL

`--numerics trl` has the conventions of its `GRPOTrainer`. A reward function is `--rm-type trl` with
`--rm-args '{{"path": "rewards.py", "function": "name"}}'`.

| GRPOConfig | slime |
| --- | --- |
{_rows(TRL)}

`loss_type` is `loss_reducer`: `grpo` `sample-mean`, `dapo` and `bnpo` `token-mean`, `dr_grpo` `constant`. `scale_rewards` off is
`disable_grpo_std_normalization`. `importance_sampling_level` `sequence` is the estimator `gspo`. `beta` above 0 wants `use_kl_loss`, too.
`generation_batch_size` counts samples, `rollout_batch_size` prompts. `steps_per_generation` counts micro-batches: `num_steps_per_rollout` is
`steps_per_generation / gradient_accumulation_steps`, 1 where TRL's default holds. `max_steps`, `save_steps`, `eval_steps` and `ref_model_sync_steps`
count optimizer steps, the settings here rollouts: divide by `num_steps_per_rollout`. `num_iterations` must be 1: samples of a step are trained on once.

## OpenRLHF

`--numerics openrlhf` has the conventions of its losses. With `--use_kl_loss`, `--init_kl_coef` is the weight of that loss, `algos.kl_loss_coef`, and
`algos.kl_coef` stays 0. `--remote_rm_url` as an address wants `--rm-type remote_rm`, too; as a file of Python it is `--custom-rm-path`.

| train_ppo_ray | slime |
| --- | --- |
{_rows(OPENRLHF)}

`--advantage_estimator`: `gae` is `ppo`, `reinforce` `reinforce_plus_plus`, `reinforce_baseline` `reinforce_plus_plus_baseline`,
`group_norm` `grpo`, `dr_grpo` `grpo` with `disable_grpo_std_normalization`. `--vllm_num_engines` counts engines,
`fleet.rollout_num_gpus` GPUs of all of them. `--async_train` is the loop `fully-async`.
"""


def _rows(names: Mapping[str, str]) -> str:
    return "\n".join(f"| `{name}` | `{setting}` |" for name, setting in names.items())
