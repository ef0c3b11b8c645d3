"""Medusa: heads on a language model's last hidden state, each of which guesses one token further ahead."""
