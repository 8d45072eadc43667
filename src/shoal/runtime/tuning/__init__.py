"""Schedules that measure: time the steps, choose a schedule, plan the messages anew."""
