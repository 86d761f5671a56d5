"""`masked`: settings as others may see them, who read a run's page at a tracker and not its folder."""

from __future__ import annotations

import re
from typing import Any

#: What stands for a secret.
MASK = "***"
#: Tables of HTTP headers, of which any may be a key.
_HEADERS = "headers"
#: Table of environment variables, of which those are secrets whose names say so.
_VARIABLES = "train_env_vars"
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)


def masked(name: str, value: Any) -> Any:
    """Return the value of a setting, as JSON has it, with a mask for each secret in it.

    Args:
        name: of the setting.
        value: of the setting.
    """
    if isinstance(value, list):
        return [masked(name, one) for one in value]
    if not isinstance(value, dict):
        return value
    if name == _HEADERS:
        return dict.fromkeys(value, MASK)
    if name == _VARIABLES:
        return {key: MASK if _SECRET.search(str(key)) else one for key, one in value.items()}
    return {key: masked(str(key), one) for key, one in value.items()}
