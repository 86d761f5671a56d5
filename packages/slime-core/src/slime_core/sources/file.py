"""`PromptSource`: prompt groups from a list of prototypes, epoch after epoch; `file` reads it from disk."""

from __future__ import annotations

import logging
from pathlib import Path

from slime_core.build import BuildContext
from slime_core.config.sections import DataSection, EvalSection
from slime_core.errors import DataError
from slime_core.protocols import Tokenizer
from slime_core.sample import Sample
from slime_core.sources.prompt_source import PromptSource, source_of
from slime_core.sources.prompts import PromptFormat, build_prompts
from slime_core.sources.records import read_records

_log = logging.getLogger(__name__)


def create_source(build: BuildContext) -> PromptSource:
    """Build the data source `file`: prompts from JSONL and Parquet files.

    For training, the rows of `prompt_data`. For evaluation, those of every set in `eval_prompt_data`, one set
    after the other, the first `eval_num_prompts` of each, none dropped for its length and never shuffled; the
    set's name is in `metadata["source_name"]`.
    """
    data = build.section(DataSection)
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
        prototypes, places = _held_out(build.section(EvalSection), build.tokenizer, prompt_format)
        return source_of(prototypes, build, places=places)
    if data.prompt_data is None:
        raise DataError(
            "data.prompt_data: found nothing; wanted a .jsonl or .parquet file for --data-source-path file"
        )
    prompts = build_prompts(
        read_records(data.prompt_data),
        build.tokenizer,
        prompt_format=prompt_format,
        max_prompt_len=data.rollout_max_prompt_len,
    )
    if prompts.n_dropped:
        _log.warning(
            "%s: dropped %d of %d prompts for having more than %d tokens (rollout_max_prompt_len)",
            data.prompt_data,
            prompts.n_dropped,
            prompts.n_dropped + len(prompts.prototypes),
            data.rollout_max_prompt_len,
        )
    return source_of(prompts.prototypes, build, places=prompts.places)


def _media_root(data: DataSection) -> Path | None:
    if data.media_root is None or Path(data.media_root).is_dir():
        return None if data.media_root is None else Path(data.media_root)
    raise DataError(f"data.media_root: found {data.media_root}; wanted a folder")


def _held_out(
    section: EvalSection, tokenizer: Tokenizer, prompt_format: PromptFormat
) -> tuple[list[Sample], list[str]]:
    names, files = section.eval_prompt_data[::2], section.eval_prompt_data[1::2]
    if not names or len(names) != len(files) or len(set(names)) != len(names):
        raise DataError(
            f"eval.eval_prompt_data: found {section.eval_prompt_data}; "
            "wanted names and files in turn, each name once: gsm8k test.jsonl"
        )
    prototypes: list[Sample] = []
    places: list[str] = []
    for name, spec in zip(names, files, strict=True):
        records = read_records(spec)[: section.eval_num_prompts]
        prompts = build_prompts(records, tokenizer, prompt_format=prompt_format)
        for sample in prompts.prototypes:
            sample.metadata["source_name"] = name
        prototypes += prompts.prototypes
        places += prompts.places
    return prototypes, places
