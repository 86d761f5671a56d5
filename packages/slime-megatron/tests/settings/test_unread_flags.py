"""Flags of the trainer that nothing reads: refused with what would."""

import pytest
from slime_core.checks.unread_flags import unread_flags
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry

REGISTRY = Registry.from_environment()
NEEDED = ["--hf-checkpoint", "m", "--rollout-batch-size", "4", "--rollout-max-response-len", "8"]


def unread(*flags):
    settings = load_settings([], [*NEEDED, *flags], registry=REGISTRY)
    return [str(problem) for problem in unread_flags([settings], REGISTRY)]


@pytest.mark.parametrize(
    ("flags", "wanted", "beside"),
    [
        (("--sgd-momentum", "0.5"), "--optimizer sgd", ("--optimizer", "sgd")),
        (("--adam-beta2", "0.95", "--optimizer", "sgd"), "--optimizer adam", ("--optimizer", "adam")),
        (("--mtp-loss-scaling-factor", "0.3"), "--enable-mtp-training", ("--enable-mtp-training",)),
        (("--lora-alpha", "16"), "--lora-rank", ("--lora-rank", "4")),
        (("--lora-target-modules", "linear_qkv"), "--lora-rank", ("--lora-rank", "4")),
        (("--ref-load", "r"), "--use-kl-loss or --kl-coef", ("--use-kl-loss",)),
        (("--ref-update-interval", "3"), "--use-kl-loss or --kl-coef", ("--kl-coef", "0.1")),
        (("--opd-teacher-load", "t"), "--use-opd", ("--use-opd",)),
        *(
            (
                flags,
                "--advantage-estimator ppo, or another that reads values",
                ("--advantage-estimator", "ppo"),
            )
            for flags in (
                ("--critic-lr", "1e-5"),
                ("--critic-load", "c"),
                ("--critic-lr-warmup-iters", "2"),
                ("--num-critic-only-steps", "2"),
            )
        ),
    ],
)
def test_a_flag_that_nothing_reads_is_refused_with_what_would(flags, wanted, beside):
    (told,) = unread(*flags)
    assert told.endswith(f": found {flags[0]}, which nothing reads here; wanted {wanted}, or not this flag")
    assert unread(*flags, *beside) == []
    without = unread("--train-backend", "none", *flags)
    assert [each.partition("wanted ")[2] for each in without] == [
        "--train-backend megatron, or not this flag"
    ]


@pytest.mark.parametrize(
    "flags",
    [
        ("--update-weight-disk-keep-files",),
        ("--custom-update-weight-post-write-path", "json:dumps"),
    ],
)
def test_what_is_done_with_the_folder_of_updates_is_refused_where_they_do_not_go_through_it(flags):
    for transport in (
        (),
        ("--update-weight-transport", "memory"),
    ):  # without one engines take memory, or nccl
        (told,) = unread(*transport, *flags)
        assert told.endswith(
            f": found {flags[0]}, which nothing reads here; wanted --update-weight-transport disk, or not this flag"
        )
    assert unread("--update-weight-transport", "disk", *flags) == []
    assert unread("--update-weight-mode", "delta", *flags) == []
