"""An MCP server of the official package, for the tests: `python mcp_server.py [stdio | http PORT]`."""

import os
import sys
import time

from mcp.server import MCPServer

server = MCPServer("test")


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def process() -> str:
    """The process id of this server."""
    return str(os.getpid())


@server.tool()
def fail() -> str:
    """Raise an error."""
    raise ValueError("it is broken")


@server.tool()
def large() -> str:
    """Return 10 MB."""
    return "x" * 10_000_000


@server.tool()
def hang() -> str:
    """Block the whole server."""
    time.sleep(3600)
    return ""


if __name__ == "__main__":
    print("ready to serve", file=sys.stderr)
    if sys.argv[1:2] == ["http"]:
        server.run(transport="streamable-http", port=int(sys.argv[2]))
    else:
        server.run()
