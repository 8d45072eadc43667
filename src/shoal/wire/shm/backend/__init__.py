"""What torch sees: the registration of the ``shoal`` backend and its process group.

Imports nothing: the process group is loaded when the first group is created.
"""
