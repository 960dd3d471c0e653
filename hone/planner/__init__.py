"""Predict a run before its launch.

In reading order: `anatomy` (sizes of a model), `memory` (of a run by role and phase), `devices` (facts about them),
`roofline` (costs from these facts), `calibrated` (from timings), `costs` (of the parts of a step, given or fitted),
`simulation` (speed and age of tokens under the run's own schedule), `fleet` and `replica` (its servers), `lengths` (of
answers), `grid` (settings to compare). `hone.trainers.forecast` turns a run file into their inputs.
"""
