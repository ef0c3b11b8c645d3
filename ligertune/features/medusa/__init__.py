"""Medusa: extra heads on the last hidden state that predict tokens further ahead (Cai et al. 2024)."""
