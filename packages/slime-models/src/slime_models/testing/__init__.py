"""Contract kits of model families and weight transports. The other kinds' kits are in `slime_core.testing.contracts`."""

from slime_models.testing.families import check_family, check_quantized_family
from slime_models.testing.transports import check_transport

__all__ = ["check_family", "check_quantized_family", "check_transport"]
