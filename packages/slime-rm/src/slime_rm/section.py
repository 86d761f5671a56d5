"""Settings of rewards that ask a server; each is also an option in `rm_args`."""

from __future__ import annotations

from slime_core.config.base import SectionModel


class RmSection(SectionModel):
    """Servers that rewards ask."""

    rm_url: str | None = None
    """Where the reward `remote_rm` posts samples."""
    reward_model_url: str | None = None
    """Server of the model that the reward `reward_model` asks, such as `http://localhost:30000`."""
    judge_url: str | None = None
    """Base of the OpenAI-compatible server that the reward `judge` asks, such as `http://localhost:30000/v1`."""
    judge_model: str | None = None
    """Model that the reward `judge` asks for."""
