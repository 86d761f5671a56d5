"""The sandbox against programs that want out. Each says what it reached on standard output; it must be nothing."""

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from slime_rm.code.sandbox.running import Limits, SandboxError, follow, run

pytestmark = pytest.mark.timeout(600)
CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]


def ran(source, *, stdin="", **limits):
    return run({"main.py": textwrap.dedent(source)}, "main.py", stdin=stdin, limits=Limits(**limits))


def said(source, **limits):
    result = ran(source, **limits)
    assert (result.ending, result.code) == ("exit", 0), result
    return result.stdout.strip()


def attempts(*expressions, setup=""):
    """Return the outcome of each expression: its value, or the name of the error."""
    lines = ["import ctypes, os, socket, subprocess", "libc = ctypes.CDLL(None, use_errno=True)", setup]
    for expression in expressions:
        lines += [
            "try:",
            f"    print(repr(({expression})))",
            "except BaseException as e:",
            "    print(type(e).__name__)",
        ]
    return said("\n".join(lines)).splitlines()


def test_a_program_reads_its_input_and_writes_its_output():
    result = ran("import sys; print(sys.stdin.read().upper()); print('bad', file=sys.stderr)", stdin="a\nb")
    assert (result.ending, result.code, result.stdout, result.stderr) == ("exit", 0, "A\nB\n", "bad\n")
    assert ran("raise SystemExit(3)").code == 3
    assert ran("import os; os.abort()").ending == "signal"


def test_large_input_that_nobody_reads_does_not_hang():
    assert said("print('done')") == "done"
    assert ran("print('done')", stdin="x" * 1_000_000).stdout == "done\n"
    assert ran("import sys; print(len(sys.stdin.read()))", stdin="x" * 1_000_000).stdout == "1000000\n"


def test_no_file_of_the_machine_can_be_read(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o666)
    reached = attempts(
        f"open({str(secret)!r}).read()",
        "open('/etc/passwd').read()",
        "open('/box/../../etc/passwd').read()",
        "os.listdir('/home')",
        "os.listdir('/tmp')",
        "os.listdir('/proc')",
        "os.listdir('/sys')",
        "open('/dev/sda').read()",
        f"os.listdir({str(Path(__file__).parent)!r})",
    )
    assert reached == ["FileNotFoundError"] * 9


def test_nothing_can_be_written_but_in_the_programs_folder():
    reached = attempts(
        "open('/usr/bin/x', 'w')", "open('/bin/sh', 'a')", "open('/x', 'w')", "os.mkdir('/usr/lib/x')"
    )
    assert set(reached) <= {"PermissionError", "OSError"}
    assert said("open('mine', 'w').write('x'); print(open('/box/mine').read())") == "x"


