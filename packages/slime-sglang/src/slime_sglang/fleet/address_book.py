"""`AddressBook`: the file with the addresses of a model that is not the policy, for rewards that find it by name."""

from __future__ import annotations

from pathlib import Path

from slime_core.rundir.served_models import forget_addresses, write_addresses


class AddressBook:
    """Keeps the addresses of a model in the run's folder up to date.

    Args:
        run_dir: of the run.
        name: of the model.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        self._run_dir, self._name = run_dir, name
        self._urls: list[str] = []
        self._key: str | None = None

    async def start(self) -> None:
        """Write that there is no server yet."""
        write_addresses(self._run_dir, self._name, [])

    async def add(self, url: str, key: str | None) -> None:
        """Add a server; all of them ask for one key."""
        self._urls.append(url)
        self._key = key
        write_addresses(self._run_dir, self._name, self._urls, key=key)

    async def remove(self, url: str) -> None:
        """Remove a server, if it is there."""
        self._urls = [each for each in self._urls if each != url]
        write_addresses(self._run_dir, self._name, self._urls, key=self._key)

    async def close(self) -> None:
        """Write that the model is not served any more."""
        self._urls = []
        forget_addresses(self._run_dir, self._name)
