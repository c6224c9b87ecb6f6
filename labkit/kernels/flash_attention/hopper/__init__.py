"""Attention in Gluon for Hopper: tiles.py is what the kernels share; forward.py, then one_pass.py
or two_passes.py.
"""
