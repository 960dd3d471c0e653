"""The protocol: what clients send and get.

`wire` (protobuf), `messages` (JSON), `data` (a request as a packed batch), `losses`, `refusals` (what is not served).
"""
