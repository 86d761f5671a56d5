"""`python -m slime_sglang.server.launch ARGUMENTS`: SGLang's server, which asks for the key in `SLIME_SGLANG_KEY`, if that is set.

SGLang itself takes a key on its command line only, which every user of the host can read. On a CPU its processes do without
packages of which they use nothing: flashinfer alone is a sixth of the CPU time in which SGLang's modules are imported. Temporary
files of SGLang (sockets, what it counts for Prometheus) are in the server's scratch folder, where there is one: SGLang deletes
none of them where it is killed, and it kills itself where it is asked to end.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Sequence

from slime_core.plugins.quick_imports import quick_imports
from slime_core.runtime.processes.server_process import SCRATCH_VARIABLE
from slime_core.runtime.processes.stacks import write_stacks_when_asked

from slime_sglang.http.api_key import KEY_VARIABLE, ApiKey

#: Packages of which a server on a CPU uses nothing: kernels of CUDA, and Megatron, which SGLang imports for its dumps of tensors.
_LEFT_OUT = ("flashinfer", "cutlass", "megatron")


def main(argv: list[str]) -> None:
    """Serve until told to end, as `sglang.launch_server` does."""
    leave_out(argv)
    write_stacks_when_asked(sys.stderr)
    with quick_imports():
        if scratch := os.environ.get(SCRATCH_VARIABLE):
            keep_temporary_files(scratch)
        from sglang.launch_server import run_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import kill_process_tree

    key = os.environ.pop(KEY_VARIABLE, None)  # which SGLang's other processes do not need
    load_plugins()
    server_args = prepare_server_args(argv)
    if key is not None:
        server_args.api_key = ApiKey(key)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def leave_out(argv: Sequence[str]) -> None:
    """Have imports of `_LEFT_OUT` fail in this process, as where they are not installed, if the arguments ask for the CPU."""
    if ("--device", "cpu") in itertools.pairwise(argv):
        for name in _LEFT_OUT:
            sys.modules[name] = None  # type: ignore[assignment]  # as Python's documentation has it


def keep_temporary_files(folder: str) -> None:
    """Have this process and those below it make temporary files in a folder, but for what TorchInductor compiled, which lasts."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    os.environ["TMPDIR"] = tempfile.tempdir = folder


if __name__ == "__main__":
    main(sys.argv[1:])
elif __name__ == "__mp_main__":  # in the processes that the server spawns, whose arguments are its own
    leave_out(sys.argv)
    write_stacks_when_asked(sys.stderr)
