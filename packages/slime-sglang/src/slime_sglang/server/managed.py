"""A server of this run as a child process, from the settings of its engine."""

from __future__ import annotations

from slime_sglang.http.api_key import KEY_VARIABLE
from slime_sglang.server.command import (
    OWN_ARGUMENTS,
    server_arguments,
    server_command,
    server_environment,
    visible_device,
)
from slime_sglang.server.disaggregation import disaggregation_arguments, disaggregation_environment
from slime_sglang.server.process import ServerProcess
from slime_sglang.settings.server import ServerSettings
from slime_sglang.weights.protocol import LOADERS


def create_server_process(
    settings: ServerSettings, *, port: int, bootstrap_port: int, key: str
) -> ServerProcess:
    """Return a server that is not started.

    Args:
        settings: of the server.
        port: TCP port of its HTTP interface.
        bootstrap_port: where decode engines find it, if it is a prefill engine.
        key: API key that it asks for.
    """
    section = settings.section
    arguments = {**OWN_ARGUMENTS, **section.server_args, **settings.arguments}
    if settings.returns_routed_experts:
        arguments["enable_return_routed_experts"] = True
    environment = server_environment(n_ranks=settings.n_ranks, n_ranks_in_all=settings.n_ranks_in_all)
    if settings.role != "regular":
        device = visible_device()
        arguments = disaggregation_arguments(
            settings.role, arguments, bootstrap_port=bootstrap_port, device=device
        )
        environment |= disaggregation_environment(request_timeout_s=section.request_timeout_s, device=device)
    return ServerProcess(
        server_command(
            settings.model_path,
            port=port,
            dtype=settings.dtype,
            arguments=["--custom-weight-loader", *LOADERS, *server_arguments(arguments)],
        ),
        environment={**environment, "HF_HUB_OFFLINE": "1", KEY_VARIABLE: key},
        log=settings.folder / f"{settings.name}.log",
    )
