"""Features: each folder holds everything of one kind of training.

Its modules `recipe`, `spec` and `command` register it: with recipes, with runs, and with the command line.
"""
