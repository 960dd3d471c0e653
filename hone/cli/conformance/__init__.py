"""`hone doctor --conformance`: try every part of hone that depends on the device, and report what works.

    kit.run: for each section, a child process with a deadline --> section.main --> its checks
                                                                      `-- one message for each check, to the kit

Read `record` (one check), `kit` (starts the sections), `section` (runs in the child), then the sections: `suites` runs
those of `hone.testing` (the platform, weight sync, engines, rollouts), `kernels` and `collectives` are only here. A
crash or a hang costs the rest of its section only. This file imports no torch.
"""
