"""Suite ``exchange``: compression, schedules and local steps on a slow network."""
