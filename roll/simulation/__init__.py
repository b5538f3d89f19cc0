"""Prediction of a run: the real scheduler in virtual time, with cost models in place of engines and trainers."""
