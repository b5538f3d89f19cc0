"""Prediction of a run's speed: the real scheduler in virtual time, with cost models for engines and trainers."""
