"""Child processes: started under a supervisor, asked with deadlines, ended with everything they started.

Read in this order: `supervisor` (the program between hone and a child), `tree` (a command under a supervisor), `child`
(a server with a log), `frames` (messages), `request_process` and `request_loop` (the two ends of a child that gets
requests), `piped` (a server on standard input and output), `restarts` (when to start again); `guard` (the token check
of HTTP servers), `listening` (limits of their clients), `http_client` (requests to services), `untrusted_json`,
`descriptors` (the limit of open files), `garbage` (how often garbage is collected), `leftovers` (removes what programs
leave), `closing` (the deadline of closing and exiting).
"""
