"""Start the processes of a run on this machine, watch them, and stop them.

Importing these modules does not import torch, so that a wrong command fails at once.
"""
