"""Errors of ranks on their way to the driver."""

from __future__ import annotations

from ray.exceptions import ActorDiedError, OutOfMemoryError
from slime_core.errors import CheckpointError, ConfigError, Problem, TrainerError
from slime_ray.process.failure import Failure, killed_for_memory


def failure_of(error: Exception) -> Failure:
    try:
        raise error
    except Exception as caught:
        return Failure.of(caught)


def test_error_comes_back_with_its_class_its_rank_and_its_traceback():
    error = failure_of(CheckpointError("step_4: is of another model")).error("rank 3 of 8")
    assert type(error) is CheckpointError
    assert str(error) == "step_4: is of another model"
    assert error.__notes__ == ["raised on rank 3 of 8"]
    assert "in failure_of" in str(error.__cause__)


def test_problems_of_settings_come_back_whole():
    error = failure_of(ConfigError([Problem("a.b", "1", "2")])).error("rank 0 of 1")
    assert isinstance(error, ConfigError)
    assert error.problems == (Problem("a.b", "1", "2"),)


def test_error_that_cannot_be_pickled_comes_back_as_text():
    class Local(Exception):
        pass

    error = failure_of(Local("out of luck")).error("rank 0 of 1")
    assert type(error) is TrainerError
    assert str(error).endswith("Local: out of luck")
    assert "in failure_of" in str(error.__cause__)


def test_error_whose_class_is_not_here_comes_back_as_text():
    failure = Failure(b"cnowhere\nNothing\n.", "nowhere.Nothing: gone", "Traceback: there\n")
    error = failure.error("rank 0 of 1")
    assert type(error) is TrainerError
    assert str(error) == "nowhere.Nothing: gone"


def test_of_rays_report_on_memory_a_sentence_is_told():
    report = "3 worker(s) were killed due to the node running low on memory.\nOOM kill reason: Memory usage 24 exceeded 23\nObject store"
    told = "Ray killed it, as its machine ran out of memory: "
    assert killed_for_memory(OutOfMemoryError(report)) == told + "Memory usage 24 exceeded 23"
    assert killed_for_memory(OutOfMemoryError("Task was killed.\nMore")) == told + "Task was killed."
    assert killed_for_memory(ActorDiedError()) is None
