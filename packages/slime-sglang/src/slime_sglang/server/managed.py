"""A server of this run, from the settings of its engine: a child of this process, or where the launcher has a place for it."""

from __future__ import annotations

from slime_core.errors import EngineError
from slime_core.protocols import Site
from slime_core.runtime.processes.server_process import ServerProcess

from slime_sglang.http.api_key import KEY_VARIABLE
from slime_sglang.server.command import (
    OWN_ARGUMENTS,
    Device,
    health_environment,
    server_arguments,
    server_command,
    server_environment,
    visible_device,
)
from slime_sglang.server.disaggregation import disaggregation_arguments, disaggregation_environment
from slime_sglang.server.placed import CommandLine, PlacedServer
from slime_sglang.server.spanned import SpannedPlace
from slime_sglang.settings.server import ServerSettings
from slime_sglang.weights.protocol import LOADERS


def create_server(
    settings: ServerSettings, *, ports: tuple[int, int, int], key: str
) -> ServerProcess | PlacedServer:
    """Return a server that is not started.

    Args:
        settings: of the server.
        ports: TCP ports of a child, as those of a `Site`: of its HTTP interface, where decode engines find it if it is a prefill engine,
            and where its ranks meet.
        key: API key that it asks for.
    """
    log = settings.folder / f"{settings.name}.log"
    if settings.places:
        return PlacedServer(
            SpannedPlace(settings.places),
            lambda site: _placed_line(settings, site, key),
            log=log.absolute(),
            crosses_hosts=settings.crosses_hosts,
            meets_others=settings.role != "regular",
        )
    command, environment = command_line(settings, Site("127.0.0.1", ports), key=key, device=visible_device())
    return ServerProcess(command, environment=environment, log=log, name="the SGLang server")


def command_line(settings: ServerSettings, site: Site, *, key: str, device: Device) -> CommandLine:
    """Return the command line of a server, and the variables to add to its environment.

    Args:
        settings: of the server.
        site: where it is started.
        key: API key that it asks for.
        device: what it computes on.
    """
    section = settings.section
    arguments = {**OWN_ARGUMENTS, **section.server_args, **settings.arguments}
    arguments["dist_init_addr"] = f"{site.host}:{site.ports[2]}"
    if settings.returns_routed_experts:
        arguments["enable_return_routed_experts"] = True
    if settings.releases_memory and device == "cuda":
        # No update brings a draft model's weights back after its memory was released.
        arguments |= {"enable_memory_saver": True, "enable_draft_weights_cpu_backup": True}
    environment = server_environment(
        device=device,
        n_ranks=settings.n_ranks,
        n_ranks_in_all=settings.n_ranks_in_all,
        is_placed=bool(settings.places),
    )
    if settings.health_timeout_s is not None:
        environment |= health_environment(settings.health_timeout_s)
    if settings.role != "regular":
        arguments = disaggregation_arguments(
            settings.role, arguments, bootstrap_port=site.ports[1], device=device
        )
        environment |= disaggregation_environment(
            host=site.host, request_timeout_s=section.request_timeout_s, device=device
        )
    command = server_command(
        settings.model_path,
        host=site.host,
        port=site.ports[0],
        dtype=settings.dtype,
        device=device,
        arguments=["--custom-weight-loader", *LOADERS, *server_arguments(arguments)],
    )
    return command, {**environment, "HF_HUB_OFFLINE": "1", KEY_VARIABLE: key}


def _placed_line(settings: ServerSettings, site: Site, key: str) -> CommandLine:
    """Return what is started at a place: on the GPUs that are its own there, and on the CPU only where it has none.

    Raises:
        EngineError: it has none, and no CPU serves the model.
    """
    if not site.gpus and settings.why_not_on_cpu is not None:
        raise EngineError(
            f"the SGLang server on {site.host}: found no GPU there; wanted one for {settings.model_path}: {settings.why_not_on_cpu}"
        )
    command, environment = command_line(settings, site, key=key, device="cuda" if site.gpus else "cpu")
    return command, {**environment, "CUDA_VISIBLE_DEVICES": ",".join(site.gpus)}
