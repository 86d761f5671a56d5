"""`python -m slime_compat.train ARGUMENTS`: the reference system's `train.py`, by `slime train`."""

from __future__ import annotations

import sys

from slime_core.cli.main import main

if __name__ == "__main__":
    sys.argv = ["slime", "train", "train.py", *sys.argv[1:]]
    main()
