"""The sync of weights in buckets, as `ipc`, `collective` and transports of plug-ins do it.

`sync` is the sender's and the receiver's part, `buckets` packs tensors, `channel` carries control messages, `wire`
encrypts them, and `folders` are temporary folders of a sender.
"""
