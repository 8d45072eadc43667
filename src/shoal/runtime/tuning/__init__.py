"""Measure the steps of a run, choose a schedule by them, and plan the messages anew."""
