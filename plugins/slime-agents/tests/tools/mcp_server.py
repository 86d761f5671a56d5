"""An MCP server over standard input and output, for tests."""

import os

from mcp.server import MCPServer

server = MCPServer("test")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two whole numbers."""
    return str(a + b)


@server.tool()
def fail() -> str:
    """Raise."""
    raise ValueError("it does not work")


@server.tool()
def pid() -> str:
    """Return the id of the server's process."""
    return str(os.getpid())


if __name__ == "__main__":
    server.run("stdio")
