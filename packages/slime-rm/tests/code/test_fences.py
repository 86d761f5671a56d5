"""Finding the program of a response."""

import time

from slime_rm.code.fences import python_block


def test_a_program_is_found_in_long_runs_of_fences():
    began = time.process_time()
    for text in ("`" * 300_000 + "x`", "~`" * 200_000, "``` " * 100_000, "```python\n" + "`" * 300_000 + "x"):
        python_block(text)
    assert time.process_time() - began < 5
