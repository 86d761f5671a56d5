"""The ranked trainer of letters, whose ranks first print the variables of CUDA that they have, and `TOLD`: to their logs."""

from __future__ import annotations

import json
import os

from letters.ranked import RankedTrainer
from letters.ranked import create_trainer as create_ranked
from slime_core.config.build import BuildContext
from slime_core.config.factories import TrainerFactory
from slime_core.devices.cuda_variables import CUDA_VARIABLE_NAMES


def create_trainer(build: BuildContext) -> RankedTrainer:
    """Return the ranked trainer; called in each rank, and once in the driver."""
    found = {name: os.environ[name] for name in (*CUDA_VARIABLE_NAMES, "TOLD") if name in os.environ}
    print("variables", json.dumps(found), flush=True)
    return create_ranked(build)


create_trainer = TrainerFactory(create_trainer, RankedTrainer.capabilities)
