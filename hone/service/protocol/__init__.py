"""The protocol: what clients send and get.

`wire` (protobuf), `messages` (JSON), `data` (checks of a training request), `refusals` (what is not served).
"""
