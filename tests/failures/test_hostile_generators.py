"""Whatever a generator or a reward does, the run ends by its deadline, names it, and nothing is left running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError, SampleError
from slime_core.plugins.registry import Registry
from slime_core.rollout.group import run_group
from slime_core.run.assemble import assemble
from slime_core.runtime.event_loop import run_event_loop
from slime_core.runtime.stop import Stop

#: Generator -> what the error says about it.
TYPED = {
    "raises_an_error": "raised ZeroDivisionError: of its own",
    "exits_with_0": "raised SystemExit: 0",
    "raises_keyboard_interrupt": "raised KeyboardInterrupt",
    "raises_a_base_exception": "raised Own: no Exception",
    "raises_cancelled": "raised CancelledError, and nobody had cancelled it",
    "raises_stop_iteration": "raised StopAsyncIteration|raised RuntimeError",
    "raises_generator_exit": "raised GeneratorExit",
    "raises_without_text": "raised Mute: an error without a text",
    "raises_a_group": "raised ExceptionGroup",
    "recurses": "raised RecursionError",
    "runs_out_of_memory": "raised MemoryError",
    "fails_to_import": "raised ModuleNotFoundError",
    "returns_none": "returned NoneType; wanted its Sample",
    "returns_text": "returned str; wanted its Sample",
    "returns_ids": r"returned a list of \['int'\]; wanted",
    "returns_nothing": "returned a list of nothing; wanted",
    "returns_a_tuple": "returned tuple; wanted",
    "returns_the_class": "returned type; wanted",
    "returns_one_twice": "returned one Sample several times",
    "fans_out_without_an_id": "must give all of them the same rollout_id",
    "returns_it_pending": "came back pending",
    "mask_of_nan": r"loss_mask\[0\] is nan \(float\); wanted 0 or 1",
    "mask_of_minus_one": r"loss_mask\[0\] is -1",
    "mask_of_two": r"loss_mask\[0\] is 2",
    "mask_of_floats": r"loss_mask\[0\] is 1.0 \(float\)",
    "mask_of_text": r"loss_mask\[0\] is '1'",
    "mask_too_long": "loss_mask has 2 entries for response_length 1",
    "mask_is_an_array": "loss_mask is .* wanted a list",
    "ids_of_floats": r"tokens\[1\] is 1.7 \(float\); wanted ids, ints from 0 to 26",
    "ids_as_text": r"tokens\[1\] is '7'",
    "ids_of_bools": r"tokens\[1\] is True",
    "ids_below_zero": r"tokens\[1\] is -1",
    "ids_beyond_the_vocabulary": r"tokens\[1\] is 27",
    "ids_beyond_64_bits": r"tokens\[1\] is 1180591620717411303424",
    "another_prompt": "its 1 prompt ids came back as 1 others",
    "longer_prompt": "its 1 prompt ids came back as 2 others",
    "another_index": "index was .* and came back as 7000",
    "another_group": "group_index was .* and came back as None",
    "another_label": "label was 'x' and came back as 'y'",
    "another_text_of_the_prompt": "prompt was .* and came back as 'zzz'",
    "log_prob_of_nan": r"rollout_log_probs\[0\] is nan",
    "log_prob_of_minus_infinity": r"rollout_log_probs\[0\] is -inf",
    "log_prob_above_zero": r"rollout_log_probs\[0\] is 0.5 .*at most 0",
    "log_probs_too_many": "rollout_log_probs has 2 entries for response_length 1",
    "log_probs_of_lists": r"rollout_log_probs\[0\] is \[-0.5\]",
    "versions_of_ints": "weight_versions is 1",
    "status_as_text": "status is 'completed'",
    "status_of_another_kind": "status is 3",
    "failed_without_a_reason": "came back failed without a reason",
    "response_as_bytes": "response is b'a'",
    "response_with_a_surrogate": "response has a lone surrogate at 0",
    "response_too_long": "came back with a response of 51 tokens; wanted at most 1",
    "length_below_zero": "response_length -1 with 2 tokens",
    "length_as_float": "response_length is 1.0",
    "reward_of_nan": "reward is nan, wanted a finite number",
    "reward_as_text": "reward is '1'",
    "reward_part_of_infinity": "its reward has inf for the part 'score'",
    "metadata_with_an_object": "metadata has no JSON form: builtins.object",
    "metadata_with_keys_of_tuples": "metadata has no JSON form: keys must be str",
    "metadata_is_a_list": r"metadata is \[1\]",
    "metadata_within_itself": "metadata has no JSON form: Circular",
    "counters_as_text": r"spec_info\['spec_verify_ct'\] is 'x' \(str\); wanted a count",
    "counters_of_nan": r"prefix_cache_info\['cached_tokens'\] is nan",
    "counters_below_zero": r"spec_info\['spec_draft_token_num'\] is -1",
    "an_id_for_all_executions": "sample 1: its rollout_id, -5, is that of sample 0, too",
    "timings_of_nan": r"timings\['tool'\] is nan",
    "sampling_mask_beyond_the_vocabulary": "rollout_top_p_token_ids is 99",
    "sampling_mask_of_floats": r"rollout_top_p_token_ids is \[0.5\]",
    "sampling_mask_offsets_that_fall": "rollout_top_p_token_offsets must be 2 offsets",
    "routes_of_two_dimensions": r"rollout_routed_experts is ndarray of shape \(1, 2\)",
    "removed_as_text": "remove_sample is 'no'",
    "tokens_are_an_array": "tokens is array.* wanted a list of ids",
    "closes_the_engine": "raised ZeroDivisionError: after it closed the engine",
    "leaks_tasks": "raised ZeroDivisionError: and leaves tasks behind",
}


@pytest.fixture
def flags(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a run of two samples."""
    monkeypatch.syspath_prepend(root / "tests/plugins")
    return [
        *("--rm-type", "hostile_generators:reward", "--num-rollout", "1", "--eval-interval", "none"),
        *("--rollout-batch-size", "1", "--n-samples-per-prompt", "2"),
    ]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry()


