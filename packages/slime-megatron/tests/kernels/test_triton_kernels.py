"""Kernels of Triton: in its interpreter where there is no GPU, which it has to be told before it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch


def test_kernels_of_triton_compute_what_operators_of_pytorch_do():
    where = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "triton_cases.py"]
    done = subprocess.run(
        words, cwd=Path(__file__).parent, env=os.environ | where, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
