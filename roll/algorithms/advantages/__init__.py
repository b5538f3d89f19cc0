"""Advantage estimators: one file per estimator, named by its `adv_estimator`."""
