"""The groups of model families and of weight transports. Imports no torch."""

from slime_core.errors import PluginError
from slime_core.plugins.groups import Group
from slime_core.plugins.registry import Registry

MODELS = Group(
    "slime.models",
    ("--model-name",),
    "ModelFamily",
    "weight names and shapes of a Hugging Face model_type",
    has=("model_type", "rules", "architecture"),
)
"""What slime knows about a model_type; see `slime_models.family.family.ModelFamily`."""

TRANSPORTS = Group(
    "slime.transports",
    ("--update-weight-transport",),
    "Transport",
    "how weights go from the trainer to the engine; one module with both halves",
    has=("name", "create_sender", "create_receiver"),
)
"""How weights go from the trainer to the engine; see `slime_models.transfer.transport.Transport`."""

#: The transports of this package, best first.
OWN_TRANSPORTS = ("memory", "distributed", "disk-delta", "disk")


def is_by_ranks(transport: str | None, registry: Registry) -> bool:
    """Return whether ranks of servers receive the updates of a transport themselves; of one that is not there others tell."""
    return _says("by_ranks", transport, registry)


def shares_gpus(transport: str | None, registry: Registry) -> bool:
    """Return whether ranks that receive updates themselves may be on the sender's GPU; of a transport that is not there others tell."""
    return _says("shares_gpus", transport, registry)


def _says(what: str, transport: str | None, registry: Registry) -> bool:
    if transport is None:
        return False
    try:
        return bool(getattr(registry.resolve(TRANSPORTS.name, transport), what))
    except PluginError:
        return False
