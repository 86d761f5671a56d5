"""The data source `file`: prompts from JSONL and Parquet files and datasets, and the evaluation sets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from slime_core.config.build import BuildContext
from slime_core.config.eval_sets import EvalSet, eval_sets, has_sets
from slime_core.config.sections import DataSection, EvalSection
from slime_core.data.mixed_source import MixedSource, named_files
from slime_core.data.prompt_source import CHECKED, PromptSource, source_of
from slime_core.data.prompts import PromptFormat, RowPrompts, build_prompts, check_columns
from slime_core.data.rows.open_rows import open_rows, read_rows
from slime_core.errors import DataError
from slime_core.samples import Sample


def create_source(build: BuildContext) -> PromptSource | MixedSource:
    """Build the data source `file`: prompts from JSONL and Parquet files.

    For training, the rows of `prompt_data`: of one file, or of several by their weights. For evaluation, those of every set of `eval_prompt_data` and
    `eval_config`, one set after the other, the first `eval_num_prompts` of each, none dropped but for `eval_max_prompt_len` and
    never shuffled; the set's name is in `metadata["source_name"]`.
    """
    data = build.settings.data
    prompt_format = PromptFormat(
        input_key=data.input_key,
        label_key=data.label_key,
        metadata_key=data.metadata_key,
        tool_key=data.tool_key,
        multimodal_keys=data.multimodal_keys or {},
        media_root=_media_root(data),
        apply_chat_template=data.apply_chat_template,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
    )
    if build.evaluation:
        prototypes, places, counts = _held_out(build, prompt_format)
        return source_of(prototypes, build, place=places.__getitem__, n_samples=counts)
    if not data.prompt_data:
        raise DataError(
            "data.prompt_data: found nothing; wanted a .jsonl or .parquet file for --data-source-path file"
        )
    if len(data.prompt_data) == 1:
        return _source(data.prompt_data[0], build, prompt_format)
    files = named_files(data.prompt_data)
    sources = {
        name: _source(spec, build, prompt_format, name=name, seed_offset=number)
        for number, (name, spec) in enumerate(files.items())
    }
    weights = {name: data.prompt_data_weights.get(name, 1.0) for name in files}
    return MixedSource(sources, weights, n_samples_per_prompt=build.settings.rollout.n_samples_per_prompt)


def _source(
    spec: str,
    build: BuildContext,
    prompt_format: PromptFormat,
    *,
    name: str | None = None,
    seed_offset: int = 0,
) -> PromptSource:
    """Return the source of one file; `seed_offset` lets files of one length be shuffled differently."""
    rows = open_rows(spec)
    check_columns((rows[number] for number in range(min(len(rows), CHECKED))), prompt_format)
    prompts = RowPrompts(rows, build.tokenizer, prompt_format, source_name=name)
    return source_of(
        prompts, build, place=prompts.place, digest=lambda: prompts.digest, seed_offset=seed_offset
    )


def _media_root(data: DataSection) -> Path | None:
    if data.media_root is None or Path(data.media_root).is_dir():
        return None if data.media_root is None else Path(data.media_root)
    raise DataError(f"data.media_root: found {data.media_root}; wanted a folder")


def _held_out(build: BuildContext, prompt_format: PromptFormat) -> tuple[list[Sample], list[str], list[int]]:
    """Return the prompts of all evaluation sets, where each stands, and how many samples each gets."""
    section = build.settings.eval
    _check_pairs(section)
    prototypes: list[Sample] = []
    places: list[str] = []
    counts: list[int] = []
    for name, one in eval_sets(build.settings, build.registry).items():
        records = list(read_rows(one.path, most=section.eval_num_prompts))
        own_format = _format_of(one, section, prompt_format)
        check_columns(records, own_format)
        samples, where = build_prompts(records, build.tokenizer, prompt_format=own_format)
        for sample, place in zip(samples, where, strict=True):
            sample.metadata = {**sample.metadata, **(one.metadata_overrides or {}), "source_name": name}
            sample.custom_rm_path = one.reward
            sample.generate_function_path = one.custom_generate_function_path
            prototypes.append(sample)
            places.append(place)
            counts.append(one.n_samples_per_eval_prompt or section.n_samples_per_eval_prompt)
    return prototypes, places, counts


def _check_pairs(section: EvalSection) -> None:
    names, files = section.eval_prompt_data[::2], section.eval_prompt_data[1::2]
    if not has_sets(section) or len(names) != len(files) or len(set(names)) != len(names):
        raise DataError(
            f"eval.eval_prompt_data: found {section.eval_prompt_data}; "
            "wanted names and files in turn, each name once: gsm8k test.jsonl"
        )


def _format_of(one: EvalSet, section: EvalSection, common: PromptFormat) -> PromptFormat:
    """Return the format of an evaluation set: its own columns, else those of all sets, else those of training."""
    own: dict[str, Any] = {
        "input_key": one.input_key or section.eval_input_key,
        "label_key": one.label_key or section.eval_label_key,
        "tool_key": one.tool_key or section.eval_tool_key,
        "metadata_key": one.metadata_key,
        "multimodal_keys": one.multimodal_keys,
        "apply_chat_template": one.apply_chat_template,
        "apply_chat_template_kwargs": one.apply_chat_template_kwargs,
    }
    return dataclasses.replace(common, **{name: value for name, value in own.items() if value is not None})
