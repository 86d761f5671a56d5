"""Data files as samples."""

from slime_compat.views.running.absent import lacking
from slime_compat.views.samples.dataset import Dataset, read_file

__all__ = ["Dataset", "read_file"]
__getattr__ = lacking(
    __name__,
    {
        "filter_long_prompt": "prompts that are too long are left out by the data source; use --rollout-max-prompt-len",
        "process_rollout_data": "ranks get their part of a batch from the trainer; use --rollout-data-postprocess-path",
        "get_minimum_num_micro_batch_size": "micro-batches are packed by the trainer; use --max-tokens-per-gpu",
    },
)
