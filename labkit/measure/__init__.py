"""Measuring a callable: how long it takes, what memory it needs, where its time goes. Knows nothing
of models.
"""
