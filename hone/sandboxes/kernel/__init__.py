"""Interfaces of the Linux kernel that confine a program.

`landlock` (rules for files), `system_calls` (the seccomp filter), `mounts` (working folders of a fixed size),
`socket_memory` (what sockets hold), `cgroups` (limits of all processes of a program together).
"""
