"""Trainers, and the parts that all of them share."""
