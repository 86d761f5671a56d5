"""What a function cannot have here is an error that names it, from `slime check`, before anything starts."""

from __future__ import annotations

import re

import pytest
from slime_compat.adapters.megatron import ModelProvider
from slime_core.cli import main
from slime_core.errors import PluginError, SampleError


def checked(capsys, recipe, *flags: str) -> tuple[int, str]:
    status = main.run(["check", str(recipe), *flags])
    told = capsys.readouterr()
    return status, " ".join((told.out + told.err).split())


@pytest.mark.parametrize(
    "flag, path, wanted",
    [
        (
            "--custom-generate-function-path",
            "wrong_hooks.generate",
            r"the signature \(args, sample\) .* as the reference system does: \(args, sample, sampling_params\)",
        ),
        (
            "--dynamic-sampling-filter-path",
            "wrong_hooks:dapo_filter",
            r"reference system does: \(args, group\)",
        ),
        (
            "--dynamic-sampling-filter-path",
            "wrong_hooks.reads_nowhere",
            r"reads args.my_own_limit \(\S*wrong_hooks.py:\d+\), which is no setting here",
        ),
        (
            "--rollout-function-path",
            "wrong_hooks.dapo_filter",
            r"\(args, rollout_id, data_source, \*, evaluation\)",
        ),
        ("--custom-tis-function-path", "wrong_hooks.dapo_filter", "signature"),
        ("--custom-rm-path", "wrong_hooks.no_such", "does not import"),
    ],
)
def test_check_names_the_function_and_how_it_is_called_there(capsys, letters, flag, path, wanted):
    status, told = checked(capsys, letters, flag, path)
    assert status == 2
    assert path.replace(".", ":") in told or path in told
    assert re.search(wanted, told), told


def test_a_loss_that_adds_logits_up_over_ranks_is_refused_where_there_are_several(capsys, letters):
    flags = ["--custom-loss-function-path", "logits_losses.of_shards", "--tensor-model-parallel-size"]
    status, told = checked(capsys, letters, *flags, "2")
    assert status == 2, told
    assert (
        "calls all_reduce, with tensor_model_parallel_size 2; wanted a loss of logits that every rank" in told
    )
    status, told = checked(capsys, letters, *flags, "1")
    assert status == 0, told


def test_a_model_provider_is_called_as_there():
    def called(path):
        provide = ModelProvider(path=path)
        return provide("config", "architecture", pre_process=True, post_process=False)

    assert called("providers:own_config") == ("model", True, False, None)
    assert called("providers:without_stage") == ("model", True, False)
    with pytest.raises(PluginError, match=r"asks for get_args\(\), Megatron's global arguments"):
        called("global_provider:provider")


def test_check_says_what_to_use_in_the_place_of_a_module_that_is_not_here(capsys, letters):
    path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    status, told = checked(capsys, letters, "--rollout-function-path", path)
    assert status == 2 and "generating beside training is a loop here; use --loop fully-async" in told


def test_check_says_which_functions_are_taken_for_the_reference_systems(capsys, letters):
    flags = ["--custom-generate-function-path", "tool_generate.generate"]
    status, told = checked(
        capsys, letters, *flags, "--dynamic-sampling-filter-path", "wrong_hooks.reads_known"
    )
    assert status == 0, told
    assert (
        "tool_generate.generate: written for another system, called by slime_compat.adapters.generate" in told
    )
    assert "wrong_hooks.reads_known: written for another system" in told


def test_options_are_refused(train):
    flags = ["--custom-generate-function-path", "tool_generate.generate"]
    with pytest.raises(
        PluginError, match=r"found the keys turns; tool_generate.generate was written for another"
    ):
        train(*flags, "--custom-generate-function-args", '{"turns": 3}')


def test_a_wrong_return_names_the_function_and_what_was_wanted(train):
    with pytest.raises(
        PluginError, match=r"generate_nothing: returned str 'done'; wanted Sample \| list\[Sample\]"
    ):
        train("--custom-generate-function-path", "wrong_hooks.generate_nothing")
    with pytest.raises(SampleError, match="sample 0: loss_mask has 1 entries for response_length 2"):
        train("--custom-generate-function-path", "wrong_hooks.unmasked")


def test_a_reducer_that_reduces_nothing_is_refused(train):
    with pytest.raises(PluginError, match=r"returned float .3\.0.; wanted Callable"):
        train("--custom-pg-loss-reducer-function-path", "wrong_hooks.reducer")