def test_symbolic_links_lead_nowhere(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    setup = f"os.symlink('/etc/passwd', 'a'); os.symlink({str(secret)!r}, 'b'); os.symlink('../../../../etc', 'c')"
    assert (
        attempts("open('a').read()", "open('b').read()", "os.listdir('c')", setup=setup)
        == ["FileNotFoundError"] * 3
    )


def test_there_is_no_network():
    reached = attempts(
        "socket.socket()",
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.create_connection(('127.0.0.1', 22), 1)",
    )
    assert reached == ["PermissionError"] * 4


def test_no_power_can_be_had_again():
    reached = attempts(
        "libc.unshare(0x10000000), ctypes.get_errno()",
        "libc.mount(b'none', b'/box', b'tmpfs', 0, None), ctypes.get_errno()",
        "libc.ptrace(16, 1, 0, 0), ctypes.get_errno()",
        f"libc.syscall({CLONE}, 0x10000000 | 17, 0, 0, 0, 0), ctypes.get_errno()",
        "libc.chroot(b'/box'), ctypes.get_errno()",
        "os.setuid(0)",
        "os.setgid(0)",
        "os.chroot('/box')",
        "os.mknod('/box/disk', 0o60666, os.makedev(8, 0))",
    )
    assert reached[:5] == ["(-1, 1)"] * 5
    assert reached[5:] == ["PermissionError"] * 4


def test_a_program_has_no_capability():
    source = """
        import ctypes

        class Header(ctypes.Structure):
            _fields_ = [("version", ctypes.c_uint32), ("process", ctypes.c_int)]

        sets = (ctypes.c_uint32 * 6)(*[7] * 6)
        print(ctypes.CDLL(None).capget(ctypes.byref(Header(0x20080522, 0)), sets), list(sets))
    """
    assert said(source) == "0 [0, 0, 0, 0, 0, 0]"


def test_no_other_process_can_be_seen_or_signalled():
    witness = subprocess.Popen(["sleep", "1000"])
    try:
        reached = attempts(f"os.kill({witness.pid}, 9)", f"os.kill({os.getpid()}, 9)", "os.getpid() < 10")
        assert reached[:2] == ["ProcessLookupError"] * 2
        assert reached[2] == "True"
        assert ran("import os; os.kill(1, 9); os.kill(-1, 9); print('on')").ending in ("exit", "signal")
        assert witness.poll() is None
    finally:
        witness.kill()
        witness.wait()


def test_a_fork_bomb_stops_at_the_limit_and_leaves_nothing():
    source = """
        import os, time
        made = 0
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(1000)
                made += 1
        except OSError:
            print(made)
    """
    assert int(said(source, processes=8)) < 8
    assert (
        ran("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", wall_s=1.0).ending
        == "time"
    )


def test_threads_count_as_processes():
    source = """
        import threading
        stop = threading.Event()
        try:
            for made in range(100):
                threading.Thread(target=stop.wait).start()
        except RuntimeError:
            print(made)
        stop.set()
    """
    assert int(said(source, processes=8)) < 8


def test_processes_that_a_program_leaves_behind_end_with_it():
    source = """
        import os, subprocess
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execv("/usr/bin/sleep", ["sleep", "98765.25"])
            os._exit(0)
        subprocess.Popen(["sleep", "98765.25"])
        print("left")
    """
    assert said(source) == "left"
    commands = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            commands.append((folder / "cmdline").read_bytes())
        except OSError:
            continue
    assert not [command for command in commands if b"98765.25" in command]


def test_memory_files_and_open_files_are_limited():
    reached = attempts(
        "len(bytearray(1 << 33))",
        "open('big', 'wb').write(b'x' * (1 << 25))",
        "[open('/dev/null') for _ in range(200)]",
        "[open(f'{i}', 'w').close() for i in range(5000)]",
    )
    assert reached == ["MemoryError", "OSError", "OSError", "OSError"]


def test_small_files_cannot_fill_the_disk():
    source = """
        written = 0
        try:
            for i in range(100):
                with open(str(i), "wb") as file:
                    written += file.write(bytes(1 << 20))
        except OSError:
            print(written)
    """
    assert 0 < int(said(source, disk_bytes=1 << 22)) <= 1 << 22


@pytest.mark.parametrize("source", ["while True: pass", "import time; time.sleep(1000)"])
def test_a_program_is_stopped_at_its_time(source):
    assert ran(source, wall_s=0.5).ending == "time"


def test_computing_time_is_limited_by_itself():
    assert ran("while True: pass", wall_s=60.0, cpu_s=1).ending == "signal"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_flood_of_output_is_stopped_and_cut(stream):
    result = ran(f"import sys\nwhile True: sys.{stream}.write('x' * 65536)", output_bytes=100_000)
    assert result.ending == "output"
    assert len(getattr(result, stream)) == 100_000


def test_the_report_cannot_be_forged():
    forged = "[os.write(d, b'{\"status\": 0}\\n') for d in range(3, 256)]"
    assert attempts(forged) == ["OSError"]
    result = ran('import os; os.write(1, b\'{"status": 0}\\n{"ready": true}\\n\'); os._exit(7)')
    assert (result.ending, result.code) == ("exit", 7)


def test_the_environment_of_the_trainer_is_not_there(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "secret")
    assert "SECRET_TOKEN" not in said("import os; print(sorted(os.environ))")


def test_programs_can_run_side_by_side_in_threads():
    results = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: said(f"print({i})")})) for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: "0", 1: "1", 2: "2"}


@pytest.mark.parametrize("n_open", [3, 50, *range(194, 206), *range(250, 258), 1020, 1100])
def test_it_does_not_matter_how_many_files_the_process_has_open(n_open):
    """Nor has the program any of them, among which are the pipes of the sandbox itself."""
    program = """
        import os
        for number in range(1200):
            try: os.fstat(number)
            except OSError: continue
            print(number)
    """
    source = f"""
        import os, resource, textwrap
        from slime_rm.code.sandbox.running import run
        resource.setrlimit(resource.RLIMIT_NOFILE, (2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        while (last := os.open(os.devnull, os.O_RDONLY)) < {n_open}: pass
        os.close(last)
        print(run({{"main.py": textwrap.dedent({program!r})}}, "main.py").stdout.split())
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "['0', '1', '2']\n"


def test_a_confinement_that_ends_without_a_word_is_told_from_one_that_is_late():
    reported, report = os.pipe()
    os.close(report)
    with open(os.devnull, "wb") as feed, pytest.raises(SandboxError, match="ended before the program began"):
        follow(lambda: None, reported, {}, feed=feed, stdin=b"", wall_s=1.0)
    os.close(reported)


def test_where_isolation_is_not_to_be_had_nothing_is_run(tmp_path):
    source = f"""
        from slime_rm.code.sandbox.filter import forbid
        from slime_rm.code.sandbox.running import SandboxError, run
        forbid()  # takes away namespaces, as some containers do
        try:
            run({{"m.py": "open({str(tmp_path / "x")!r}, 'w')"}}, "m.py")
        except SandboxError as error:
            print(error)
    """
    refused = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, check=True
    )
    assert refused.stdout.startswith("the sandbox cannot isolate a program here (unshare: user namespaces")
    assert not (tmp_path / "x").exists()
