"""Evaluation sets."""

from slime_core.config.eval_sets import EvalSet as EvalDatasetConfig

__all__ = ["EvalDatasetConfig"]
