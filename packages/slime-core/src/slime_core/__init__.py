"""The core of slime: samples, buffer, loop protocols, plugin registry, configuration and the slime command."""
