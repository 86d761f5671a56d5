"""`python -m slime_sglang.server.launch ARGUMENTS`: SGLang's server, which asks for the key in `SLIME_SGLANG_KEY`, if that is set.

SGLang itself takes a key on its command line only, which every user of the host can read.
"""

from __future__ import annotations

import os
import sys

from slime_sglang.http.api_key import KEY_VARIABLE, ApiKey


def main(argv: list[str]) -> None:
    """Serve until told to end, as `sglang.launch_server` does."""
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


if __name__ == "__main__":
    main(sys.argv[1:])
