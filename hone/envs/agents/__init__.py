"""Agents that talk to the policy over HTTP.

`endpoint` (the server), `openai_protocol`, `sessions` (what was recorded), `program` (loads the agent),
`runner` (plays its episodes).
"""
