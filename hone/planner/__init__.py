"""Predicts a run before its launch: `simulation.py` its speed and the age of its tokens, if it is asynchronous."""
