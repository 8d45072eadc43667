"""Functions for schedules: group layers into messages, and compute the seconds of a plan."""
