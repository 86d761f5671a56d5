"""All policy losses, and a small view for them."""

import torch
from slime_core.protocols import TokenView

KL = {"use_kl_loss": True, "kl_loss_coef": 0.3}


def credits(view: TokenView, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(view.loss_mask), generator=generator, dtype=torch.float64)
