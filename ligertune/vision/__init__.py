"""Pictures: which models see, how pictures are read and become a model's inputs, and what of the seeing part trains."""
