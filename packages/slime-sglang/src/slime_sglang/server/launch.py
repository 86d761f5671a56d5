"""`python -m slime_sglang.server.launch ARGUMENTS`: SGLang's server, which asks for the key in `SLIME_SGLANG_KEY`, if that is set.

SGLang itself takes a key on its command line only, which every user of the host can read. On a CPU its processes do without
flashinfer, whose kernels are of CUDA: it is a sixth of the CPU time in which SGLang's modules are imported.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence

from slime_core.plugins.importing import few_collections
from slime_core.runtime.processes.stacks import write_stacks_when_asked

from slime_sglang.http.api_key import KEY_VARIABLE, ApiKey


def main(argv: list[str]) -> None:
    """Serve until told to end, as `sglang.launch_server` does."""
    leave_out(argv)
    write_stacks_when_asked(sys.stderr)
    with few_collections():
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
    """Have imports of flashinfer fail in this process, as where it is not installed, if the arguments ask for the CPU."""
    if ("--device", "cpu") in itertools.pairwise(argv):
        sys.modules["flashinfer"] = None  # type: ignore[assignment]  # as Python's documentation has it


if __name__ == "__main__":
    main(sys.argv[1:])
elif __name__ == "__mp_main__":  # in the processes that the server spawns, whose arguments are its own
    leave_out(sys.argv)
    write_stacks_when_asked(sys.stderr)
