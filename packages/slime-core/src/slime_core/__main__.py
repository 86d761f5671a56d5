"""`python -m slime_core` is the `slime` command."""

from slime_core.cli.main import main

main()