@pytest.mark.parametrize(
    ("name", "why"), [("is_not_async", "a function that is not async"), ("yields", "a function that yields")]
)
def test_what_is_no_generator_is_refused_before_the_start(registry, letters, flags, name, why):
    settings = load_settings(
        [str(letters)],
        [*flags, "--custom-generate-function-path", f"hostile_generators:{name}"],
        registry=registry,
    )

    async def assembled(stop: Stop) -> None:
        await assemble(settings, registry)

    with pytest.raises(ConfigError, match=f"found 'hostile_generators:{name}': {why}; wanted"):
        run_event_loop(assembled)


@pytest.mark.parametrize("name", TYPED)
def test_the_error_names_the_generator_and_its_sample(registry, letters, flags, name):
    generator = f"hostile_generators:{name}"
    settings = load_settings(
        [str(letters)], [*flags, "--custom-generate-function-path", generator], registry=registry
    )

    async def generate(stop: Stop) -> None:
        run = await assemble(settings, registry)
        try:
            await run.engine.start()
            await run_group(run, run.take(1)[0], params_of=run.sampling_params)
        finally:
            await run.close()

    with pytest.raises(SampleError, match=TYPED[name]) as caught:
        run_event_loop(generate)
    told = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert generator in told
    assert "sample 0" in told or "sample 1" in told


#: Generator -> exit status of the process, what the terminal says, and what the summary says of the run's end.
ENDED = {
    "swallows_cancellation": (1, "sample 0 (", "failed"),
    "swallows_everything": (1, "sample 0 (", "failed"),
    "blocks_by_sleeping": (1, "the event loop is held by sample 0 (", "failed"),
    "blocks_by_computing": (1, "the event loop is held by sample 0 (", "failed"),
    "stops_the_loop": (1, "stopped its event loop", "failed"),
    "exits_in_a_task": (1, "called sys.exit(0); raise an error instead", "failed"),
    "exits_with_0": (
        1,
        "sample 0: the generator hostile_generators:exits_with_0 raised SystemExit: 0",
        "failed",
    ),
    "cancels_all_tasks": (1, "was cancelled", "failed"),
    "leaks_tasks": (1, "and leaves tasks behind", "failed"),
    "leaks_a_thread": (1, "and leaves a thread behind", "failed"),
    "leaks_processes": (1, "and leaves processes behind", "failed"),
    "closes_the_streams": (1, "", "failed"),
    "changes_the_folder": (1, "after it changed the folder", "failed"),
    "breaks_json": (1, "after it broke json", None),
    "raises_the_fence": (1, "after it changed the interpreter", "failed"),
    "holds_the_interpreter": (1, "holds_the_interpreter", None),
}


def end(recipe: Path, flags: list[str], name: str) -> tuple[int, str, float]:
    """Train with a generator; returns exit status, what was printed, and seconds."""
    began = time.monotonic()
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "slime_core", "train", str(recipe), *flags, "--run-name", name, "--rollout-timeout-s", "3"),
            *("--custom-generate-function-path", f"hostile_generators:{name}"),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return ended.returncode, ended.stdout + ended.stderr, time.monotonic() - began


@pytest.fixture
def importable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes import the generators."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(root / "tests/plugins"), os.environ.get("PYTHONPATH", "")])
    )


def check_end(run: Path, name: str, code: int, printed: str, seconds: float) -> None:
    status, told, outcome = ENDED[name]
    assert (name, code) == (name, status), printed
    assert told in printed, (name, printed)
    assert "Traceback" not in printed, (name, printed)
    assert seconds < 60, name
    if outcome is not None:
        summary = json.loads((run / "summary.json").read_text())
        assert (name, summary["status"], summary["eval_after"]) == (name, outcome, None)


def test_a_generator_that_calls_exit_fails_the_run(letters, flags, tmp_path, importable):
    check_end(tmp_path / "runs/exits_with_0", "exits_with_0", *end(letters, flags, "exits_with_0"))
    assert "raised SystemExit: 0" in (tmp_path / "runs/exits_with_0/log.txt").read_text()


@pytest.mark.faults
def test_the_process_ends_with_its_status_and_leaves_nothing_running(letters, flags, tmp_path, importable):
    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(ENDED, pool.map(lambda name: end(letters, flags, name), ENDED), strict=True))
    for name, ended in found.items():
        check_end(tmp_path / "runs" / name, name, *ended)
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "sleep 9871" not in processes


def test_a_reward_that_swallows_every_cancellation_ends_the_run_at_its_deadline(
    letters, flags, tmp_path, importable
):
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "slime_core", "train", str(letters), *flags, "--run-name", "stubborn"),
            *("--rm-type", "hostile_scores:stubborn_reward", "--reward-timeout-s", "1"),
        ],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    printed = ended.stdout + ended.stderr
    assert ended.returncode == 2, printed
    assert "sample 0: reward hostile_scores:stubborn_reward gave no result within 1 s" in printed
    assert "Traceback" not in printed, printed
    summary = json.loads((tmp_path / "runs/stubborn/summary.json").read_text())
    assert summary["status"] == "failed"
