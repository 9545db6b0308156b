"""Cohorts: bags joined with labels, split into parts, cached and simulated."""
