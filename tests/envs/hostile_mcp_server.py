"""An MCP server without any package that answers calls in an odd way: `python hostile_mcp_server.py WAY`."""

import json
import os
import signal
import sys
import time

WAY = sys.argv[1]


def send(message):
    sys.stdout.write((message if isinstance(message, str) else json.dumps(message)) + "\n")
    sys.stdout.flush()


def called(number):
    answer = {"jsonrpc": "2.0", "id": number, "result": {"content": [{"type": "text", "text": "2"}]}}
    if WAY == "odd ids":
        for odd in ([], {}, None, 1.5, "9" * 6000):
            send({"jsonrpc": "2.0", "id": odd, "result": {}})
        send('{"jsonrpc": "2.0", "id": %s, "result": {}}' % ("9" * 6000))
    elif WAY == "garbage":
        for _ in range(40):
            sys.stdout.write("garbage\n{}\n" * 5_000)
            sys.stdout.flush()
    elif WAY == "pings":
        for _ in range(40):
            send({"jsonrpc": "2.0", "id": "x" * 1_000_000, "method": "ping"})
    elif WAY == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif WAY == "late":
        time.sleep(0.6)
    elif WAY == "text and lists":
        answer = [{"jsonrpc": "2.0", "id": True, "result": {}}, {**answer, "id": str(number)}]
    elif WAY == "half a line":
        sys.stdout.write('{"jsonrpc": "2.0", "id": 99}')
    elif WAY == "log":
        sys.stderr.write("e" * 100_000)
        sys.stderr.flush()
    elif WAY == "environment":
        answer["result"]["content"][0]["text"] = " ".join(sorted(os.environ))
    send(answer)


for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message or "method" not in message:
        continue
    head = {"jsonrpc": "2.0", "id": message["id"]}
    if message["method"] == "initialize":
        version = message["params"]["protocolVersion"]
        send({**head, "result": {"protocolVersion": version, "capabilities": {}, "serverInfo": {"name": "x"}}})
    elif message["method"] == "tools/list":
        schema = "an object" if WAY == "schema" else {"type": "object"}
        send({**head, "result": {"tools": [{"name": "add", "inputSchema": schema}]}})
    elif message["method"] == "tools/call":
        called(message["id"])
    else:
        send({**head, "result": {}})
