"""Shapes of data sets: recognise the columns and values of rows, and bring unusual forms into those of `data/rows`."""
