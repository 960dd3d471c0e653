"""Agents that talk to the policy over HTTP.

In reading order: `program` (loads the agent), `runner` (plays its episodes), `endpoint` (the server), `sessions` (what
was recorded), `protocol` (requests and answers), `answers` (what a client gets), `images` (in messages), `live`
(answers that are streamed), and the
protocols on the wire: `completions`, `responses`, `anthropic_messages`.
"""
