"""Fixtures of this package's tests: one server to fork from, as it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slime_kernels.judge.evaluator import Evaluator, EvaluatorSettings, Options
from slime_kernels.sandbox.fork_server import CandidateServer


@pytest.fixture(scope="session")
def fork_server() -> Iterator[CandidateServer]:
    server = CandidateServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def evaluator(fork_server: CandidateServer) -> Evaluator:
    return Evaluator(EvaluatorSettings(options=Options(n_trials=3)), fork_server)
