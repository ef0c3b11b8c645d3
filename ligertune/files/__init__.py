"""Files that are read and written safely: those of runs, of models, and of other processes."""
