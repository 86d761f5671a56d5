"""What a job with a GPU is allowed as its driver needs it, and what it is refused as any other."""

from __future__ import annotations

import json
from pathlib import Path

from slime_kernels.judge.evaluator import EvaluatorSettings
from slime_kernels.sandbox import fork_server
from slime_kernels.timing.gpus import KernelDevice


class FakeGpu(KernelDevice):
    """A GPU whose device is one that every machine has."""

    @property
    def nodes(self):
        return ["/dev/zero"]


GPU = FakeGpu(name="a GPU", bytes_per_us=1.0, cache_bytes=1)
#: As CUDA's driver does.
SETUP = """
import json, mmap, os, socket, threading
def listens():
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    one.bind(chr(0) + "cuda-uvmfd")
    one.listen()
def names_a_thread():
    ready, done = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (ready.set(), done.wait()))
    other.start()
    ready.wait()
    try:
        open(f"/proc/self/task/{other.native_id}/comm", "w").write("cuda-EvtHandlr")
    finally:
        done.set()
"""
ALLOWED = ("listens()", "names_a_thread()", "mmap.mmap(-1, 4096)", "open('/proc/self/maps').close()", "os.stat('/proc/self/ns/pid')",
           "open('/etc/ld.so.cache').close()", "open('/proc/devices').close()", "open('/proc/sys/vm/mmap_min_addr').close()")  # fmt: skip
REFUSED = (
    "socket.socket(socket.AF_INET, socket.SOCK_STREAM)",
    "socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)",
    "socket.socket(socket.AF_NETLINK, socket.SOCK_SEQPACKET)",
    "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)",
    "mmap.mmap(-1, 1 << 21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)",
    "os.memfd_create('x')",
    "os.unshare(os.CLONE_NEWUSER)",
    "os.pidfd_open(os.getpid())",
    "open('/etc/ld.so.cache', 'r+')",
    "open('/etc/passwd')",
    "open('/proc/sys/kernel/hostname', 'w').write('x')",
    "open('/proc/sys/vm/drop_caches', 'w').write('1')",
    "open('/proc/sysrq-trigger', 'w').write('h')",
    "open('/proc/1/comm', 'w').write('x')",
    "open('/proc/1/maps').read()",
    "os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1000')",
    "os.chmod('/proc/sys', 0o777)",
)


def outcomes(fork_server, expressions, gpu):
    """What becomes of each expression in a job: the name of its error, or None."""
    lines = [SETUP, "found = []"]
    for expression in expressions:
        lines += ["try:", f"    {expression}", "    found.append(None)", "except Exception as error:"]
        lines += ["    found.append(type(error).__name__)"]
    header = {"code": "\n".join([*lines, "raise ValueError(json.dumps(found))"]), "shapes": [{"n": 1}]}
    answer = fork_server.call("compile", "facts", header, limits=EvaluatorSettings().limits, gpu=gpu)
    found = json.loads(answer.header["error"]["text"])
    return dict(zip(expressions, found, strict=True))


def test_a_job_with_a_gpu_may_do_what_its_driver_does(fork_server):
    assert outcomes(fork_server, ALLOWED, GPU) == dict.fromkeys(ALLOWED)


def test_a_job_with_a_gpu_may_do_nothing_else(fork_server):
    found = outcomes(fork_server, REFUSED, GPU)
    assert set(found.values()) <= {"PermissionError", "OSError", "FileNotFoundError"}, found


def test_a_job_without_one_may_do_none_of_it(fork_server):
    assert None not in outcomes(fork_server, (*ALLOWED, *REFUSED), None).values()


def test_a_job_with_a_gpu_has_no_capability_whoever_runs_it(fork_server):
    """It is a fork and executes no file, with which an ordinary user's capabilities in the namespace would go."""
    none = "assert open('/proc/self/status').read().split('CapPrm:')[1].split()[0] == '0' * 16"
    assert outcomes(fork_server, [none], GPU) == {none: None}


def test_the_compiler_is_that_of_cc_or_of_the_path_and_its_folders_are_shown(tmp_path):
    compiler = tmp_path / "gcc-14/bin/gcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("")
    compiler.chmod(0o755)
    link = tmp_path / "links/bin/gcc"
    link.parent.mkdir(parents=True)
    link.symlink_to(compiler)
    assert fork_server.c_compiler({"CC": str(link), "PATH": "/nowhere"}) == link
    assert fork_server.c_compiler({"PATH": f"/nowhere:{compiler.parent}"}) == compiler
    assert fork_server.c_compiler({"PATH": "/nowhere"}) is None
    assert fork_server._installed_in(link) == [str(tmp_path / "gcc-14"), str(tmp_path / "links")]
    assert fork_server._installed_in(Path("/bin/true")) == []
