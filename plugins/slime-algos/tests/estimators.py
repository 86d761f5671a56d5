"""Estimators, and a small view for them."""

import torch
from slime_algos.advantages.cispo import cispo
from slime_algos.advantages.gpg import gpg
from slime_algos.advantages.grpo import grpo
from slime_algos.advantages.grpo_passk import grpo_passk
from slime_algos.advantages.gspo import gspo
from slime_algos.advantages.multi_turn import multi_turn
from slime_algos.advantages.reinforce_plus_plus import reinforce_plus_plus_baseline
from slime_algos.advantages.rloo import rloo
from slime_algos.testing import random_view
from slime_core.protocols import TokenView

OUTCOME = [grpo, gspo, cispo, rloo, gpg, grpo_passk, multi_turn, reinforce_plus_plus_baseline]


def grouped(seed: int) -> TokenView:
    view = random_view(seed)
    return TokenView(**(vars(view) | {"group_ids": torch.arange(len(view.rewards)) // 3}))
