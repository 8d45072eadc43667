"""The interface to torch: the registration of the ``shoal`` backend, and its process group.

This package imports nothing; creating the first group imports the process group.
"""
