"""An MCP server over standard input and output, for tests."""

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


if __name__ == "__main__":
    server.run("stdio")
