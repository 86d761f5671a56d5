"""The data sources of a run, their prompts looked at beforehand: also by what its rollout makes of them."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core.config.build import BuildContext
from slime_core.data.make_source import make_eval_source, make_source, refuse_rows
from slime_core.data.mixed_source import MixedSource
from slime_core.data.prompt_source import PromptSource
from slime_core.plugins.own_name import means
from slime_core.protocols import DataSource
from slime_core.rollout.rollouts.sft import why_untrainable

#: The rollout that trains on the data's own answers.
_SUPERVISED = "slime-core/sft"


def make_sources(build: BuildContext) -> tuple[DataSource, DataSource | None]:
    """Return the data source of a run, and that of its held-out prompts, None where it has none.

    Raises:
        DataError: the data is not what the settings say, or a row has nothing that the rollout `sft` can train on; names the row.
    """
    source = make_source(build)
    if means(build.settings.rollout.rollout_function_path, _SUPERVISED):
        refuse_rows(_untrainable(source, build))
    return source, make_eval_source(build)


def _untrainable(source: DataSource, build: BuildContext) -> Iterator[str]:
    """Yield what is wrong with each row, of those that are looked at, that the rollout `sft` would end the run for."""
    if not isinstance(source, PromptSource | MixedSource):
        return
    data, most = build.settings.data, build.settings.rollout.rollout_max_context_len
    loss_mask = build.registry.resolve("slime.loss_masks", data.loss_mask_type)
    for place, sample in source.prompts():
        why = why_untrainable(
            sample,
            build.tokenizer,
            loss_mask=loss_mask,
            template_kwargs=data.apply_chat_template_kwargs,
            max_tokens=most,
        )
        if why is not None:
            yield f"{place}: {why}"
