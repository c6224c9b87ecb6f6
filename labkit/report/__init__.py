"""Tables, figures and sentences from records. Nothing under here imports torch or measures
anything.
"""
