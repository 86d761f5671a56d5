"""A reward that says by which raylet of a Ray cluster its worker was started; empty where on none."""

import os

from slime_core.testing import tabular


def next_letter(sample):
    return {"score": tabular.next_letter(sample), "node": os.environ.get("RAY_RAYLET_PID", "")}
