"""Which network interface gloo's groups of a process use, its log, and what SIGTERM does to it and those that it starts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
from slime_ray.process import surroundings
from slime_ray.process.surroundings import use_interface_of

NAME = "GLOO_SOCKET_IFNAME"


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.setenv(NAME, "")
    monkeypatch.delenv(NAME)  # as it was before is brought back, set or not


@pytest.mark.parametrize(
    ("address", "wanted"), [("10.0.0.2", "eth7"), ("10.0.0.3", None), ("127.0.0.1", None)]
)
def test_gloo_uses_the_interface_that_has_the_address_but_for_loopback_ones(monkeypatch, address, wanted):
    named = {"10.0.0.2": "eth7", "127.0.0.1": "lo"}
    monkeypatch.setattr(surroundings, "interface_of", named.get)
    use_interface_of(address)
    assert os.environ.get(NAME) == wanted


def test_what_the_user_has_chosen_stays(monkeypatch):
    monkeypatch.setenv(NAME, "ib0")
    monkeypatch.setattr(surroundings, "interface_of", lambda address: "eth7")
    use_interface_of("10.0.0.2")
    assert os.environ[NAME] == "ib0"


def test_gloo_finds_the_interface_of_this_machine():
    """By the address by which another machine would be reached, where there is one."""
    from slime_core.runtime.processes.ports import interface_of

    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.255") is None  # which is nobody's (RFC 5737)
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.254", 9))  # looks for a way, and sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        own = probe.getsockname()[0]
    assert interface_of(own) in dict(map(reversed, socket.if_nameindex()))


def test_the_log_of_a_process_has_what_modules_of_the_package_tell(tmp_path):
    """`slime bench ray-start` reads there when a rank had imported."""
    told = "logging.getLogger('slime_ray.trainer.rank').info('imports took 6 s')"
    program = f"import logging; from pathlib import Path; from slime_ray.process.surroundings import begin_log; begin_log(Path('log')); {told}"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=120)
    assert "INFO slime_ray.trainer.rank: imports took 6 s" in (tmp_path / "log").read_text()


#: Is told SIGTERM as all of its group are, and ends what it starts by it: a program, and a process that it forks.
TOLD_TO_END = """
import multiprocessing, os, signal, subprocess, sys, threading
from slime_ray.process.surroundings import outlive_sigterm

waits = threading.Event().wait
outlive_sigterm()
os.kill(os.getpid(), signal.SIGTERM)
program = subprocess.Popen(["sleep", "100"])
fork = multiprocessing.get_context("fork").Process(target=waits, args=(100,))
fork.start()
for child in (program, fork):
    child.terminate()
fork.join()
print(program.wait(), fork.exitcode)
"""


@pytest.mark.parametrize(("is_deaf", "told"), [(True, "-15 -15"), (False, "")], ids=["deaf", "hearing"])
def test_an_actor_of_a_cluster_that_is_deaf_to_sigterm_goes_on_and_ends_what_it_starts(is_deaf, told):
    def deaf():
        signal.pthread_sigmask(signal.SIG_BLOCK if is_deaf else signal.SIG_UNBLOCK, {signal.SIGTERM})

    command = [sys.executable, "-c", TOLD_TO_END]
    done = subprocess.run(command, preexec_fn=deaf, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0 if is_deaf else -signal.SIGTERM, told)
