"""The live page of runs.

    run folders --`runs`: what has grown--> `app`: pages, curves, rollouts, events <--HTTP-- the page of `report/`
                '--`index`: every rollout--'

`runs` follows run folders, `index` finds rollouts, `app` answers the page. `hone.cli.watch` serves it.
"""
