"""Tools of servers that speak the Model Context Protocol (https://modelcontextprotocol.io, revision 2025-11-25).

In reading order: `transports` (JSON-RPC over pipes and HTTP), `client` (handshake, listing, calls), `environment`
(the servers of a run and its episodes), `restarted` (a program that episodes share).
"""
