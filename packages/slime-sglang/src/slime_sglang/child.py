"""A server of this run as a child process, from the settings of its engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_sglang import loader
from slime_sglang.apart import half_arguments, half_environment
from slime_sglang.key import VARIABLE
from slime_sglang.layout import Role
from slime_sglang.process import ServerProcess
from slime_sglang.section import SglangSection
from slime_sglang.server import (
    OWN_ARGUMENTS,
    server_arguments,
    server_command,
    server_environment,
    visible_device,
)


def server_child(
    model_path: Path,
    *,
    dtype: str,
    section: SglangSection,
    arguments: Mapping[str, Any],
    port: int,
    log: Path,
    key: str,
    n_ranks: int,
    n_ranks_in_all: int | None,
    role: Role,
    bootstrap_port: int,
) -> ServerProcess:
    """Return a server that is not started.

    Args:
        model_path: Hugging Face folder.
        dtype: storage and compute dtype, as torch spells it.
        section: the engine's settings.
        arguments: SGLang's own, over those of `section`.
        port: TCP port of its HTTP interface.
        log: file that its output goes to.
        key: that it asks for.
        n_ranks: tensor-parallel ranks of the server.
        n_ranks_in_all: of all servers that the run starts on this host.
        role: what it does of a request.
        bootstrap_port: where engines that generate find one that reads prompts.
    """
    given = {**OWN_ARGUMENTS, **section.server_args, **arguments}
    environment = server_environment(n_ranks=n_ranks, n_ranks_in_all=n_ranks_in_all)
    if role != "regular":
        device = visible_device()
        given = half_arguments(role, given, bootstrap_port=bootstrap_port, device=device)
        environment |= half_environment(request_timeout_s=section.request_timeout_s, device=device)
    return ServerProcess(
        server_command(
            model_path,
            port=port,
            dtype=dtype,
            arguments=["--custom-weight-loader", *loader.LOADERS, *server_arguments(given)],
        ),
        environment={**environment, "HF_HUB_OFFLINE": "1", VARIABLE: key},
        log=log,
    )
