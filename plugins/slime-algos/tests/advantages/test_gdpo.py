"""The estimator `gdpo`, by hand."""

import pytest
import torch
from slime_algos.advantages.gdpo import gdpo
from slime_algos.testing import view_of
from slime_core.errors import TrainerError
from slime_core.protocols import needs_of


def test_gdpo_adds_up_weighted_parts_and_leaves_the_score_alone():
    parts = {"acc": torch.tensor([1.0, -1.0, 0.0]), "brief": torch.tensor([2.0, 0.0, -2.0])}
    view = view_of([[1, 1], [1], [0, 1]], rewards=[9.0, 9.0, 9.0], reward_parts=parts)
    advantages, returns = gdpo(view, gdpo_weights={"acc": 1.0, "brief": 0.25})
    assert advantages.tolist() == [1.5, 1.5, -1.0, -0.5, -0.5]
    assert returns.tolist() == advantages.tolist()
    assert needs_of(gdpo, {"gdpo_weights": {"acc": 1.0}}) == {"reward_parts"}
    assert list(gdpo.reward_parts({"gdpo_weights": {"acc": 1.0, "brief": 0.25}})) == ["acc", "brief"]


def test_gdpo_without_parts_is_refused():
    with pytest.raises(TrainerError, match="gdpo_weights is empty"):
        gdpo(view_of([[1]], reward_parts={}))
    with pytest.raises(TrainerError, match="gdpo: TokenView has no reward_parts"):
        gdpo(view_of([[1]]), gdpo_weights={"acc": 1.0})
