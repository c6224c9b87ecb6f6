"""Attention in Gluon for Hopper: tiles.py is what forward.py and one_pass.py share."""
