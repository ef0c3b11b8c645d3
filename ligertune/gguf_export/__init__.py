"""GGUF files for llama.cpp and Ollama: hyperparameters, tokenizer, tensors, and Ollama's Modelfile."""
