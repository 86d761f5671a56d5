"""What the marks of the whole repository mean, and how processes share its tests (`pytest -n 3`)."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# Over a hundred processes are started: where Python is told to write no bytecode, each would compile torch anew, for 8 s.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if "PYTEST_XDIST_WORKER" in os.environ:
    # As many threads as cores for all processes together: OpenMP's wait busily, and more than that take ten times as long.
    _SHARE = max(1, len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ.setdefault("OMP_NUM_THREADS", str(_SHARE))

# The first draw of a process reads the source of all modules that are imported, which takes seconds on a busy machine: how long a
# draw takes says nothing of its strategy, nor how long an example takes of the code.
settings.register_profile("slime", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slime")

# Under nohup a process ignores it, and so do all that it starts: runs are to hear it, as they do from a terminal.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

#: Files whose tests share a server that takes a minute to start.
_ONE_SERVER = tuple(
    f"packages/slime-sglang/tests/{name}.py"
    for name in ("test_engine", "inside/test_cpu_platform", "server/test_load", "weights/test_weight_update")
)
#: Files of few tests that take long, the longest first: last they would keep one process busy alone.
_LONGEST = (
    "tests/clusters/test_chaos.py",
    "tests/servers/test_sglang_runs.py",
    "tests/clusters/test_sglang_servers.py",
    "plugins/slime-kernels/tests/problems/test_examples.py",
    "tests/servers/test_launch_scripts.py",
    "tests/repository/test_gpu_proof.py",
    "tests/install/test_install.py",
    "tests/failures/test_resume.py",
    "tests/clusters/test_placement.py",
    "tests/repository/test_pages.py",
    "packages/slime-megatron/tests/memory/test_estimate.py",
    "tests/clusters/test_ranks.py",
    "packages/slime-megatron/tests/parallel/test_layouts.py",
    "packages/slime-megatron/tests/parallel/test_layout_checkpoints.py",
    "tests/clusters/test_job.py",
    "tests/clusters/test_slurm_script.py",
    "plugins/slime-bench/tests/test_ray_start.py",
    "tests/runs/asynchronous/test_async_loops.py",
    "tests/failures/test_interrupt.py",
    "tests/runs/test_events.py",
    "plugins/slime-bench/tests/test_simulator.py",
    "plugins/slime-bench/tests/test_overlap.py",
    "tests/runs/test_agreement.py",
    "packages/slime-megatron/tests/model/test_lora_parallel.py",
    "tests/clusters/test_environment.py",
    "tests/runs/test_stages.py",
    "plugins/slime-bench/tests/controller/test_command.py",
    "plugins/slime-bench/tests/rewards/test_command.py",
    "plugins/slime-ray/tests/test_contracts.py",
)


#: Of those, files whose tests share nothing, not even an address, and take minutes each.
_APART = ("tests/servers/test_sglang_runs.py", "tests/servers/test_launch_scripts.py")


class _ByFile(LoadScopeScheduling):
    """Keeps together the tests of a file and of a server; many come first, after the longest. With `--until` the longest come last."""

    def _assign_work_unit(self, node: Any) -> None:
        last = self.config.getoption("until") is not None
        for file in reversed(_LONGEST):
            for scope in [scope for scope in self.workqueue if scope.partition("::")[0] == file]:
                self.workqueue.move_to_end(scope, last=last)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file in _APART:
            return nodeid
        return "server" if file.endswith(_ONE_SERVER) else file


#: Objects made, less those ended, between two collections: at Python's own 700 the imports of a process take a sixth longer.
_YOUNG = 20_000
#: Seconds between two collections of all that tests left, and open files at which the second does not wait so long.
_SWEEP_S, _SWEEP_FILES = 90.0, 300

gc.set_threshold(_YOUNG)


#: The real `gc.unfreeze`, which `spared` replaces.
_UNFREEZE = gc.unfreeze


@pytest.fixture(autouse=True)
def spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeze the objects that are there before a test: a run in this process begins with a collection, which would look at all of them.

    `gc.unfreeze`, which a run calls at its end, does nothing in a test, so that the next run of the same test is as quick.
    """
    gc.freeze()
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture
def usual_collector(spared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `gc.unfreeze` do what it does."""
    monkeypatch.setattr(gc, "unfreeze", _UNFREEZE)


@pytest.fixture(autouse=True)
def own_modules(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget the modules that a test wrote into its folder and imported: another test's may have the same name."""
    if "tmp_path" not in request.fixturenames:
        yield
        return
    folder, before = str(request.getfixturevalue("tmp_path")), set(sys.modules)
    yield
    for name in sys.modules.keys() - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]


@pytest.fixture(autouse=True, scope="session")
def rays_folder() -> Iterator[None]:
    """Give this process a folder of Ray's own: a file there says which cluster of the machine is the newest, and its jobs join that one."""
    folder = tempfile.mkdtemp(prefix="ray-")  # names of sockets are short
    os.environ["RAY_TMPDIR"] = folder
    yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def last_sweep() -> list[float]:
    """When all was collected last, on the clock of `time.monotonic`."""
    return [time.monotonic()]


@pytest.fixture(autouse=True, scope="module")
def swept(last_sweep: list[float]) -> Iterator[None]:
    """Collect what the tests of a file have left, and those of the files before."""
    yield
    n_open = len(os.listdir("/proc/self/fd"))
    if n_open > _SWEEP_FILES or time.monotonic() > last_sweep[0] + _SWEEP_S:
        _UNFREEZE()
        gc.collect()
        last_sweep[0] = time.monotonic()


@pytest.fixture(autouse=True, scope="module")
def torchs_threads() -> Iterator[None]:
    """Fail a file that leaves torch more threads than it had: beside another process, all tests after it would take ten times as long."""
    yield
    if (torch := sys.modules.get("torch")) is not None and "PYTEST_XDIST_WORKER" in os.environ:
        found, wanted = torch.get_num_threads(), int(os.environ["OMP_NUM_THREADS"].partition(",")[0])
        assert found <= wanted, f"torch was left {found} threads; wanted {wanted}: set them back"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile:
    """Hand tests out file by file."""
    return _ByFile(config, log)


#: Of a session: which features of model families its tests prove, and the files that they are in.
PROOFS = pytest.StashKey[tuple[dict[str, list[str]], set[Path]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `scripts/generate_docs.py` ask which features of model families the tests prove, and CI bound its time."""
    parser.addoption("--proofs", type=Path, help="write what the collected tests prove of model families")
    until = "skip each test that has not begun by then, in seconds since 1970; the longest come last"
    parser.addoption("--until", type=float, help=until)


@pytest.fixture(scope="session")
def proofs(pytestconfig: pytest.Config) -> tuple[dict[str, list[str]], set[Path]]:
    """What the tests of this session prove of model families, and the files that they are in."""
    return pytestconfig.stash.get(PROOFS, ({}, set()))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that would begin after `--until`; the summary names its file."""
    until = item.config.getoption("until")
    if until is not None and time.time() > until:
        pytest.skip(f"no time was left for {item.location[0]}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note what tests prove, those that `-m` leaves out too; skip tests marked `gpu` where there is no CUDA device, and no others."""
    proving = [item for item in items if item.get_closest_marker("proves")]
    if proving:
        from slime_models.family.proofs import proofs_of

        proofs = {family: sorted(features) for family, features in sorted(proofs_of(proving).items())}
        config.stash[PROOFS] = proofs, {item.path for item in proving}
        if (path := config.getoption("--proofs")) is not None:
            path.write_text(json.dumps(proofs, indent=1) + "\n")
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
