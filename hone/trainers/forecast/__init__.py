"""Forecast of a run from its settings, before anything is loaded.

In reading order: `sizes` (models and lengths, from files), `setup` (who is on a device, and with what), `forecast`
(memory, time, cost), `batch` (the arithmetic of a step), `changes` (what makes a run fit, and the search), `record`
(the prediction of a run that is launched).
"""
